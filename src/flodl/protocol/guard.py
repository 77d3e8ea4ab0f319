"""Watches how far the ranks drift apart within a window, and speaks up before averaging stops working."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

OVERWRITE_THRESHOLD = 0.05
ELASTIC_THRESHOLD = 0.3
"""An elastic blend keeps a standing spread that is healthy; the lower threshold would cry wolf."""

RISES = 3
GROWTH_PER_BATCH = 1e-2
"""ln(d / d_before) per batch of the longest window: over this, three times running, is an exponential rise."""


@dataclass(frozen=True)
class Verdict:
    """word: stable, hold (no growth of the window) or halve (half the window)."""

    word: str
    reason: str


class Guard:
    """Level and growth of d = max over ranks of ‖θ_r − consensus‖ / ‖consensus‖, one value per committed round."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._recent: deque[float] = deque(maxlen=RISES + 1)
        self._exponential = 0
        self._factor = 1.0

    def judge(self, drift: float, batches: int, factor: float = 1.0) -> Verdict:
        """drift: d of this round; batches: the longest window in it; factor: the learning rate there over its base."""
        cliff = factor < 0.7 * self._factor
        before, self._factor = self._factor, factor
        self._recent.append(drift)
        values = list(self._recent)
        if cliff:
            fall = f"from {before:.3g} to {factor:.3g} of its base"
            return Verdict("halve", f"the learning rate fell {fall} in one window")
        if len(values) >= 2 and min(values[-2:]) > 1e-8 and batches > 0:
            rate = math.log(values[-1] / values[-2]) / batches
            self._exponential = self._exponential + 1 if rate > GROWTH_PER_BATCH else 0
        if self._exponential >= RISES:
            self._exponential = 0
            return Verdict("halve", f"the ranks' drift grew exponentially for {RISES} rounds, to {drift:.3g}")
        rises = len(values) > RISES and all(a < b for a, b in pairwise(values))
        if rises and drift > self._threshold:
            over = f"{drift:.3g} (over {self._threshold})"
            return Verdict("hold", f"the ranks' drift rose {RISES} times running, to {over}")
        return Verdict("stable", "")
