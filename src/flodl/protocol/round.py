"""One attempt after another to average what the ranks sealed: the object that holds a round's outcome."""

from __future__ import annotations

from enum import Enum

from flodl.protocol.effects import Contribution, Reduce, Reduced
from flodl.protocol.ledger import Holder
from flodl.protocol.messages import Sealed


class RoundPhase(Enum):
    """sealing → reducing → committing; back to sealing only as the next round's object."""

    SEALING = "sealing"
    REDUCING = "reducing"
    COMMITTING = "committing"


class Round:
    """A round's sealed contributions and its attempts. A contribution outlives the rank that sealed it."""

    def __init__(self, number: int, batch_size: int, gamma: float) -> None:
        self.number = number
        self.phase = RoundPhase.SEALING
        self.sealed: dict[Holder, Sealed] = {}
        self.excluded: dict[Holder, Sealed] = {}
        self.result: Reduced | None = None
        self._batch_size = batch_size
        self._gamma = gamma
        self._attempt: Reduce | None = None

    @property
    def is_seed(self) -> bool:
        """Round 0: one rank's initial state, taken as it is."""
        return self.number == 0

    @property
    def has_work(self) -> bool:
        return bool(self._cohort())

    def check(self, holder: Holder, message: Sealed) -> None:
        """Raises ValueError where a contribution can no longer be taken: wrong round, late or twice."""
        if message.round != self.number:
            raise ValueError(f"sealed round {message.round} while round {self.number} is open")
        if self.phase is not RoundPhase.SEALING:
            raise ValueError(f"sealed round {self.number} while it is {self.phase.value}")
        if holder in self.sealed:
            raise ValueError(f"sealed round {self.number} twice")

    def seal(self, holder: Holder, message: Sealed) -> None:
        """Raises ValueError as check() does; then nothing has changed."""
        self.check(holder, message)
        self.sealed[holder] = message

    def counts(self, holder: Holder) -> bool:
        """Whether this holder has sealed work in this round."""
        return holder in self.sealed and (self.sealed[holder].samples > 0 or self.is_seed)

    def drop_empty(self, holder: Holder) -> None:
        """A rank that sealed nothing may seal once more."""
        if holder in self.sealed and not self.counts(holder):
            del self.sealed[holder]

    def start_attempt(self, attempt: int) -> Reduce:
        """Sum everything sealed with n_k > 0, in the order of ranks. No two attempts of a run have the same number."""
        self.phase = RoundPhase.REDUCING
        self._attempt = Reduce(self.number, attempt, self._weighed())
        return self._attempt

    def is_current(self, attempt: int) -> bool:
        """False for the end of an attempt that was replaced."""
        return self.phase is RoundPhase.REDUCING and self._attempt is not None and self._attempt.attempt == attempt

    def exclude_nonfinite(self, event: Reduced) -> list[Holder]:
        """The contributions found not finite leave the round. Empty: the result stands."""
        assert self._attempt is not None
        bad = [
            (contribution.rank, contribution.generation)
            for contribution, is_finite in zip(self._attempt.contributions, event.is_finite, strict=True)
            if not is_finite
        ]
        for holder in bad:
            self.excluded[holder] = self.sealed.pop(holder)
        return bad

    def accept(self, event: Reduced) -> int:
        """The attempt's result is to be committed. Returns the attempt's number."""
        assert self._attempt is not None
        self.phase = RoundPhase.COMMITTING
        self.result = event
        return self._attempt.attempt

    @property
    def cohort(self) -> tuple[Contribution, ...]:
        """What counts in the attempt under way or committed."""
        return self._attempt.contributions if self._attempt else ()

    def _cohort(self) -> list[tuple[Holder, Sealed]]:
        counted = [(h, m) for h, m in self.sealed.items() if m.samples > 0 or self.is_seed]
        return sorted(counted, key=lambda pair: pair[0])

    def _weighed(self) -> tuple[Contribution, ...]:
        cohort = self._cohort()
        if len(cohort) == 1:
            (rank, generation), message = cohort[0]
            return (Contribution(rank, generation, message.batches, message.samples, 1.0, 1.0),)
        work = [(message.samples / self._batch_size) ** self._gamma for _, message in cohort]
        samples = [message.samples for _, message in cohort]
        total, all_samples = sum(work), sum(samples)
        return tuple(
            Contribution(rank, generation, message.batches, message.samples, w / total, n / all_samples)
            for ((rank, generation), message), w, n in zip(cohort, work, samples, strict=True)
        )
