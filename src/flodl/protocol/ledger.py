"""Which batch is where: pool → leased → sealed → contributed. Each batch of an epoch is contributed exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from flodl.protocol.messages import BatchRange
from flodl.protocol.ranges import Ranges

Holder = tuple[int, int]
"""(rank, generation): a restarted rank is another holder."""

MAX_RETURNS = 5
"""A batch that was left out so often beside a suspect is a suspect itself, so that no run turns in circles."""

_Range = tuple[int, int, int]
"""(epoch, start, stop)."""


@dataclass
class _Epoch:
    size: int
    pool: Ranges
    contributed: Ranges = field(default_factory=Ranges)
    quarantined: Ranges = field(default_factory=Ranges)

    @property
    def is_closed(self) -> bool:
        return len(self.contributed) + len(self.quarantined) == self.size


@dataclass(frozen=True)
class Contributed:
    """What one commit settled: the batches, and the epochs that it closed."""

    batches: tuple[BatchRange, ...]
    closed_epochs: tuple[int, ...]


class Ledger:
    """The batches of a whole run. `sizes[e]` is how many batches epoch e has; the last epoch may be cut short.

    Leases go out lowest position first, over the lowest epoch that is not closed and at most one beyond it.
    """

    def __init__(self, sizes: list[int]) -> None:
        self._epochs = [_Epoch(size, Ranges([(0, size)])) for size in sizes]
        self._current = 0
        self._leased: dict[Holder, deque[_Range]] = {}
        self._sealed: dict[Holder, list[_Range]] = {}
        self._unsettled = sum(sizes)
        self._exclusions: dict[tuple[int, int], int] = {}
        self._returns: dict[tuple[int, int], int] = {}
        self._again: list[tuple[int, int, int]] = []  # (epoch, index, rank to avoid), dealt before the pool

    def restore(self, contributed: Iterable[BatchRange], quarantined: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        """Before anything is leased: these batches are settled already. Returns the epochs that are closed by that.

        Raises ValueError or IndexError for batches that this run does not hold, or that are named twice.
        """
        for batches in contributed:
            stop = batches.first + batches.count
            if stop > self._epochs[batches.epoch].size:
                raise ValueError(f"epoch {batches.epoch} has no batch {stop - 1}")
            self._epochs[batches.epoch].contributed.add(batches.first, stop)
        for epoch, index in quarantined:
            if index in self._epochs[epoch].contributed:
                raise ValueError(f"batch {index} of epoch {epoch} is contributed and quarantined")
            self._epochs[epoch].quarantined.add(index, index + 1)
        for number, epoch_state in enumerate(self._epochs):
            epoch_state.pool = Ranges(self.remaining(number))
        self._unsettled = sum(self.unsettled_in(number) for number in range(len(self._epochs)))
        return self.close()

    # ---- what there is

    @property
    def current_epoch(self) -> int:
        """The lowest epoch that is not closed; the number of epochs once all are."""
        return self._current

    @property
    def is_complete(self) -> bool:
        return self._current == len(self._epochs)

    def grantable(self) -> int:
        """Batches that could be leased now."""
        return sum(len(epoch.pool) for epoch in self._epochs[self._current : self._current + 2]) + len(self._again)

    def is_dealt_out(self, epoch: int) -> bool:
        """Nothing of this epoch is left to lease: the round under way may close it."""
        return not self._epochs[epoch].pool and not any(number == epoch for number, _, _ in self._again)

    def unsettled(self) -> int:
        """Batches of the run not yet contributed or quarantined."""
        return self._unsettled

    def unsettled_in(self, epoch: int) -> int:
        """The same, of one epoch."""
        state = self._epochs[epoch]
        return state.size - len(state.contributed) - len(state.quarantined)

    def held(self, holder: Holder) -> int:
        """Leased to this holder and not yet sealed."""
        return sum(stop - start for _, start, stop in self._leased.get(holder, ()))

    def sealed(self, holder: Holder) -> int:
        """Sealed by this holder in the round under way."""
        return sum(stop - start for _, start, stop in self._sealed.get(holder, ()))

    def remaining(self, epoch: int) -> list[tuple[int, int]]:
        """The batches of an epoch not yet contributed, in order: what a resume goes on with."""
        state = self._epochs[epoch]
        left = Ranges([(0, state.size)])
        open_ranges: list[tuple[int, int]] = []
        settled = sorted([*state.contributed, *state.quarantined])
        for start, stop in left:
            at = start
            for first, last in settled:
                if first > at:
                    open_ranges.append((at, first))
                at = last
            if at < stop:
                open_ranges.append((at, stop))
        return open_ranges

    def contributed_ranges(self) -> tuple[BatchRange, ...]:
        return tuple(
            BatchRange(number, start, stop - start)
            for number, epoch in enumerate(self._epochs)
            for start, stop in epoch.contributed
        )

    def quarantined(self) -> list[tuple[int, int]]:
        return [
            (number, index)
            for number, epoch in enumerate(self._epochs)
            for start, stop in epoch.quarantined
            for index in range(start, stop)
        ]

    # ---- transitions

    def grant(self, holder: Holder, count: int, is_alone: bool = False) -> tuple[BatchRange, ...]:
        """Leases up to `count` batches. `is_alone`: no other rank could take what this one should avoid."""
        granted = self._take_again(holder[0], count, is_alone)
        count -= sum(stop - start for _, start, stop in granted)
        for number in range(self._current, min(self._current + 2, len(self._epochs))):
            taken = self._epochs[number].pool.take(count)
            granted += [(number, start, stop) for start, stop in taken]
            count -= sum(stop - start for start, stop in taken)
        if granted:
            self._leased.setdefault(holder, deque()).extend(granted)
        return _as_message(granted)

    def seal(self, holder: Holder, count: int) -> None:
        """The first `count` leased batches are trained and in the holder's sealed contribution."""
        if count > self.held(holder):
            raise ValueError(f"rank {holder[0]} sealed {count} batches and held {self.held(holder)}")
        queue = self._leased.get(holder, deque())
        sealed = self._sealed.setdefault(holder, [])
        while count > 0:
            epoch, start, stop = queue.popleft()
            if stop - start > count:
                queue.appendleft((epoch, start + count, stop))
                stop = start + count
            sealed.append((epoch, start, stop))
            count -= stop - start

    def recall(self, holder: Holder, epoch: int, index: int) -> int:
        """The holder gave up its leases from this batch on, in the order granted. Returns how many."""
        queue = self._leased.get(holder, deque())
        kept: deque[_Range] = deque()
        returned = 0
        is_found = False
        for number, start, stop in queue:
            if not is_found and number == epoch and start <= index < stop:
                is_found = True
                if index > start:
                    kept.append((number, start, index))
                start = index
            if is_found:
                self._epochs[number].pool.add(start, stop)
                returned += stop - start
            else:
                kept.append((number, start, stop))
        self._leased[holder] = kept
        return returned

    def forfeit(self, holder: Holder) -> int:
        """The holder is gone: its leases go back to their places. Sealed batches stay. Returns how many went back."""
        returned = 0
        for epoch, start, stop in self._leased.pop(holder, ()):
            self._epochs[epoch].pool.add(start, stop)
            returned += stop - start
        return returned

    def exclude(self, holder: Holder, suspects: Iterable[tuple[int, int]] = ()) -> list[tuple[int, int]]:
        """The holder's contribution was not finite: deal its suspects once more; a second time, quarantine them.

        suspects: the batches that can have done it; none: any of them. The others go back to the pool, uncounted the
        first MAX_RETURNS times. Returns the batches quarantined now.
        """
        named = set(suspects)
        quarantined = []
        for epoch, start, stop in self._sealed.pop(holder, ()):
            for index in range(start, stop):
                batch = (epoch, index)
                if named and batch not in named and self._returns.get(batch, 0) < MAX_RETURNS:
                    self._returns[batch] = self._returns.get(batch, 0) + 1
                    self._epochs[epoch].pool.add(index, index + 1)
                    continue
                times = self._exclusions[batch] = self._exclusions.get(batch, 0) + 1
                if times == 1:
                    self._again.append((epoch, index, holder[0]))
                else:
                    self._epochs[epoch].quarantined.add(index, index + 1)
                    self._unsettled -= 1
                    quarantined.append(batch)
        # A batch comes before the one that it followed: whichever of two suspects it was, this tells them apart.
        self._again.sort(key=lambda entry: (entry[0], -entry[1]))
        return quarantined

    def commit(self, cohort: Iterable[Holder]) -> Contributed:
        """The sealed batches of this cohort are contributed, for ever."""
        batches: list[_Range] = []
        for holder in cohort:
            for epoch, start, stop in self._sealed.pop(holder, ()):
                self._epochs[epoch].contributed.add(start, stop)
                self._unsettled -= stop - start
                batches.append((epoch, start, stop))
        return Contributed(_as_message(sorted(batches)), self.close())

    def close(self) -> tuple[int, ...]:
        """The epochs of which nothing is left to contribute, and that were not closed before."""
        closed = []
        while self._current < len(self._epochs) and self._epochs[self._current].is_closed:
            closed.append(self._current)
            self._current += 1
        return tuple(closed)

    def _take_again(self, rank: int, count: int, is_alone: bool) -> list[_Range]:
        granted: list[_Range] = []
        kept = []
        for epoch, index, avoid in self._again:
            if len(granted) < count and (is_alone or avoid != rank):
                granted.append((epoch, index, index + 1))
            else:
                kept.append((epoch, index, avoid))
        self._again = kept
        return granted


def _as_message(ranges: Iterable[_Range]) -> tuple[BatchRange, ...]:
    """Adjacent ranges of one epoch are joined."""
    joined: list[_Range] = []
    for epoch, start, stop in ranges:
        if joined and joined[-1][0] == epoch and joined[-1][2] == start:
            joined[-1] = (epoch, joined[-1][1], stop)
        else:
            joined.append((epoch, start, stop))
    return tuple(BatchRange(epoch, start, stop - start) for epoch, start, stop in joined)


def epoch_sizes(
    batches_per_epoch: int, epochs: int, dataset_length: int, samples: int | None, batch_size: int | None = None
) -> list[int]:
    """How many batches each epoch holds; with `samples`, the run stops at the batch that reaches it.

    batch_size: of every batch but an epoch's last; the smallest that gives so many batches where it is not told.
    """
    if samples is None or samples >= dataset_length * epochs:
        return [batches_per_epoch] * epochs
    whole, rest = divmod(samples, dataset_length)
    sizes = [batches_per_epoch] * whole
    if rest:
        batch_size = batch_size or -(-dataset_length // batches_per_epoch)
        sizes.append(min(batches_per_epoch, -(-rest // batch_size)))
    return sizes
