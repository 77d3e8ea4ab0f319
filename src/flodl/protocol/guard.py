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
"""ln(d / d_before) per batch of the longest window: over this, three times running, is an exponential rise. A window
longer than the one before drifts further in proportion; that much is no rise."""
LEAST_OF_THRESHOLD = 0.1
"""Below this share of the threshold a rise means nothing."""


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
        self._factor: float | None = None  # not known before the first round
        self._batches = 0

    def judge(self, drift: float, batches: int, factor: float = 1.0) -> Verdict:
        """drift: d of this round; batches: the longest window in it; factor: the learning rate there over its base."""
        before, self._factor = self._factor, factor
        longer, self._batches = max(1.0, batches / max(1, self._batches)), batches
        self._recent.append(drift)
        values = list(self._recent)
        if before is not None and factor < 0.7 * before:
            fall = f"from {before:.3g} to {factor:.3g} of its base"
            return Verdict("halve", f"the learning rate fell {fall} in one window")
        if len(values) >= 2 and min(values[-2:]) > 1e-8 and batches > 0:
            rate = math.log(values[-1] / values[-2] / longer) / batches
            is_rise = rate > GROWTH_PER_BATCH and drift > LEAST_OF_THRESHOLD * self._threshold
            self._exponential = self._exponential + 1 if is_rise else 0
        if self._exponential >= RISES:
            self._exponential = 0
            return Verdict("halve", f"the ranks' drift grew exponentially for {RISES} rounds, to {drift:.3g}")
        rises = len(values) > RISES and all(a < b for a, b in pairwise(values))
        if rises and drift > self._threshold:
            over = f"{drift:.3g} (over {self._threshold})"
            return Verdict("hold", f"the ranks' drift rose {RISES} times running, to {over}")
        return Verdict("stable", "")
