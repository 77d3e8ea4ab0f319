"""OpenHost, Admit, ReleaseMemory, Reduce and CommitRound: the relay's memory of this host and the tasks on it."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flodl.checkpoint.velocity import VELOCITY, read_velocity
from flodl.errors import NativeError
from flodl.native import Endpoint, Event, HostMemory, Section
from flodl.processes.perform_records import RecordPerformer
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
from flodl.protocol.messages import LayoutSpec, Welcome, encode
from flodl.protocol.signatures import tensor_at

_PLACE = re.compile(r"offset (?P<offset>\d+) of contribution (?P<contribution>\d+)\b")

SendTo = Callable[[int, int, bytes, tuple[int, ...]], None]
"""(rank, generation, payload, descriptors). The descriptors stay the caller's."""


@dataclass(frozen=True)
class OuterStep:
    """What a commit does beyond the swap. rule: none, nesterov or heavy_ball.

    warm_samples: mean samples per contribution below which the step takes its momentum in proportion; 0: always whole.
    """

    rule: str = "none"
    lr: float = 1.0
    momentum: float = 0.0
    warm_samples: float = 0.0

    def momentum_share(self, cohort: Sequence[Contribution]) -> float:
        """Of the momentum, in the step after this average; 0 to 1."""
        if self.warm_samples <= 0.0 or not cohort:
            return 1.0
        return min(1.0, sum(c.samples for c in cohort) / (len(cohort) * self.warm_samples))


@dataclass(frozen=True)
class MemorySettings:
    """threads: of the pool that reduces and commits. resume: a checkpoint whose velocity the outer step has."""

    outer: OuterStep
    threads: int
    batches_per_epoch: int
    resume: Path | None = None


class MemoryPerformer:
    """Owns the host's memory. One task runs at a time; what is asked for meanwhile waits in order."""

    def __init__(self, endpoint: Endpoint, settings: MemorySettings, records: RecordPerformer, send_to: SendTo) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._records = records
        self._send_to = send_to
        self._host: HostMemory | None = None
        self._memories: dict[tuple[int, int], int] = {}
        self._steps_of_released: dict[tuple[int, int], int] = {}
        self._running: Reduce | CommitRound | None = None
        self._cohort: tuple[Contribution, ...] = ()  # of the last reduce: what a commit takes
        self._waiting: deque[Reduce | CommitRound] = deque()
        self._to_release: list[ReleaseMemory] = []
        self.layout: LayoutSpec | None = None
        self.committed: Committed | None = None

    def open_host(self, effect: OpenHost) -> None:
        """Reserves and touches both buffers. Raises NativeError or MemoryError where there is not enough memory."""
        outer = self._settings.outer
        sections = [Section(s.rule, s.dtype, s.offset, s.count, s.mean_offset) for s in effect.layout.sections]
        self._host = HostMemory(
            effect.layout.bytes,
            sections,
            outer.rule,
            outer.lr,
            outer.momentum,
            self._settings.threads,
            self._endpoint,
        )
        self.layout = effect.layout
        resume = self._settings.resume
        if resume is not None and outer.rule != "none" and (resume / VELOCITY).exists():
            self._host.write_velocity(read_velocity(resume / VELOCITY, effect.layout))

    def admit(self, effect: Admit) -> None:
        """Reserves the rank's memory and sends Welcome with its descriptors; no copy of a descriptor stays here."""
        host = self._opened()
        memory = host.open_rank()
        self._memories[effect.rank, effect.generation] = memory
        welcome = encode(Welcome(effect.rank, effect.generation, self._settings.batches_per_epoch))
        descriptors: list[int] = []
        try:
            descriptors.append(host.rank_descriptor(memory))
            descriptors.append(host.buffer_descriptor(0))
            descriptors.append(host.buffer_descriptor(1))
            self._send_to(effect.rank, effect.generation, welcome, tuple(descriptors))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def release(self, effect: ReleaseMemory) -> None:
        """Gives the memory back, at once or when the task that reads it has ended."""
        self._to_release.append(effect)
        self._release_unread()

    def reduce(self, effect: Reduce) -> None:
        """Ends as Reduced, through task_done."""
        self._waiting.append(effect)
        self._start_next()

    def commit(self, effect: CommitRound) -> None:
        """Journal first. Ends as Committed, through task_done."""
        self._records.journal(effect)
        self._waiting.append(effect)
        self._start_next()

    def task_done(self, event: Event) -> Reduced | Committed | None:
        """The end of the running task. Raises NativeError if it failed: memory that cannot be summed ends the run."""
        ended, self._running = self._running, None
        if ended is None:
            return None
        if event.reason:
            raise NativeError(f"round {ended.round} could not be completed: {event.reason}")
        result = self._reduced(ended) if isinstance(ended, Reduce) else self._committed(ended)
        self._release_unread()
        self._start_next()
        return result

    def steps_started(self, rank: int, generation: int) -> int:
        """Batches begun in the life of this process, also after its death; 0 if it was never admitted."""
        memory = self._memories.get((rank, generation))
        if self._host is None or memory is None:
            return self._steps_of_released.get((rank, generation), 0)
        return self._host.rank_steps(memory)[0]

    def read_committed(self, offset: int, size: int) -> bytes:
        """Bytes of the committed θ."""
        return self._opened().read_committed(offset, size)

    def read_velocity(self) -> bytes:
        """What the outer step remembers; empty without one. Not while a commit runs."""
        return self._opened().read_velocity()

    @property
    def is_busy(self) -> bool:
        """A task runs."""
        return self._running is not None

    def start_no_more(self) -> None:
        """What waits is dropped; the running task goes on to its end."""
        self._waiting.clear()

    def close(self) -> None:
        """Waits for a running task, then gives everything back."""
        self._host = None
        self._memories.clear()
        self._waiting.clear()
        self._to_release.clear()
        self._running = None

    def _opened(self) -> HostMemory:
        if self._host is None:
            raise NativeError("the host's memory was used before any rank said how large the model is")
        return self._host

    def _start_next(self) -> None:
        if self._running is not None or not self._waiting:
            return
        task = self._waiting.popleft()
        if isinstance(task, Reduce):
            contributions = [
                (self._memories[c.rank, c.generation], c.weight, c.buffer_weight) for c in task.contributions
            ]
            self._opened().start_reduce(task.attempt, contributions)
            self._cohort = task.contributions
        else:
            self._opened().start_commit(task.round, task.is_seed, self._settings.outer.momentum_share(self._cohort))
        self._running = task

    def _reduced(self, effect: Reduce) -> Reduced:
        result = self._opened().reduce_result()
        return Reduced(
            attempt=effect.attempt,
            is_finite=tuple(result.is_finite),
            distance=tuple(math.sqrt(d) for d in result.distance_sq),
            norm=math.sqrt(result.norm_sq),
            hash=result.hash,
            seconds=result.seconds,
            first_nonfinite=self._named(result.first_nonfinite, effect),
        )

    def _named(self, place: str, effect: Reduce) -> str:
        """The native core knows offsets and contributions; people know tensors and ranks."""
        found = _PLACE.match(place)
        if found is None or self.layout is None:
            return place
        rank = effect.contributions[int(found["contribution"])].rank
        return f"tensor {tensor_at(self.layout, int(found['offset']))!r} of rank {rank}"

    def _committed(self, effect: CommitRound) -> Committed:
        host = self._opened()
        result = host.commit_result()
        self.committed = Committed(effect.round, host.committed(), result.hash, result.seconds)
        return self.committed

    def _release_unread(self) -> None:
        """A memory that a running or waiting reduce reads is kept until that has ended."""
        read = {
            (c.rank, c.generation)
            for task in (self._running, *self._waiting)
            if isinstance(task, Reduce)
            for c in task.contributions
        }
        kept = []
        for effect in self._to_release:
            holder = (effect.rank, effect.generation)
            if holder in read:
                kept.append(effect)
                continue
            memory = self._memories.pop(holder, None)
            if memory is not None and self._host is not None:
                self._steps_of_released[holder] = self._host.rank_steps(memory)[0]
                self._host.close_rank(memory)
        self._to_release = kept
