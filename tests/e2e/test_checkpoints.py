"""Whole runs that save, are killed and go on: nothing is trained twice, nothing is left out, no bit is lost."""

from __future__ import annotations

import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flodl import Trainer
from flodl.errors import CheckpointError, PlanError
from flodl.records.schedule import read_lines
from tests.e2e.checkpointed import trainer
from tests.e2e.whole_runs import WANTED, go_on, interrupt, journalled, kill_after_a_checkpoint, newest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes in /proc"),
]


@pytest.fixture(scope="module", params=["cpu-cadence", "cpu-async"])
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    place = tmp_path_factory.mktemp(request.param)
    kill_after_a_checkpoint(request.param, place)
    return request.param, place


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_killed_run_goes_on_at_any_number_of_ranks(killed: tuple[str, Path], tmp_path: Path, world_size: int) -> None:
    mode, place = killed
    go_on(mode, place, world_size, tmp_path)


@pytest.mark.parametrize("mode", ["cpu-cadence", "cpu-async"])
def test_ctrl_c_saves_what_was_trained_and_a_resume_goes_on_from_there(mode: str, tmp_path: Path) -> None:
    place = tmp_path / "interrupted"
    assert interrupt(mode, place) == -signal.SIGINT
    _, document = newest(place / "checkpoints")
    assert 0 < document.round == max(line["round"] for line in read_lines(place / "killed" / "journal.jsonl"))
    go_on(mode, place, 2, tmp_path / "resumed")


def short(**settings: Any) -> Trainer:
    """Two quick ranks, one epoch."""
    return trainer(**({"devices": ["cpu"] * 2, "epochs": 1} | settings))


def test_a_finished_run_gives_its_result_again_and_more_epochs_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first = short(checkpoint=folder, resume="auto", run_directory=tmp_path / "first").run(quiet=True)
    assert first.resumed_from is None
    again = short(checkpoint=folder, resume="auto", run_directory=tmp_path / "again").run(quiet=True)
    assert not (tmp_path / "again" / "schedule.jsonl").exists()
    assert again.metrics == first.metrics
    assert (again.resumed_from or {})["path"] == str(newest(folder)[0])
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])
    more = short(checkpoint=folder, resume="auto", epochs=2, run_directory=tmp_path / "more").run(quiet=True)
    assert more.metrics[0] == first.metrics[0]
    assert [epoch["epoch"] for epoch in more.metrics] == [0, 1]
    assert {epoch for epoch, _ in journalled(tmp_path / "more")} == {1}
    with pytest.raises(PlanError, match="went on from"):
        short(epochs=2, run_directory=tmp_path / "refused", replay=tmp_path / "more").run()
    with pytest.raises(PlanError, match="the folder is not empty"):
        short(checkpoint=folder, run_directory=tmp_path / "refused").run()
    assert not (tmp_path / "refused").exists()


def narrow() -> dict[str, Any]:
    """Another model than the checkpoint's."""
    from tests.e2e.checkpointed import parts

    return {**parts(), "model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5))}


def test_a_checkpoint_of_another_model_names_its_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    short(checkpoint=folder, run_directory=tmp_path / "first").run(quiet=True)
    other = Trainer(
        entry="tests.e2e.test_checkpoints:narrow",
        mode="cpu-sync",
        devices=["cpu"] * 2,
        batch_size=8,
        epochs=2,
        seed=3,
        checkpoint=folder,
        resume=True,
        run_directory=tmp_path / "second",
    )
    with pytest.raises(CheckpointError, match=r"tensor 0\.0\.weight is missing") as caught:
        other.run(quiet=True)
    assert str(newest(folder)[0]) in str(caught.value)
    assert not journalled(tmp_path / "second")


class Vandal:
    """A view that puts a file in the place of the folder as soon as the run has formed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def record(self, record: dict[str, Any]) -> None:
        if record["kind"] == "commit" and self._folder.is_dir():
            shutil.rmtree(self._folder)
            self._folder.write_text("in the way")

    def close(self) -> None: ...


def test_a_folder_that_is_lost_on_the_way_costs_the_checkpoints_only(tmp_path: Path) -> None:
    directory, folder = tmp_path / "run", tmp_path / "c"
    trainer = short(checkpoint=folder, run_directory=directory, mode="cpu-async")
    result = trainer.run(view=Vandal(folder), quiet=True)
    (sentence,) = [words for words in result.degraded if "no checkpoint of round" in words]
    assert "rank 0: " in sentence
    assert "rank 1: " in sentence
    assert journalled(directory) == Counter({batch: 1 for batch in WANTED if batch[0] == 0})
