"""Runs hurt at a random moment, and what must hold of each: the same for CI and for a release."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flodl import Trainer
from tests.e2e import batchnorm

EPOCHS = 3
DETECT_S = 1.0
DEVICES = ("emulated:4ms", "emulated:9ms", "emulated:13ms")


def _steps_directory(launcher: int) -> Path:
    return Path(tempfile.gettempdir()) / f"flodl-steps-{launcher}"


def timed_parts() -> dict[str, Any]:
    """The entry: every rank notes when it ended each batch, so that a survivor's stall can be read."""
    directory = _steps_directory(os.getppid())

    def note(_info: Any) -> None:
        directory.mkdir(exist_ok=True)
        with open(directory / f"{os.getpid()}", "a") as log:
            log.write(f"{time.monotonic()!r}\n")

    return {**batchnorm.parts(), "callbacks": (note,)}


@dataclass
class Assassin:
    """A view of the run that hurts one rank once: at a random record, after a random delay of up to 30 ms."""

    seed: int
    number: int
    pids: dict[int, int] = field(default_factory=dict)
    hurt_at: float | None = None
    victim: int | None = None
    _seen: int = 0

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self._at = draw.randint(4, 160)
        self._delay = draw.uniform(0.0, 0.03)
        self._choice = draw.random()
        self._timer: threading.Timer | None = None

    def record(self, record: dict[str, Any]) -> None:
        if record["kind"] == "process_started":
            self.pids[record["rank"]] = record["pid"]
        elif record["kind"] == "process_ended":
            self.pids.pop(record["rank"], None)
        self._seen += 1
        if self._seen >= self._at and self._timer is None and self.pids:
            self._timer = threading.Timer(self._delay, self._strike)
            self._timer.start()

    def _strike(self) -> None:
        alive = sorted(self.pids.items())
        if not alive:
            return
        _, pid = alive[int(self._choice * len(alive))]
        try:
            os.kill(pid, self.number)
        except ProcessLookupError:
            return
        self.victim, self.hurt_at = pid, time.monotonic()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.join()


@dataclass(frozen=True)
class Wound:
    """What one run showed. stall_s: the longest that a survivor made no step around the blow; None: nobody was hurt."""

    seed: int
    stall_s: float | None
    deaths: int
    recomputed: int


def hurt(seed: int, mode: str, number: int, directory: Path) -> Wound:
    """One run; asserts that it ended well, counted every batch once and left nothing behind."""
    steps = _steps_directory(os.getpid())
    shutil.rmtree(steps, ignore_errors=True)
    assassin = Assassin(seed, number)
    before = _traces()
    result = Trainer(
        entry="tests.e2e.torture:timed_parts",
        mode=mode,
        devices=list(DEVICES),
        batch_size=batchnorm.BATCH_SIZE,
        epochs=EPOCHS,
        seed=seed,
        anchor=4,
        detect_s=DETECT_S,
        run_directory=directory,
    ).run(view=assassin, quiet=True)
    after = _traces()
    assert after == before, f"seed {seed}: {after} is left of descriptors, mappings and children; before: {before}"
    _check_ledger(seed, directory)
    stall = _stall(steps, assassin)
    shutil.rmtree(steps, ignore_errors=True)
    return Wound(seed, stall, int(result.raw["deaths"]), result.recomputed)


def _check_ledger(seed: int, directory: Path) -> None:
    """Every batch of every epoch stands in exactly one commit of the journal."""
    per_epoch = -(-batchnorm.SAMPLES // batchnorm.BATCH_SIZE)
    counted: dict[tuple[int, int], int] = {}
    for line in (directory / "journal.jsonl").read_text().splitlines():
        for epoch, first, count in json.loads(line).get("contributed", ()):
            for index in range(first, first + count):
                counted[epoch, index] = counted.get((epoch, index), 0) + 1
    wanted = {(epoch, index): 1 for epoch in range(EPOCHS) for index in range(per_epoch)}
    assert counted == wanted, f"seed {seed}: {set(counted.items()) ^ set(wanted.items())}"


def _stall(steps: Path, assassin: Assassin) -> float | None:
    """The longest gap between two steps of a survivor that overlaps the blow or begins within a second after it."""
    if assassin.hurt_at is None:
        return None
    gaps = [0.0]
    for path in steps.iterdir():
        times = [float(line) for line in path.read_text().splitlines()]
        if path.name == str(assassin.victim):
            continue
        gaps += [
            b - a
            for a, b in itertools.pairwise(times)
            if b >= assassin.hurt_at and a <= assassin.hurt_at + DETECT_S + 1.0
        ]
    return max(gaps)


def _traces() -> tuple[tuple[str, ...], int, frozenset[int]]:
    """Open descriptors, mappings of shared memory, and children of this process."""
    me = os.getpid()
    children = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            if parent == me:
                children.add(int(entry.name))
    mapped = Path("/proc/self/maps").read_text().count("memfd:")
    return tuple(sorted(_targets())), mapped, frozenset(children)


def _targets() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if not target.startswith("/proc/"):
            yield target


SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
BUDGET_S = {"kill": 1.0, "stop": 1.0 + DETECT_S}
