"""Tasks on the host's memory: one at a time, in order, and no memory is given back while somebody reads it."""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from flodl.errors import NativeError
from flodl.native import Endpoint, EventKind, SharedMemory
from flodl.processes import perform_memory
from flodl.processes.clock import RunClock
from flodl.processes.perform_memory import MemoryPerformer, MemorySettings, OuterStep
from flodl.processes.perform_records import RecordFiles, RecordPerformer
from flodl.protocol.effects import (
    Admit,
    CommitRound,
    Committed,
    Contribution,
    OpenHost,
    Reduce,
    Reduced,
    ReleaseMemory,
)
from flodl.protocol.messages import BatchRange, LayoutSpec, SectionSpec, TensorSpec, Welcome, decode_to_rank
from flodl.records.schedule import read_lines

LAYOUT = LayoutSpec(64, (SectionSpec("parameter", "f32", 0, 2),), (TensorSpec("w", (2,), "f32", "parameter", 0),))


@dataclass
class Result:
    is_finite: tuple[bool, ...] = (True,)
    distance_sq: tuple[float, ...] = (4.0,)
    norm_sq: float = 9.0
    hash: int = 5
    first_nonfinite: str = ""
    seconds: float = 0.25


@dataclass
class TaskEnd:
    """Stands for a task_done event."""

    reason: str = ""


class FakeHost:
    """Notes calls; a memory's number is 10, 11, …"""

    def __init__(self, *settings: object) -> None:
        self.settings = settings
        self.calls: list[tuple[object, ...]] = []
        self.opened = 10

    def open_rank(self) -> int:
        self.opened += 1
        return self.opened - 1

    def rank_descriptor(self, memory: int) -> int:
        return os.open(os.devnull, os.O_RDONLY)

    def buffer_descriptor(self, buffer: int) -> int:
        if buffer == 1 and self.opened > 12:
            raise NativeError("too many open files")
        return os.open(os.devnull, os.O_RDONLY)

    def rank_steps(self, memory: int) -> tuple[int, int]:
        return memory * 100, 0

    def close_rank(self, memory: int) -> None:
        self.calls.append(("close", memory))

    def start_reduce(self, task: int, contributions: list[tuple[int, float, float]]) -> None:
        self.calls.append(("reduce", task, contributions))

    def start_commit(self, task: int, is_seed: bool, momentum_share: float) -> None:
        self.calls.append(("commit", task, is_seed, momentum_share))

    def reduce_result(self) -> Result:
        return Result()

    def commit_result(self) -> Result:
        return Result()

    def committed(self) -> int:
        return 1


@dataclass
class Stage:
    memory: MemoryPerformer
    hosts: list[FakeHost]
    sent: list[tuple[int, int, bytes, tuple[int, ...]]]
    directory: Path

    @property
    def host(self) -> FakeHost:
        return self.hosts[0]

    def end_task(self, reason: str = "") -> Reduced | Committed | None:
        return self.memory.task_done(cast(Any, TaskEnd(reason)))


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    hosts: list[FakeHost] = []

    def make(*settings: object) -> FakeHost:
        hosts.append(FakeHost(*settings))
        return hosts[-1]

    monkeypatch.setattr(perform_memory, "HostMemory", make)
    sent: list[tuple[int, int, bytes, tuple[int, ...]]] = []
    records = RecordPerformer(RecordFiles.open(tmp_path), RunClock(), None)
    settings = MemorySettings(OuterStep("nesterov", 0.7, 0.9), 2, 16)
    memory = MemoryPerformer(cast(Any, None), settings, records, lambda *values: sent.append(values))
    memory.open_host(OpenHost(LAYOUT))
    return Stage(memory, hosts, sent, tmp_path)


def reduce_of(attempt: int, *ranks: int) -> Reduce:
    return Reduce(1, attempt, tuple(Contribution(rank, 0, 3, 12, 0.5, 0.25) for rank in ranks))


def test_the_plan_reaches_the_host(stage: Stage) -> None:
    assert stage.host.settings[0] == 64
    assert stage.host.settings[2:6] == ("nesterov", 0.7, 0.9, 2)


def test_admission_sends_three_descriptors_and_keeps_none(stage: Stage) -> None:
    before = os.listdir("/proc/self/fd")
    stage.memory.admit(Admit(1, 4))
    [(rank, generation, payload, descriptors)] = stage.sent
    assert (rank, generation, len(descriptors)) == (1, 4, 3)
    assert decode_to_rank(payload) == Welcome(1, 4, 16)
    assert os.listdir("/proc/self/fd") == before
    stage.memory.admit(Admit(0, 5))
    with pytest.raises(NativeError):
        stage.memory.admit(Admit(2, 6))
    assert os.listdir("/proc/self/fd") == before


def test_a_commit_waits_for_the_reduce_and_is_journalled_at_once(stage: Stage) -> None:
    for rank in range(2):
        stage.memory.admit(Admit(rank, 0))
    stage.memory.reduce(reduce_of(7, 0, 1))
    stage.memory.commit(CommitRound(1, 7, False, (BatchRange(0, 2, 3),), {"anchor": 4}))
    assert stage.host.calls == [("reduce", 7, [(10, 0.5, 0.25), (11, 0.5, 0.25)])]
    [line] = read_lines(stage.directory / "journal.jsonl")
    assert (line["round"], line["contributed"], line["state"]) == (1, [[0, 2, 3]], {"anchor": 4})
    assert stage.end_task() == Reduced(7, (True,), (2.0,), 3.0, 5, 0.25)
    assert stage.host.calls[1:] == [("commit", 1, False, 1.0)]
    assert stage.end_task() == stage.memory.committed == Committed(1, 1, 5, 0.25)
    assert not stage.memory.is_busy
    assert stage.end_task() is None


def test_memory_is_given_back_when_its_last_reader_ended(stage: Stage) -> None:
    for rank in range(2):
        stage.memory.admit(Admit(rank, 0))
    stage.memory.reduce(reduce_of(1, 0))
    stage.memory.reduce(reduce_of(2, 0, 1))
    stage.memory.release(ReleaseMemory(0, 0))
    stage.memory.release(ReleaseMemory(1, 0))
    stage.memory.release(ReleaseMemory(9, 9))
    assert [call[0] for call in stage.host.calls] == ["reduce"]
    stage.end_task()
    assert [call[0] for call in stage.host.calls] == ["reduce", "reduce"]
    stage.end_task()
    assert stage.host.calls[2:] == [("close", 10), ("close", 11)]
    # What a dead rank had begun is still known.
    assert stage.memory.steps_started(1, 0) == 1100
    assert stage.memory.steps_started(1, 1) == 0


def test_a_task_that_failed_ends_the_run(stage: Stage) -> None:
    stage.memory.admit(Admit(0, 0))
    stage.memory.reduce(reduce_of(1, 0))
    with pytest.raises(NativeError, match="round 1 could not be completed: the arena shrank"):
        stage.end_task("the arena shrank")


def test_what_is_not_finite_is_named_by_tensor_and_rank(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 2):
        stage.memory.admit(Admit(rank, 0))
    place = "offset 4 of contribution 1 (element 1 of section 0)"
    monkeypatch.setattr(
        FakeHost, "reduce_result", lambda _self: Result((True, False), (1.0, 1.0), first_nonfinite=place)
    )
    stage.memory.reduce(reduce_of(7, 0, 2))
    ended = stage.end_task()
    assert isinstance(ended, Reduced)
    assert ended.first_nonfinite == "tensor 'w' of rank 2"


def test_at_the_end_nothing_new_is_started(stage: Stage) -> None:
    stage.memory.admit(Admit(0, 0))
    stage.memory.reduce(reduce_of(1, 0))
    stage.memory.reduce(reduce_of(2, 0))
    stage.memory.start_no_more()
    stage.end_task()
    assert len(stage.host.calls) == 1
    stage.memory.close()
    assert stage.memory.steps_started(0, 0) == 0


def test_a_real_host_averages_what_was_sealed(tmp_path: Path) -> None:
    """Two contributions of constants, weights a quarter and three quarters, then a seed commit."""
    endpoint = Endpoint()
    records = RecordPerformer(RecordFiles.open(tmp_path), RunClock(), None)
    mapped: list[SharedMemory] = []

    def keep(rank: int, generation: int, payload: bytes, descriptors: tuple[int, ...]) -> None:
        mapped.append(SharedMemory.adopt(os.dup(descriptors[0]), True))

    memory = MemoryPerformer(endpoint, MemorySettings(OuterStep(), 1, 16), records, keep)
    memory.open_host(OpenHost(LAYOUT))
    for rank in range(2):
        memory.admit(Admit(rank, 0))
        address = mapped[rank].address + 4096
        (ctypes.c_float * 2).from_address(address)[:] = (4.0 * rank, 8.0)
    weights = (0.25, 0.75)
    memory.reduce(Reduce(0, 1, tuple(Contribution(rank, 0, 1, 4, weights[rank], 0.5) for rank in range(2))))
    [done] = [event for event in endpoint.wait(10.0) if event.kind == EventKind.task_done]
    reduced = memory.task_done(done)
    assert isinstance(reduced, Reduced)
    assert reduced.is_finite == (True, True)
    assert reduced.distance == pytest.approx((3.0, 1.0))
    assert reduced.norm == pytest.approx((9.0 + 64.0) ** 0.5)
    memory.commit(CommitRound(0, 1, True, ()))
    [done] = [event for event in endpoint.wait(10.0) if event.kind == EventKind.task_done]
    committed = memory.task_done(done)
    assert isinstance(committed, Committed)
    assert committed.hash == reduced.hash
    assert struct.unpack("<2f", memory.read_committed(0, 8)) == (3.0, 8.0)
    memory.close()
    records.close()
    endpoint.close()


def test_momentum_follows_the_mean_window_where_it_is_short() -> None:
    cohort = [Contribution(rank, rank, n // 8, n, 0.5, 0.5) for rank, n in enumerate([40, 80])]
    assert OuterStep("nesterov", 0.7, 0.9, warm_samples=240.0).momentum_share(cohort) == 60.0 / 240.0
    assert OuterStep("nesterov", 0.7, 0.9, warm_samples=60.0).momentum_share(cohort) == 1.0
    assert OuterStep("nesterov", 0.7, 0.9, warm_samples=30.0).momentum_share(cohort) == 1.0
    assert OuterStep("nesterov", 0.7, 0.9).momentum_share(cohort) == 1.0
    assert OuterStep("nesterov", 0.7, 0.9, warm_samples=60.0).momentum_share([]) == 1.0
