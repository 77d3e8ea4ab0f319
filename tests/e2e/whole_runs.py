"""A run whose launcher is killed, and a run that goes on from what it saved: the same for CI and for a release."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flodl.checkpoint.document import CONSENSUS, Document, optimizer_file, read_whole
from flodl.checkpoint.folder import find_checkpoints
from flodl.checkpoint.velocity import VELOCITY
from flodl.rank.optimizer_state import read_state
from flodl.records.schedule import read_lines
from tests.e2e import batchnorm
from tests.e2e.checkpointed import ALONE, BATCHES, EPOCHS, LOG, digest_of, parts, trainer

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
    files = sorted(checkpoint.glob("rank-*.safetensors")) if rank is None else [checkpoint / optimizer_file(rank)]
    return max(read_state(file).step_count() for file in files)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def interrupt(mode: str, place: Path) -> int:
    """Ctrl-C to a run that has committed a few rounds of its first epoch. Returns its exit code."""
    with started(mode, place) as process:
        journal = place / "killed" / "journal.jsonl"
        ends = time.monotonic() + 60.0
        while not journal.exists() or sum(1 for _ in read_lines(journal)) < 3:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < ends, "no round was committed"
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        return process.wait(60.0)


@contextmanager
def started(mode: str, place: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of three ranks that saves after each of many epochs, in a process of its own."""
    folder = place / "checkpoints"
    settings = {"mode": mode, "checkpoint": str(folder), "run_directory": str(place / "killed"), "epochs": 40}
    command = [sys.executable, "-m", "tests.e2e.checkpointed", json.dumps(settings)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def kill_after_a_checkpoint(mode: str, place: Path, delay_s: float = 0.0) -> Path:
    """Kills the launcher of a run with signal 9, so long after a checkpoint became whole. Returns the folder."""
    folder = place / "checkpoints"
    with started(mode, place) as process:
        ends = time.monotonic() + 60.0
        while not find_checkpoints(folder):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < ends, "no checkpoint came"
            time.sleep(0.005)
        time.sleep(delay_s)  # the moment is the test's input, no condition
        ranks = children_of(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(ranks) == 3
        while any(is_alive(pid) for pid in ranks):
            assert time.monotonic() < ends, "ranks outlive their launcher"
            time.sleep(0.01)
    return folder


def go_on(mode: str, place: Path, world_size: int, room: Path) -> None:
    """Resumes a copy of what a killed run left, in `room`, with so many ranks; asserts all that must hold of it."""
    folder = room / "checkpoints"
    shutil.copytree(place / "checkpoints", folder)
    saved, document = newest(folder)
    assert document.has(VELOCITY) == (mode == "cpu-async")
    assert {file.name for file in document.files} >= {CONSENSUS, *(f"rank-{rank}.safetensors" for rank in range(3))}
    assert [steps(saved, rank.rank) for rank in document.ranks] == [rank.batches for rank in document.ranks]
    until = [line for line in read_lines(place / "killed" / "journal.jsonl") if line["round"] <= document.round]
    assert Counter(batch for line in until for batch in batches(line["contributed"])) == named(document)
    epochs = max(epoch for epoch, _ in named(document)) + 2
    wanted = {(epoch, index): 1 for epoch in range(epochs) for index in range(BATCHES)}
    left = [batch for batch in sorted(wanted) if batch not in named(document)]
    assert 0 < len(left) < len(wanted)

    directory = room / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ALONE, str(directory))
        result = trainer(
            entry="tests.e2e.checkpointed:noted_parts",
            mode=mode if world_size > 1 else "solo",
            devices=DEVICES[world_size],
            epochs=epochs,
            checkpoint=folder,
            checkpoint_keep=10,  # what it goes on from is read again below
            resume=True,
            run_directory=directory,
        ).run(quiet=True)
    assert result.resumed_from == {"path": str(saved), "round": document.round}
    assert [epoch["epoch"] for epoch in result.metrics] == list(range(epochs))
    assert [epoch["samples"] for epoch in result.metrics] == [batchnorm.SAMPLES] * epochs
    assert all(epoch["accuracy"] >= 0.0 for epoch in result.metrics)
    notes = [json.loads(line) for line in (directory / LOG).read_text().splitlines()]
    _check_state(saved, notes, world_size)
    if world_size == 1:
        assert [tuple(entry) for entry in notes if isinstance(entry, list)] == left
    else:
        assert journalled(directory) + named(document) == Counter(wanted)
        assert first_leased(directory) == left
    path, last = newest(folder)
    assert named(last) == Counter(wanted)
    assert last.round > document.round
    counts = [rank["batches"] for rank in result.raw.get("ranks", [result.raw])]
    before = [steps(saved, rank if rank < 3 else None) for rank in range(world_size)]
    assert [steps(path, rank) for rank in range(world_size)] == [a + b for a, b in zip(before, counts, strict=True)]
    final, kept = load_file(directory / CONSENSUS), load_file(path / CONSENSUS)
    assert all(torch.equal(final[name], kept[name]) for name in kept)
    assert not [name for name in os.listdir(folder) if name.startswith(".partial")]


def _check_state(saved: Path, entries: list[Any], world_size: int) -> None:
    """Every rank began from the saved consensus: the same bits, and so the same answers."""
    model = parts()["model"]()
    model.load_state_dict(load_file(saved / CONSENSUS), strict=False)
    assert [entry for entry in entries if isinstance(entry, str)] == [digest_of(model)] * world_size
