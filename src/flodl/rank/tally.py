"""What one window came to: batches, samples, losses and milliseconds since the last seal."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from flodl.protocol.messages import WindowReport
from flodl.rank.leases import Lease


class Trained(NamedTuple):
    """One batch trained. data_ms: waited for it; pause_ms: spent in the user's callbacks, in neither of the others."""

    loss: float
    samples: int
    compute_ms: float
    data_ms: float
    is_over_pad: bool = False
    factor: float = 1.0
    pause_ms: float = 0.0


@dataclass
class Tally:
    """Of the batches since the last seal; replaced at each seal."""

    batches: int = 0
    samples: int = 0
    factor: float = 1.0
    pause_ms: float = 0.0
    last_loss: float = 0.0
    _losses: dict[int, tuple[float, int]] = field(default_factory=dict)
    _compute_ms: float = 0.0
    _data_ms: float = 0.0
    _first_ms: float = 0.0
    _raw_over_pad: int = 0
    leases: list[Lease] = field(default_factory=list)
    _suspects: tuple[Lease, ...] = ()

    def add(self, lease: Lease, trained: Trained) -> None:
        if self.batches == 0:
            self._first_ms = trained.compute_ms + trained.data_ms
        else:
            self._compute_ms += trained.compute_ms
            self._data_ms += trained.data_ms
        self.batches += 1
        self.samples += trained.samples
        self.factor = trained.factor
        self.pause_ms += trained.pause_ms
        self.last_loss = trained.loss
        if not self._suspects and not math.isfinite(trained.loss):
            self._suspects = (*self.leases[-1:], lease)
        self.leases.append(lease)
        self._raw_over_pad += trained.is_over_pad
        summed, samples = self._losses.get(lease.epoch, (0.0, 0))
        self._losses[lease.epoch] = (summed + trained.loss * trained.samples, samples + trained.samples)

    def report(self) -> WindowReport:
        """The first batch apart: it carries what a window's start costs."""
        batches = max(0, self.batches - 1)
        return WindowReport(batches, self._compute_ms, self._data_ms, self._first_ms, self._raw_over_pad)

    def suspects(self) -> tuple[tuple[int, int], ...]:
        """(epoch, index) of the first batch whose loss was not finite, and of the one before it: a loss is that of the
        state which the batch before left. Empty where every loss was finite.
        """
        return tuple((lease.epoch, lease.index) for lease in self._suspects)

    def losses(self) -> tuple[tuple[int, float, int], ...]:
        """(epoch, sum of loss · samples, samples), in order of epochs."""
        return tuple((epoch, summed, samples) for epoch, (summed, samples) in sorted(self._losses.items()))
