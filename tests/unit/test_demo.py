"""The demo: its settings, its folders, the proof of its checkpoint, its options, and all of it once in small."""

import gzip
import io
import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from flodl.bench import demo, demo_checkpoint
from flodl.bench.demo import Wish, _find_images, _solo_steps
from flodl.bench.demo_checkpoint import (
    MARK,
    Folders,
    command_of,
    is_replaced,
    mark_folder,
    newest_folder,
    read_setting,
    refuse_difference,
    with_more_epochs,
)
from flodl.bench.demo_figures import Figures, write_figures
from flodl.bench.demo_setting import Setting
from flodl.checkpoint.document import Document
from flodl.checkpoint.resume import Checkpoint
from flodl.cli.demo import demo as command
from flodl.datasets import fashion
from flodl.datasets.fashion import FetchError, FileSpec, Source
from flodl.errors import CheckpointError, PlanError
from flodl.protocol.ledger import epoch_sizes
from flodl.protocol.messages import BatchRange, DataSpec, LayoutSpec
from flodl.result import RunResult

DEVICES = ("emulated:10.00ms", "emulated:47.00ms", "emulated:47.00ms")
SETTING = Setting("some images", None, 0.05, False, "cpu-cadence", DEVICES, 1497, 72)


# Settings


@pytest.mark.parametrize("batches", [1, 23, 24, 25, 72, 92])
def test_a_setting_asks_for_so_many_batches_whatever_the_last_of_an_epoch_holds(batches: int) -> None:
    setting = msgspec.structs.replace(SETTING, batches=batches)
    per_epoch = setting.batches_per_epoch
    assert per_epoch == 24
    assert sum(epoch_sizes(per_epoch, -(-batches // per_epoch), 1497, setting.samples, 64)) == batches


def test_a_slow_device_alone_takes_fewer_steps() -> None:
    assert _solo_steps("emulated:20.00ms") == demo.SOLO_STEPS
    assert _solo_steps("emulated:400.00ms") == 15
    assert _solo_steps("emulated:5000.00ms") == demo.LEAST_SOLO_STEPS


def started_at(settled: int) -> Checkpoint:
    contributed = tuple(BatchRange(at // 24, 0, min(24, settled - at)) for at in range(0, settled, 24))
    layout, data = LayoutSpec(0, (), ()), DataSpec(1497, "")
    document = Document(1, "run", 5, {}, layout, data, 3, contributed, (), (), 4, (), ())
    return Checkpoint(Path("round-000005"), document)


@pytest.mark.parametrize(("settled", "epochs", "batches"), [(72, 1, 96), (72, 3, 144), (20, 1, 24), (50, 1, 72)])
def test_more_epochs_end_where_an_epoch_ends(settled: int, epochs: int, batches: int) -> None:
    assert with_more_epochs(SETTING, started_at(settled), epochs).batches == batches


# Folders


def test_a_new_demo_has_a_folder_of_its_own_and_replaces_only_what_a_demo_left(tmp_path: Path) -> None:
    one, two = (Folders.beside(tmp_path, None) for _ in range(2))
    assert one.home != two.home
    assert one.checkpoint.parent == one.home
    assert not is_replaced(one.checkpoint)
    chosen = Folders.beside(tmp_path, str(tmp_path / "kept")).checkpoint
    assert chosen == tmp_path / "kept"
    mark_folder(chosen, SETTING)
    assert is_replaced(chosen)
    assert read_setting(chosen) == SETTING
    (chosen / MARK).rename(chosen / "round-000001")
    with pytest.raises(PlanError, match="a demo must not replace what it holds") as refused:
        is_replaced(chosen)
    assert refused.value.field == "checkpoint"


def test_a_file_in_place_of_the_folder_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    for refuse in (lambda: is_replaced(path), lambda: mark_folder(path, SETTING)):
        with pytest.raises(PlanError, match=str(path)):
            refuse()


def test_the_newest_demo_is_found_and_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no demo has left a checkpoint"):
        newest_folder(tmp_path)
    for name in ("demo-20260102-000000-aaaa", "demo-20260103-000000-0000", "demo-20260101-000000-ffff"):
        folder = tmp_path / "runs" / name / "checkpoint"
        mark_folder(folder, SETTING)
        (folder / "round-000001").mkdir()
    mark_folder(tmp_path / "runs" / "demo-20260104-000000-0000" / "checkpoint", SETTING)
    assert newest_folder(tmp_path).parent.name == "demo-20260103-000000-0000"


@pytest.mark.parametrize("content", [None, "", "{}", '{"data": 3}', "\udc80"])
def test_a_folder_that_is_no_demos_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / MARK).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=f"{tmp_path} is no folder of a demo's checkpoints"):
        read_setting(tmp_path)


def test_the_command_that_resumes_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_of(tmp_path / "runs" / "a demo") == "fdl demo --resume 'runs/a demo'"
    assert command_of(Path("/elsewhere")) == "fdl demo --resume /elsewhere"
    (tmp_path / "fdl").write_text("")
    assert command_of(tmp_path / "runs") == "./fdl demo --resume runs"


# The proof


def result_of(accuracy: float, value: float = 0.0) -> RunResult:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    raw = {"training_s": 2.0, "batches": 72, "ranks": [{"pauses_s": {}}] * 3}
    return RunResult(
        [{"epoch": 0, "accuracy": accuracy}], [0.5, 0.25, 0.25], None, None, 3, 0, [], [], 4.0, "/r", raw, _model=model
    )


def test_a_checkpoint_that_gives_anything_else_back_is_an_error() -> None:
    run = result_of(0.5, 1.0)
    refuse_difference("here", run, result_of(0.0, 1.0), 0.5)
    with pytest.raises(CheckpointError, match="here holds other parameters than the run ended with: weight"):
        refuse_difference("here", run, result_of(0.5, 1.0 + 2**-23), 0.5)
    with pytest.raises(CheckpointError, match=r"gets 0\.25 of the test right"):
        refuse_difference("here", run, result_of(0.5, 1.0), 0.25)


# Figures


def test_figures_are_said_and_written_alike(tmp_path: Path) -> None:
    rates = dict(zip(DEVICES, (20.0, 10.0, 10.0), strict=True))
    alone = replace(result_of(0.5), metrics=[{"epoch": 0, "loss": float("nan"), "accuracy": 0.5}])
    figures = Figures(SETTING, alone, result_of(0.625), rates)
    said: list[str] = []
    figures.say(said.append)
    text = "\n".join(said)
    assert "62.5 %" in text
    assert "E 0.900, E_wall 0.450" in text
    write_figures(tmp_path / "f.json", figures.as_dict())
    found = json.loads((tmp_path / "f.json").read_text())
    assert (found["together"]["accuracy"], found["together"]["E"], found["speed_up"]) == (0.625, 0.9, 1.0)
    assert found["together"]["ranks"][1] == {"rank": 1, "device": DEVICES[1], "steps_per_s_alone": 10.0, "share": 0.25}
    assert found["alone"]["epochs"][0]["loss"] is None
    assert found["best_speed_up"] == 2.0


# Images


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Fashion-MNIST; where its cache would be."""
    monkeypatch.setattr(fashion, "SYSTEM_DIRECTORY", tmp_path / "nowhere")
    monkeypatch.setattr(fashion, "cache_directory", lambda: tmp_path / "cache")
    monkeypatch.setattr(demo, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_images_are_fetched_only_where_that_is_wished(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Source, Path]] = []
    monkeypatch.setattr(demo, "fetch", lambda source, directory: asked.append((source, directory)))
    said: list[str] = []
    assert _find_images(Wish(), said.append) is None
    assert asked == []
    assert len(said) == 1
    assert "--fetch" in said[0]
    source = Source("http://127.0.0.1:9/", (FileSpec("a", "", 2_000_000),))
    assert _find_images(Wish(may_fetch=True, source=source), said.append) == str(bare)
    assert asked == [(source, bare)]
    assert f"2 MB from http://127.0.0.1:9/ to {bare}" in said[1]
    assert _find_images(Wish(directory="there", may_fetch=True), said.append) == str(Path.cwd() / "there")
    assert len(asked) == 1


@pytest.mark.usefixtures("bare")
def test_what_cannot_be_fetched_is_said_in_one_line_and_the_digits_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FetchError("http://host/file cannot be fetched: no route")

    monkeypatch.setattr(demo, "fetch", fail)
    said: list[str] = []
    assert _find_images(Wish(may_fetch=True), said.append) is None
    assert said[1:] == ["scikit-learn's digits instead of Fashion-MNIST: http://host/file cannot be fetched: no route"]


# Options


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command called, in place of a demo of minutes."""
    calls: list[Any] = []

    def run(wish: Wish, say: Any) -> dict[str, Any]:
        calls.append(wish)
        say("a line")
        return {"alone": {"accuracy": 0.5}}

    def resume(wish: Wish, folder: str, say: Any) -> dict[str, Any]:
        calls.append((wish, folder))
        return {}

    monkeypatch.setattr(demo, "run_demo", run)
    monkeypatch.setattr(demo, "resume_demo", resume)
    return calls


def test_a_quiet_demo_prints_nothing_and_still_writes_its_figures(called: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    done = CliRunner().invoke(command, ["--quiet", "--json", str(path)])
    assert (done.exit_code, done.output) == (0, "")
    assert json.loads(path.read_text())["alone"] == {"accuracy": 0.5}
    assert json.loads(path.read_text())["wall_s"] >= 0.0
    assert "a line" in CliRunner().invoke(command).output
    assert called == [Wish(), Wish()]


def test_options_reach_the_demo(called: list[Any]) -> None:
    arguments = ["--data", "d", "--epochs", "3", "--mode", "cpu-async", "--checkpoint", "c", "--fetch"]
    assert CliRunner().invoke(command, arguments).exit_code == 0
    for resume in (["--resume"], ["--resume", "folder"]):
        assert CliRunner().invoke(command, resume).exit_code == 0
    assert called == [Wish("d", 3, "cpu-async", "c", True), (Wish(), ""), (Wish(), "folder")]
    refused = CliRunner().invoke(command, ["--resume", "--checkpoint", "c"])
    assert refused.exit_code == 2
    assert len(called) == 3


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_person_at_a_terminal_is_what_fetches(
    called: list[Any], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    monkeypatch.setattr(sys, "stdout", Screen())
    for arguments in ([], ["--no-fetch"], ["--fetch"]):
        command.main(arguments, standalone_mode=False)
    assert [wish.may_fetch for wish in called] == [is_terminal, False, True]


# The whole command, small


def write_images(directory: Path, train: int, test: int) -> None:
    """Of ten classes that a model tells apart at once: stripes at ten places."""
    directory.mkdir()
    for part, count in (("train", train), ("t10k", test)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = np.random.default_rng(count).integers(0, 40, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 4] = 255
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (directory / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes(), 1))


def run_command(directory: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    path = directory / "figures.json"
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(
        [sys.executable, "-c", "from flodl.cli.main import main; main()", "demo", "--json", str(path), *arguments],
        cwd=directory,
        env={**inherited, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    found = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    return done, found


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_small_demo_leaves_a_checkpoint_that_resumes(tmp_path: Path) -> None:
    write_images(tmp_path / "images", 1910, 100)
    folder = tmp_path / "kept"
    done, found = run_command(tmp_path, "--data", "images", "--epochs", "2", "--checkpoint", "kept")
    assert done.returncode == 0, done.stderr
    together, checkpoint = found["together"], found["checkpoint"]
    assert found["alone"]["batches"] == together["batches"] == 60
    assert sum(rank["share"] for rank in together["ranks"]) == pytest.approx(1.0)
    assert 0.0 < together["E_wall"] <= together["E"]
    assert checkpoint["directory"] == str(folder)
    assert checkpoint["accuracy"] == together["accuracy"]
    assert checkpoint["further_batches"] == demo_checkpoint.FURTHER_BATCHES
    assert "fdl demo --resume kept" in done.stdout
    assert max(folder.glob("round-*")) == Path(checkpoint["path"])

    done, more = run_command(tmp_path, "--resume", "kept", "--quiet")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert more["resumed_from"] == {"path": checkpoint["path"], "round": checkpoint["round"]}
    assert more["together"]["batches"] == 30
    assert more["together"]["epochs"][:2] == together["epochs"]
    assert [epoch["epoch"] for epoch in more["together"]["epochs"]] == [0, 1, 2]

    (tmp_path / "images" / "t10k-labels-idx1-ubyte.gz").unlink()
    done, _ = run_command(tmp_path, "--data", "images", "--checkpoint", "kept")
    assert done.returncode == 1
    assert "has no t10k-labels-idx1-ubyte" in done.stderr
