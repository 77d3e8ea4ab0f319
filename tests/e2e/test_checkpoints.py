"""Whole runs that save, are killed and go on: nothing is trained twice, nothing is left out, no bit is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from flodl import Trainer
from flodl.checkpoint.document import CONSENSUS, Document, optimizer_file, read_whole
from flodl.checkpoint.folder import find_checkpoints
from flodl.checkpoint.velocity import VELOCITY
from flodl.errors import CheckpointError, PlanError
from flodl.rank.optimizer_state import read_state
from flodl.records.schedule import read_lines
from tests.e2e.checkpointed import BATCHES, EPOCHS, LOG, trainer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes in /proc"),
]
Batch = tuple[int, int]
WANTED = {(epoch, index): 1 for epoch in range(EPOCHS) for index in range(BATCHES)}
DEVICES = {
    1: ["cpu"],
    2: ["emulated:4ms", "emulated:9ms"],
    3: ["emulated:4ms", "emulated:9ms", "emulated:13ms"],
    5: ["emulated:4ms", "emulated:9ms", "emulated:13ms", "emulated:4ms", "emulated:9ms"],
}


def newest(folder: Path) -> tuple[Path, Document]:
    path = find_checkpoints(folder)[0][1]
    return path, read_whole(path)


def batches(ranges: Any) -> list[Batch]:
    return [(epoch, index) for epoch, first, count in ranges for index in range(first, first + count)]


def named(document: Document) -> Counter[Batch]:
    return Counter(batches((b.epoch, b.first, b.count) for b in document.contributed))


def journalled(directory: Path) -> Counter[Batch]:
    return Counter(batch for line in read_lines(directory / "journal.jsonl") for batch in batches(line["contributed"]))


def first_leased(directory: Path) -> list[Batch]:
    """Every batch at its first lease, in the order of leases."""
    lines = [line for line in read_lines(directory / "schedule.jsonl") if line["kind"] == "lease"]
    return list(dict.fromkeys(batch for line in lines for batch in batches(line["batches"])))


def steps(checkpoint: Path, rank: int | None) -> float:
    """How often this rank's optimizer had stepped as the checkpoint has it; None: the one that had most often."""
    parts = sorted(checkpoint.glob("rank-*.safetensors")) if rank is None else [checkpoint / optimizer_file(rank)]
    return max(read_state(part).step_count() for part in parts)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_after_a_checkpoint(mode: str, place: Path) -> Path:
    """Starts a run and kills its launcher with signal 9 once a checkpoint is whole. Returns the folder."""
    folder = place / "checkpoints"
    settings = {"mode": mode, "checkpoint": str(folder), "run_directory": str(place / "killed"), "epochs": 40}
    command = [sys.executable, "-m", "tests.e2e.checkpointed", json.dumps(settings)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        ends = time.monotonic() + 60.0
        while not find_checkpoints(folder):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < ends, "no checkpoint came"
            time.sleep(0.005)
        ranks = children_of(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(ranks) == 3
        while any(is_alive(pid) for pid in ranks):
            assert time.monotonic() < ends, "ranks outlive their launcher"
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    return folder


@pytest.fixture(scope="module", params=["cpu-cadence", "cpu-async"])
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    place = tmp_path_factory.mktemp(request.param)
    kill_after_a_checkpoint(request.param, place)
    return request.param, place


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_killed_run_goes_on_at_any_number_of_ranks(
    killed: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    mode, place = killed
    folder = tmp_path / "checkpoints"
    shutil.copytree(place / "checkpoints", folder)
    saved, document = newest(folder)
    assert document.has(VELOCITY) == (mode == "cpu-async")
    assert {file.name for file in document.files} >= {CONSENSUS, *(f"rank-{rank}.safetensors" for rank in range(3))}
    assert [steps(saved, rank.rank) for rank in document.ranks] == [rank.batches for rank in document.ranks]
    until = [line for line in read_lines(place / "killed" / "journal.jsonl") if line["round"] <= document.round]
    assert Counter(batch for line in until for batch in batches(line["contributed"])) == named(document)
    left = [batch for batch in sorted(WANTED) if batch not in named(document)]
    assert 0 < len(left) < len(WANTED)

    log = tmp_path / "log"
    if world_size == 1:
        monkeypatch.setenv(LOG, str(log))
    with safe_open(saved / CONSENSUS, framework="pt") as file:
        committed = int(file.metadata()["hash"], 16)
    directory = tmp_path / "run"
    result = trainer(
        mode=mode if world_size > 1 else "solo",
        devices=DEVICES[world_size],
        checkpoint=folder,
        resume=True,
        run_directory=directory,
    ).run(quiet=True)
    assert result.resumed_from == {"path": str(saved), "round": document.round}
    assert [epoch["epoch"] for epoch in result.metrics] == list(range(EPOCHS))
    assert [epoch["samples"] for epoch in result.metrics] == [490] * EPOCHS
    assert all(epoch["accuracy"] >= 0.0 for epoch in result.metrics)
    if world_size == 1:
        assert [tuple(json.loads(line)) for line in log.read_text().splitlines()] == left
    else:
        assert journalled(directory) + named(document) == Counter(WANTED)
        assert first_leased(directory) == left
        commits = [line for line in read_lines(directory / "schedule.jsonl") if line["kind"] == "commit"]
        assert (commits[0]["round"], commits[0]["hash"]) == (0, committed)
    path, last = newest(folder)
    assert named(last) == Counter(WANTED)
    assert last.round > document.round
    trained = [rank["batches"] for rank in result.raw.get("ranks", [result.raw])]
    before = [steps(saved, rank if rank < 3 else None) for rank in range(world_size)]
    assert [steps(path, rank) for rank in range(world_size)] == [a + b for a, b in zip(before, trained, strict=True)]
    final, kept = load_file(directory / CONSENSUS), load_file(path / CONSENSUS)
    assert all(torch.equal(final[name], kept[name]) for name in kept)
    assert not [name for name in os.listdir(folder) if name.startswith(".partial")]


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


def test_a_folder_that_cannot_be_written_costs_the_checkpoints_only(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    result = short(checkpoint="/proc/no-such-folder/c", run_directory=directory, mode="cpu-async").run(quiet=True)
    (sentence,) = [words for words in result.degraded if "no checkpoint of round" in words]
    assert "rank 0: " in sentence
    assert "rank 1: " in sentence
    assert journalled(directory) == Counter({batch: 1 for batch in WANTED if batch[0] == 0})
