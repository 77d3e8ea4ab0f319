"""The user's callbacks: told of batches and evaluations; their time counts as a pause and not as work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BatchInfo:
    """One batch trained by this rank. position: samples before it in the run; step: batches of this process so far."""

    rank: int
    epoch: int
    index: int
    position: int
    step: int
    loss: float
    samples: int


class Callbacks:
    """A callback is a function of BatchInfo, or an object with on_batch(BatchInfo), on_evaluated(epoch, metrics), both.

    They run in the rank, between two batches; what they raise ends the rank as any exception of the user's does. No
    pause is declared for on_batch: a callback that takes longer than stall_s gets its rank evicted, so raise stall_s.
    """

    def __init__(self, callbacks: tuple[Any, ...]) -> None:
        self._on_batch: list[Callable[[BatchInfo], None]] = []
        self._on_evaluated: list[Callable[[int, dict[str, float]], None]] = []
        for callback in callbacks:
            named = [getattr(callback, name, None) for name in ("on_batch", "on_evaluated")]
            if named[0] is not None:
                self._on_batch.append(named[0])
            elif named[1] is None and callable(callback):
                self._on_batch.append(callback)
            if named[1] is not None:
                self._on_evaluated.append(named[1])

    @property
    def want_batches(self) -> bool:
        return bool(self._on_batch)

    def batch(self, info: BatchInfo) -> float:
        """Returns the milliseconds that they took."""
        started = time.perf_counter()
        for callback in self._on_batch:
            callback(info)
        return 1e3 * (time.perf_counter() - started)

    def evaluated(self, epoch: int, metrics: dict[str, float]) -> None:
        for callback in self._on_evaluated:
            callback(epoch, dict(metrics))
