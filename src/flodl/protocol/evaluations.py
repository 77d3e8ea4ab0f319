"""Which closed epochs are still to be evaluated, and by whom."""

from __future__ import annotations

from collections.abc import Iterable

from flodl.protocol.cadence import Cadence
from flodl.protocol.ledger import Holder
from flodl.protocol.membership import RankState


class Evaluations:
    """An epoch is owed until a rank is chosen, assigned until that rank reports, and owed again if the rank is lost."""

    def __init__(self, cadence: Cadence, eval_rank: int | None) -> None:
        self._cadence = cadence
        self._eval_rank = eval_rank
        self.owed: list[int] = []
        self._assigned: dict[int, Holder] = {}

    @property
    def are_under_way(self) -> bool:
        return bool(self._assigned)

    def await_any(self, epochs: Iterable[int]) -> bool:
        """Metrics of one of these epochs are still to come."""
        return any(epoch in self.owed or epoch in self._assigned for epoch in epochs)

    def owe(self, epochs: Iterable[int]) -> None:
        self.owed = sorted({*self.owed, *epochs})

    def assign(self, present: list[RankState]) -> dict[int, tuple[int, ...]]:
        """All that is owed, by rank: the chosen one, or the fastest present. Empty where nothing is owed."""
        if not self.owed or not present:
            return {}
        chosen = [s for s in present if s.rank == self._eval_rank]
        fastest = min(present, key=lambda s: (self._cadence.ms(s.rank) or float("inf"), s.rank))
        evaluator = chosen[0] if chosen else fastest
        epochs, self.owed = tuple(self.owed), []
        self._assigned.update(dict.fromkeys(epochs, evaluator.holder))
        return {evaluator.rank: epochs}

    def is_assigned_to(self, holder: Holder) -> bool:
        return holder in self._assigned.values()

    def done(self, epoch: int, holder: Holder) -> bool:
        """False for a report that was not asked of this rank, or no longer."""
        if self._assigned.get(epoch) != holder:
            return False
        del self._assigned[epoch]
        return True

    def lost(self, holder: Holder) -> None:
        """The rank is gone: what it had not reported is owed again."""
        epochs = [epoch for epoch, evaluator in self._assigned.items() if evaluator == holder]
        for epoch in epochs:
            del self._assigned[epoch]
        self.owe(epochs)

    def give_up(self) -> list[int]:
        """Nobody is left to do what is owed. Returns those epochs."""
        epochs, self.owed = self.owed, []
        return epochs
