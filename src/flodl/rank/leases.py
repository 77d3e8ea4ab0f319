"""The batches that a rank holds: in the order granted, given back from the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flodl.protocol.messages import BatchRange


@dataclass(frozen=True, slots=True)
class Lease:
    """One batch of one epoch."""

    epoch: int
    index: int


class Leases:
    """Held and not yet started. Ranges inside, so that a whole epoch costs nothing to hold."""

    def __init__(self) -> None:
        self._ranges: deque[tuple[int, int, int]] = deque()  # (epoch, start, stop)

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self._ranges)

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __iter__(self) -> Iterator[Lease]:
        """In the order they will be started."""
        return (Lease(epoch, index) for epoch, start, stop in tuple(self._ranges) for index in range(start, stop))

    def grant(self, batches: Iterable[BatchRange]) -> None:
        """Behind those already held."""
        self._ranges.extend((b.epoch, b.first, b.first + b.count) for b in batches if b.count > 0)

    def next(self) -> Lease:
        """Removes the first. Raises IndexError when none is held."""
        epoch, start, stop = self._ranges.popleft()
        if start + 1 < stop:
            self._ranges.appendleft((epoch, start + 1, stop))
        return Lease(epoch, start)

    def put_back(self, leases: Iterable[Lease]) -> None:
        """In front of those held, in this order: what was trained on them is gone."""
        for lease in reversed(tuple(leases)):
            self._ranges.appendleft((lease.epoch, lease.index, lease.index + 1))

    def recall(self, keep: int) -> Lease | None:
        """Gives up all beyond the first `keep`; returns the first given up, None when there is none."""
        kept: deque[tuple[int, int, int]] = deque()
        first: Lease | None = None
        for epoch, start, stop in self._ranges:
            take = min(keep, stop - start)
            keep -= take
            if take:
                kept.append((epoch, start, start + take))
            if first is None and start + take < stop:
                first = Lease(epoch, start + take)
        self._ranges = kept
        return first
