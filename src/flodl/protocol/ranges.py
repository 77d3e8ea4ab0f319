"""Sets of batches as sorted ranges: small however long the epoch is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator


class Ranges:
    """A set of non-negative integers, kept as sorted, disjoint, non-adjacent half-open ranges."""

    def __init__(self, ranges: list[tuple[int, int]] | None = None) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges or []:
            self.add(start, stop)

    def __len__(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self._starts, value) - 1
        return at >= 0 and value < self._stops[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    def add(self, start: int, stop: int) -> None:
        """Adds start … stop − 1. Raises ValueError if one of them is in the set: a batch is never in two places."""
        if start >= stop:
            return
        at = bisect_right(self._starts, start)
        if (at > 0 and self._stops[at - 1] > start) or (at < len(self._starts) and self._starts[at] < stop):
            raise ValueError(f"{start}..{stop - 1} overlaps {list(self)}")
        joins_left = at > 0 and self._stops[at - 1] == start
        joins_right = at < len(self._starts) and self._starts[at] == stop
        if joins_left and joins_right:
            self._stops[at - 1] = self._stops.pop(at)
            self._starts.pop(at)
        elif joins_left:
            self._stops[at - 1] = stop
        elif joins_right:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._stops.insert(at, stop)

    def take(self, count: int) -> list[tuple[int, int]]:
        """Removes and returns the `count` lowest (fewer if there are fewer), as ranges."""
        taken: list[tuple[int, int]] = []
        while count > 0 and self._starts:
            start, stop = self._starts[0], self._stops[0]
            if stop - start <= count:
                self._starts.pop(0)
                self._stops.pop(0)
            else:
                stop = start + count
                self._starts[0] = stop
            taken.append((start, stop))
            count -= stop - start
        return taken
