"""Trainer.run(): what it refuses, what it starts and how often, and what it gives back.

The engine behind it (solo, launcher, rank) is replaced at its three entry points; programs that are started again run
in processes of their own, without torch.
"""

import json
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flodl
from flodl import trainer as trainer_module
from flodl.errors import NativeError, PlanError, RunFailed
from flodl.plan import Role, plan_from_dict, plan_to_dict, program, sources
from flodl.plan.sources import EarlierCall
from flodl.trainer import Trainer, require_torch

DATA = [(torch.ones(2), 1.0)] * 10
HERE = "tests.unit.test_trainer"


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


def parts(**changes: Any) -> dict[str, Any]:
    return {
        "model": Net,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "loss": lambda m, b: m(b[0]).mean(),
        "data": DATA,
        **changes,
    }


def make_trainer(**changes: Any) -> Trainer:
    return Trainer(**{**parts(), "batch_size": 2, "devices": "cpu", **changes})


def build() -> dict[str, Any]:
    return parts()


def build_with_setting() -> dict[str, Any]:
    return parts(batch_size=4)


def build_nothing() -> None: ...


def build_and_run() -> dict[str, Any]:
    return Trainer(entry=f"{HERE}:build", batch_size=2, devices="cpu").run().raw


NOT_CALLABLE = 3


@dataclass
class Engine:
    """What reached the three entry points."""

    solo: list[tuple[Any, ...]] = field(default_factory=list)
    launched: list[Any] = field(default_factory=list)
    ranks: list[tuple[Any, ...]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=lambda: {"rounds": 3})
    on_solo: Any = None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine()

    def run_solo(*arguments: Any, **named: Any) -> dict[str, Any]:
        engine.solo.append(arguments)
        if engine.on_solo is not None:
            engine.on_solo()
        return dict(engine.result)

    def launch(request: Any) -> dict[str, Any]:
        engine.launched.append(request)
        return dict(engine.result)

    def run_rank(*arguments: Any) -> None:
        engine.ranks.append(arguments)
        raise SystemExit(0)

    for name, contents in (
        ("flodl.rank.solo", {"run_solo": run_solo}),
        ("flodl.rank.process", {"run_rank": run_rank}),
        ("flodl.processes.launcher", {"launch": launch, "LaunchRequest": types.SimpleNamespace}),
    ):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**contents))  # type: ignore[arg-type]
    started = sources.started()
    monkeypatch.setattr(sources, "started", lambda: sources.Started(str(tmp_path), started.argv, {"A": "1"}))
    monkeypatch.setattr(trainer_module, "_calls", trainer_module._Calls())
    return engine


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    """This test counts as a script that leads back to its call."""
    monkeypatch.setattr(program, "why_not_again", lambda: "")
    monkeypatch.setattr(program, "command_again", lambda: ("python", "train.py"))


def as_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **changes: Any) -> Role:
    role = Role(
        **{"run": "r", "rank": 0, "generation": 0, "ordinal": 0, "link": 3, "run_directory": str(tmp_path), **changes}
    )
    monkeypatch.setattr(sources, "role", lambda: role)
    return role


# ---- construction


def test_an_unknown_keyword_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(PlanError, match=r"optimiser is not among .*: did you mean optimizer\?"):
        make_trainer(optimiser=None)
    with pytest.raises(PlanError, match=r"epoch is not among .*: did you mean epochs\?"):
        make_trainer(epoch=3)


@pytest.mark.parametrize("name", ["model", "optimizer", "loss", "data"])
def test_a_part_that_is_missing(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name} is not given"):
        make_trainer(**{name: None})


@pytest.mark.parametrize("name", ["model", "optimizer", "loss", "evaluate", "scheduler", "collate", "worker_init"])
def test_a_part_that_is_no_function(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name} = 5") as caught:
        make_trainer(**{"eval_data": DATA, "evaluate": len, name: 5})
    assert caught.value.field == name


def test_evaluate_and_its_data_belong_together() -> None:
    with pytest.raises(PlanError, match="eval_data is not given"):
        make_trainer(evaluate=lambda m, loader: {})
    with pytest.raises(PlanError, match="evaluate is not given"):
        make_trainer(eval_data=DATA)


def test_callbacks_are_a_list_of_what_can_be_told() -> None:
    with pytest.raises(PlanError, match="callbacks = <built-in function print>"):
        make_trainer(callbacks=print)
    with pytest.raises(PlanError, match=r"callbacks\[1\] = 3"):
        make_trainer(callbacks=[print, 3])
    make_trainer(callbacks=[print, types.SimpleNamespace(on_evaluated=print)])


def test_an_instance_of_the_model_is_refused_when_the_trainer_is_made() -> None:
    with pytest.raises(PlanError, match="model = 'Net instance'"):
        make_trainer(model=Net())


def test_bad_settings_are_refused_when_the_trainer_is_made() -> None:
    with pytest.raises(PlanError, match="epochs = 0"):
        make_trainer(epochs=0)


# ---- one device


def test_one_device_trains_here(engine: Engine, tmp_path: Path) -> None:
    result = make_trainer(epochs=2, seed=7).run()
    ((plan, given, directory, *_),) = engine.solo
    assert (plan.mode, plan.data.epochs, plan.seed) == ("solo", 2, 7)
    assert given.model is Net
    assert Path(directory).parent == tmp_path / "runs"
    assert Path(directory).is_dir()
    assert ":" not in Path(directory).name
    assert (result.rounds, result.run_directory) == (3, directory)
    assert result.wall_s >= 0.0
    assert engine.launched == engine.ranks == []


def test_two_calls_have_two_directories(engine: Engine) -> None:
    trainer = make_trainer()
    assert trainer.run().run_directory != trainer.run().run_directory


def test_a_run_directory_of_the_users(engine: Engine, tmp_path: Path) -> None:
    wanted = tmp_path / "mine" / "deep"
    assert make_trainer(run_directory=wanted).run().run_directory == str(wanted)
    (wanted / "result.json").write_text("{}")
    with pytest.raises(PlanError, match="it holds another run"):
        make_trainer(run_directory=wanted).run()
    with pytest.raises(PlanError, match="run_directory = 3"):
        make_trainer(run_directory=3)


def test_a_run_directory_that_cannot_be_made(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    with pytest.raises(PlanError, match="run_directory") as caught:
        make_trainer().run()
    assert caught.value.field == "run_directory"
    assert engine.solo == []


def test_what_does_not_fit_the_data_is_refused_before_anything_starts(
    engine: Engine, script: None, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match="batch_size = 11"):
        make_trainer(batch_size=11).run()
    with pytest.raises(PlanError, match="at most 10 ranks"):
        make_trainer(batch_size=1, devices=["cpu"] * 11).run()
    with pytest.warns(UserWarning, match="an epoch is 2 batches for 3 ranks"):
        make_trainer(batch_size=5, devices=["cpu"] * 3).run()
    assert engine.solo == []
    assert len(engine.launched) == 1


def test_a_folder_with_something_in_it_needs_a_word(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    make_trainer(checkpoint=folder).run()
    folder.mkdir(exist_ok=True)
    make_trainer(checkpoint=folder).run()
    (folder / "old").write_text("")
    with pytest.raises(PlanError, match="the folder is not empty"):
        make_trainer(checkpoint=folder).run()
    make_trainer(checkpoint=folder, resume="auto").run()
    make_trainer(checkpoint=folder, overwrite=True).run()
    assert len(engine.solo) == 4


def test_a_run_within_a_run_is_refused(engine: Engine) -> None:
    engine.on_solo = lambda: make_trainer().run()
    with pytest.raises(PlanError, match="another run"):
        make_trainer().run()
    engine.on_solo = None
    make_trainer().run()


def test_runs_in_a_thread_count_with_the_others(engine: Engine, script: None) -> None:
    thread = threading.Thread(target=lambda: make_trainer().run())
    thread.start()
    thread.join()
    make_trainer(devices=["cpu"] * 2).run()
    assert (engine.launched[0].ordinal, len(engine.launched[0].earlier)) == (1, 1)


# ---- several devices


def test_a_launch_says_everything(engine: Engine, script: None, tmp_path: Path) -> None:
    first = make_trainer().run()
    view = types.SimpleNamespace(record=print, close=print)
    make_trainer(devices=["cpu"] * 2, batch_size=4, loader={"drop_last": True}).run(view=view, quiet=True)
    (request,) = engine.launched
    assert request.command == ("python", "train.py")
    assert (request.directory, request.environment) == (str(tmp_path), {"A": "1"})
    assert (request.ordinal, request.earlier, request.entry) == (1, (EarlierCall(first.run_directory),), None)
    assert (request.dataset_length, request.evaluates, request.quiet) == (10, False, True)
    assert request.plan.mode == "cpu-cadence"
    assert request.view is view
    assert Path(request.run_directory).name == request.run
    assert engine.solo[0][0].mode == "solo"


def test_one_rank_under_a_launcher(engine: Engine, script: None) -> None:
    make_trainer(devices=["cpu"], mode="cpu-sync").run()
    assert len(engine.launched) == 1
    assert engine.solo == []


def test_several_ranks_from_a_test_need_an_entry(engine: Engine) -> None:
    with pytest.raises(PlanError) as caught:
        make_trainer(devices=["cpu"] * 2).run()
    assert "pytest is running" in str(caught.value)
    assert 'entry="package.module:build"' in str(caught.value)
    assert engine.launched == []
    assert make_trainer().run().rounds == 3, "one device needs none"


def test_an_entry_starts_flodls_own_program(engine: Engine) -> None:
    result = Trainer(entry=f"{HERE}:build", batch_size=2, devices=["cpu"] * 2).run()
    (request,) = engine.launched
    assert request.command == (sys.executable, "-m", "flodl.rank")
    assert (request.entry, request.dataset_length) == (f"{HERE}:build", 10)
    assert result.rounds == 3


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("tests.unit.test_trainer", "package.module:function"),
        (":build", "package.module:function"),
        ("a b:build", "package.module:function"),
        (build, "package.module:function"),
        ("tests.unit.nowhere:build", "there is no module tests.unit.nowhere"),
        ("__main__:build", "in a file that can be imported"),
        (f"{HERE}:nothing", "has no nothing"),
        (f"{HERE}:NOT_CALLABLE", "cannot be called"),
        (f"{HERE}:build_nothing", "returned NoneType"),
        (f"{HERE}:build_with_setting", "batch_size is a setting of the run"),
    ],
    ids=str,
)
def test_an_entry_that_gives_no_parts(engine: Engine, entry: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Trainer(entry=entry, batch_size=2, devices=["cpu"] * 2).run()
    assert engine.launched == []


def test_an_entry_and_parts_exclude_each_other() -> None:
    with pytest.raises(PlanError, match="without model, optimizer, loss, data"):
        make_trainer(entry=f"{HERE}:build")


def test_an_entry_whose_own_import_fails_shows_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_parts.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        Trainer(entry="broken_parts:build", batch_size=2, devices="cpu").run()


# ---- in a rank


def test_a_rank_trains_its_own_call(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    role = as_rank(monkeypatch, tmp_path)
    with pytest.raises(SystemExit):
        make_trainer(devices=["cpu"] * 2).run()
    ((plan, given, got),) = engine.ranks
    assert got is role
    assert given.model is Net
    assert plan_from_dict(plan_to_dict(plan)) == plan
    assert engine.launched == engine.solo == []


def test_earlier_calls_give_what_they_gave(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for directory, result in ((good, {"rounds": 9}), (bad, {"phase": "failed", "reason": "rank 1 fell"})):
        directory.mkdir()
        (directory / "result.json").write_text(json.dumps(result))
    refused = EarlierCall("", "PlanError", "devices = 0 is not allowed")
    earlier = (*map(EarlierCall, (str(good), str(bad), str(tmp_path / "none"))), refused)
    as_rank(monkeypatch, tmp_path, ordinal=len(earlier), earlier=earlier)
    trainer = make_trainer(devices=["cpu"] * 2)
    assert trainer.run().rounds == 9
    with pytest.raises(RunFailed, match="rank 1 fell") as caught:
        trainer.run()
    assert caught.value.log_path == str(bad)
    with pytest.raises(RunFailed, match="left no result"):
        trainer.run()
    with pytest.raises(PlanError, match=r"^devices = 0 is not allowed"):
        trainer.run()
    with pytest.raises(SystemExit):
        trainer.run()
    assert len(engine.ranks) == 1


def test_refused_calls_count(engine: Engine, script: None) -> None:
    with pytest.raises(PlanError) as caught:
        make_trainer(batch_size=11).run()
    make_trainer(devices=["cpu"] * 2).run()
    refused = EarlierCall("", "PlanError", str(caught.value))
    assert (engine.launched[0].ordinal, engine.launched[0].earlier) == (1, (refused,))


def test_a_failed_call_keeps_its_directory_and_what_it_raised(engine: Engine, script: None, tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError("gone")

    engine.on_solo = fail
    with pytest.raises(KeyError):
        make_trainer(run_directory=tmp_path / "mine").run()
    make_trainer(devices=["cpu"] * 2).run()
    assert engine.launched[0].earlier == (EarlierCall(str(tmp_path / "mine"), "KeyError", "'gone'"),)


def test_ranks_get_the_time_of_the_script_without_that_of_its_runs(
    engine: Engine, script: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "running_s", lambda: 1000.0)
    monkeypatch.setattr(trainer_module._calls, "spent_s", 900.0)
    make_trainer(devices=["cpu"] * 2).run()
    assert engine.launched[0].script_s == pytest.approx(100.0)
    Trainer(entry=f"{HERE}:build", batch_size=2, devices=["cpu"] * 2).run()
    assert engine.launched[1].script_s == 0.0, "an entry runs none of the script"


def test_parts_are_not_built_by_another_run(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_rank(monkeypatch, tmp_path, entry=f"{HERE}:build_and_run")
    with pytest.raises(PlanError, match="which a rank calls for its parts"):
        build_and_run()
    assert engine.ranks == []


def test_a_process_of_a_rank_that_is_not_the_rank(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sources.INSIDE, "run:1:1")
    with pytest.raises(PlanError, match="which rank 1 of run run started") as caught:
        make_trainer().run()
    assert 'if __name__ == "__main__":' in str(caught.value)
    assert engine.solo == []


def test_public_names() -> None:
    assert set(flodl.__all__) == set(dir(flodl))
    for name in flodl.__all__:
        assert getattr(flodl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = flodl.Trainr


def test_what_training_needs_and_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "numpy" else name)
    with pytest.raises(
        NativeError, match=r"training needs numpy, not installed here\nRun: pip install 'flodl\[torch\]'"
    ):
        require_torch()
