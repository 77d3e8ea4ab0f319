"""El Che cadence: how many batches each rank makes per window, so that all finish together and rounds cost little.

The slowest rank's `anchor` batches set the window; the others do as many as fit into that time. Counts, never wall
clock, end a window: a target derived from time that is measured only when the window ends feeds on itself.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flodl.protocol.messages import WindowReport

WINDOWS_REMEMBERED = 5
ROUNDS_PER_EPOCH = 20
FINE_ANCHOR = 4
PROBE_BATCHES = 3
"""An open window ends once every rank has made so many: the first is accounted apart, two are measured."""


@dataclass(frozen=True)
class Pace:
    """counts: batches per rank and window; None: not every rank is measured yet, keep the window open."""

    anchor: int
    counts: dict[int, int] | None
    reason: str


class Cadence:
    """Speeds measured, anchor tuned, counts proposed. One per run; ranks are known by number across restarts."""

    def __init__(
        self, *, anchor: int, overhead_target: float, max_ratio: float, batches_per_epoch: int, min_window: int = 0
    ) -> None:
        self._anchor = anchor
        self._in_use = anchor
        self._target = overhead_target
        self._max_ratio = max_ratio
        self._batches_per_epoch = batches_per_epoch
        self._min_window = min_window
        self._seen: dict[int, deque[float]] = {}
        self._ms: dict[int, float] = {}
        self._fill_ms: dict[int, float] = {}
        self._may_grow = True
        self._measured_windows = 0
        self.round_ms = 0.0

    @property
    def anchor(self) -> int:
        return self._anchor

    def observe(self, rank: int, report: WindowReport, is_late: bool = False) -> None:
        """Delivered cost (compute and data wait) of one window.

        A window of one batch has nothing but its first, which is taken less its usual excess as far as that is known.
        is_late: the others had to wait for this rank, so that its earlier windows count no more.
        """
        if report.batches >= 1:
            ms = (report.compute_ms + report.data_ms) / report.batches
        else:
            ms = report.first_ms - self._fill_ms.get(rank, 0.0)
        if not 0.0 < ms < float("inf"):
            return
        if report.batches >= 1:
            self._fill_ms[rank] = max(0.0, report.first_ms - ms)
        seen = self._seen.setdefault(rank, deque(maxlen=WINDOWS_REMEMBERED))
        if is_late:
            seen.clear()
        seen.append(ms)
        self._ms[rank] = _robust_mean(list(seen))

    def restore(self, anchor: int, ms: Mapping[int, float]) -> None:
        """Begin with what an earlier run measured; its own measurements take over from the first window on."""
        self._anchor = self._in_use = anchor
        for rank, value in ms.items():
            self._seen[rank] = deque([value], maxlen=WINDOWS_REMEMBERED)
            self._ms[rank] = value

    def ms(self, rank: int) -> float | None:
        """Milliseconds per batch, from the last windows; None: not measured yet."""
        return self._ms.get(rank)

    def observe_round(self, ranks: Iterable[int], round_ms: float) -> str:
        """A round took this long from its first attempt to the last adoption. Tunes the anchor; says why, or ''."""
        self.round_ms = round_ms if self.round_ms == 0.0 else 0.5 * (self.round_ms + round_ms)
        slowest = self._slowest(ranks)
        if slowest is None:
            return ""
        self._measured_windows += 1
        # The first measured window carries start-up in its fill and round: it never proposes.
        if self._measured_windows < 2 or not self._may_grow:
            return ""
        fixed = self.round_ms + self._fill_ms.get(slowest[0], 0.0)
        overhead = fixed / (self._anchor * slowest[1] + fixed)
        if overhead <= self._target:
            return ""
        before = self._anchor
        self._anchor = max(before + 1, round(before * min(overhead / self._target, 2.0)))
        return (
            f"anchor {before} -> {self._anchor}: a round and its first batch cost {100 * overhead:.1f} % "
            f"of the window, over the target of {100 * self._target:.0f} %"
        )

    def hold(self) -> None:
        """No growth until release()."""
        self._may_grow = False

    def release(self) -> None:
        self._may_grow = True

    def shorten(self) -> None:
        """Half the anchor in use, and no growth until release()."""
        self._anchor = max(1, min(self._anchor, self._in_use) // 2)
        self._may_grow = False

    def pace(self, ranks: Iterable[int]) -> Pace:
        """Counts for the next window of these ranks."""
        ranks = list(ranks)
        speeds = {rank: self.ms(rank) for rank in ranks}
        unknown = [rank for rank, ms in speeds.items() if ms is None]
        if unknown:
            return Pace(self._anchor, None, f"open window: the speed of {_ranks(unknown)} is not measured yet")
        known = {rank: ms for rank, ms in speeds.items() if ms is not None}
        if not known:
            return Pace(self._anchor, {}, "no ranks")
        ratios = self._ratios(known)
        anchor, reason = self._bounded_anchor(known, ratios)
        self._in_use = anchor
        return Pace(anchor, _counts(anchor, ratios), reason)

    def _ratios(self, speeds: dict[int, float]) -> dict[int, float]:
        slow_ms = max(speeds.values())
        return {rank: min(slow_ms / ms, self._max_ratio) for rank, ms in speeds.items()}

    def _bounded_anchor(self, speeds: dict[int, float], ratios: dict[int, float]) -> tuple[int, str]:
        total = sum(ratios.values())
        anchor, reason = self._anchor, f"anchor {self._anchor}"
        most = max(1, int(self._batches_per_epoch / ROUNDS_PER_EPOCH / total))
        if anchor > most:
            anchor = most
            size = self._batches_per_epoch
            reason = f"anchor {anchor}: an epoch of {size} batches should hold {ROUNDS_PER_EPOCH} rounds"
        least = -(-self._min_window * len(ratios) // max(1, round(total)))
        if anchor < least:
            anchor = least
            reason = f"anchor {anchor}: the outer optimizer wants {self._min_window} batches per rank and window"
        finer = self._finer_anchor(anchor, speeds, ratios)
        if finer != anchor:
            anchor, reason = finer, f"anchor {finer}: at {anchor}, whole batches would fit the speeds too badly"
        return anchor, reason

    def _finer_anchor(self, anchor: int, speeds: dict[int, float], ratios: dict[int, float]) -> int:
        """The next from here at which rounding of counts alone costs no more than the overhead target.

        Not over twice the anchor, or FINE_ANCHOR if that is more; where none is fine enough, the best of them.
        """
        losses: dict[int, float] = {}
        for candidate in range(anchor, max(2 * anchor, FINE_ANCHOR) + 1):
            losses[candidate] = _rounding_loss(_counts(candidate, ratios), speeds)
            if losses[candidate] <= self._target:
                return candidate
        return min(losses, key=lambda candidate: (losses[candidate], candidate))

    def _slowest(self, ranks: Iterable[int]) -> tuple[int, float] | None:
        known = [(rank, ms) for rank in ranks if (ms := self.ms(rank)) is not None]
        return max(known, key=lambda pair: pair[1], default=None)


def _robust_mean(values: list[float]) -> float:
    """Without outliers: those over a factor of 1.5 from the median. Two in a row on one side are a change."""
    middle = statistics.median_low(values)
    last = values[-2:]
    if min(last) > middle * 1.5 or max(last) < middle / 1.5:
        middle = values[-1]
    return statistics.fmean(value for value in values if middle / 1.5 <= value <= middle * 1.5)


def _counts(anchor: int, ratios: dict[int, float]) -> dict[int, int]:
    return {rank: max(1, round(anchor * ratio)) for rank, ratio in ratios.items()}


def _rounding_loss(counts: dict[int, int], speeds: dict[int, float]) -> float:
    window_ms = max(counts[rank] * ms for rank, ms in speeds.items())
    possible = sum(window_ms / ms for ms in speeds.values())
    return 1.0 - sum(counts.values()) / possible


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
