"""The round under way: its attempts, what is left out of it, and what its commit settles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flodl.protocol.cadence import Cadence
from flodl.protocol.effects import CommitRound, Committed, Effect, Record, Reduced, ReleaseMemory
from flodl.protocol.guard import ELASTIC_THRESHOLD, OVERWRITE_THRESHOLD, Guard
from flodl.protocol.ledger import Holder, Ledger
from flodl.protocol.membership import Phase, Roster
from flodl.protocol.messages import Sealed
from flodl.protocol.round import Round, RoundPhase
from flodl.protocol.settings import ControllerSettings
from flodl.protocol.story import Story

MAX_EXCLUSIONS = 3
"""A rank that is not finite so many rounds running ends the run."""


@dataclass(frozen=True)
class Verdict:
    """What the end of an attempt led to.

    failure: why the run cannot go on, or ''. overwrite: the round was aborted, and these ranks must take the committed
    state again, for theirs is not finite.
    """

    effects: list[Effect] = field(default_factory=list)
    failure: str = ""
    closed_epochs: tuple[int, ...] = ()
    overwrite: tuple[Holder, ...] = ()


class Rounds:
    """One Round object at a time, and the last commit. At most one round is in flight."""

    def __init__(
        self, settings: ControllerSettings, ledger: Ledger, roster: Roster, cadence: Cadence, story: Story
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._roster = roster
        self._cadence = cadence
        self._story = story
        threshold = ELASTIC_THRESHOLD if settings.is_elastic else OVERWRITE_THRESHOLD
        # In sync there is no window to shorten.
        self._guard = Guard(threshold) if settings.guard and not settings.mode.endswith("-sync") else None
        self._attempts = 0
        self._began = 0.0
        self._is_timed = True
        self.current = Round(0, settings.batch_size, settings.gamma)
        self.committed: Committed | None = None

    @property
    def is_sealing(self) -> bool:
        return self.current.phase is RoundPhase.SEALING

    def is_ready(self) -> bool:
        """Everyone who has a window has sealed, and nobody still reads the buffer that the sum will be written to."""
        if not self.is_sealing or not self.current.has_work:
            return False
        present = self._roster.present()
        if any(s.window is not None for s in present):
            return False
        return not any(s.told is not None and s.told < self.current.number - 1 for s in present)

    def leave_untimed(self) -> None:
        """Ranks write a checkpoint before they adopt this round: its time says nothing about the next."""
        self._is_timed = True

    def adopted(self, now: float) -> list[Effect]:
        """Where ranks wait, a round has ended when all who take part have adopted it."""
        if self._is_timed or any(s.told is not None for s in self._roster if s.phase is Phase.ACTIVE):
            return []
        return self._observe(now)

    def _observe(self, now: float) -> list[Effect]:
        self._is_timed = True
        present = [s.rank for s in self._roster.present()]
        why = self._cadence.observe_round(present, max(0.0, now - self._began) * 1000.0)
        return [Record("anchor", {"reason": why})] if why else []

    def begin(self, now: float) -> list[Effect]:
        """The first attempt. A round's time runs from here: the wait for a rank that is lost at last is none of it."""
        self._began = now
        return self._attempt()

    def _attempt(self) -> list[Effect]:
        """Sums everything sealed, under a number that no attempt had before."""
        self._attempts += 1
        reduce = self.current.start_attempt(self._attempts)
        cohort = [
            {
                "rank": c.rank,
                "generation": c.generation,
                "batches": c.batches,
                "samples": c.samples,
                "weight": c.weight,
                "ms": self._cadence.ms(c.rank),
                "loss": _mean_loss(self.current.sealed[(c.rank, c.generation)]),
            }
            for c in reduce.contributions
        ]
        return [Record("attempt", {"round": reduce.round, "attempt": reduce.attempt, "cohort": cohort}), reduce]

    def reduced(self, event: Reduced) -> Verdict:
        """The end of an attempt: the commit, or another attempt without what was not finite."""
        if not self.current.is_current(event.attempt):
            return Verdict()
        bad = self.current.exclude_nonfinite(event)
        if not bad:
            return self._commit(event)
        effects: list[Effect] = []
        are_retries = True
        for rank, generation in bad:
            record, is_retry = self._exclude(rank, generation, event.first_nonfinite)
            effects.append(record)
            are_retries = are_retries and is_retry
            state = self._roster[rank]
            if state.generation == generation and state.exclusions >= MAX_EXCLUSIONS:
                why = f"rank {rank} was not finite {MAX_EXCLUSIONS} rounds running"
                return Verdict(effects, f"{why}; first: {event.first_nonfinite}")
        if self.current.has_work:
            return Verdict(effects + self._attempt())
        if are_retries:
            return self._abort(effects)
        why = f"every contribution of round {self.current.number} is not finite"
        return Verdict(effects, f"{why}; first: {event.first_nonfinite}")

    def _abort(self, effects: list[Effect]) -> Verdict:
        """All that was in the round were batches now known to be bad: they are left out, and the round begins again."""
        aborted = self.current
        self.current = Round(aborted.number, self._settings.batch_size, self._settings.gamma)
        closed = self._ledger.close()
        self._story.closed(closed, aborted.number - 1)
        reason = "nothing was in it but batches that were not finite twice"
        fields = {"round": aborted.number, "reason": reason, "closed_epochs": list(closed)}
        effects = [*effects, Record("abort", fields), *self._epochs(closed)]
        return Verdict(effects, closed_epochs=closed, overwrite=tuple(aborted.excluded))

    def stands(self, event: Committed, now: float) -> tuple[Round, list[Effect]] | None:
        """The commit is swapped in: the next round opens. Returns the finished one; None if told before."""
        if self.committed is not None and event.round <= self.committed.round:
            return None
        finished, self.committed = self.current, event
        fields: dict[str, Any] = {"round": event.round, "hash": event.hash, "seconds": event.seconds}
        where = {"epoch": self._ledger.current_epoch, "left": self._ledger.unsettled()}
        pace = {"anchor": self._cadence.anchor, "drift": self._story.drift}
        effects: list[Effect] = [Record("commit", {**fields, **where, **pace})]
        for rank, generation in [*finished.sealed, *finished.excluded]:
            state = self._roster[rank]
            if state.generation != generation or state.phase in (Phase.WAITING, Phase.GONE):
                effects.append(ReleaseMemory(rank, generation))
        self.current = Round(event.round + 1, self._settings.batch_size, self._settings.gamma)
        self._is_timed = finished.is_seed
        if finished.is_seed:
            effects.append(Record("phase", {"phase": "training", "reason": "every rank has the initial state"}))
        else:
            for rank, generation in finished.sealed:
                if self._roster[rank].generation == generation:
                    self._roster[rank].waits_ms.append(max(0.0, now - self._roster[rank].sealed_at) * 1000.0)
            if self._settings.mode.endswith("-async"):
                effects += self._observe(now)
        return finished, effects

    def _exclude(self, rank: int, generation: int, first: str) -> tuple[Record, bool]:
        """Also whether nothing but retries of batches that were excluded before was in this contribution."""
        batches = self._ledger.sealed((rank, generation))
        suspects = self.current.excluded[rank, generation].suspects
        quarantined = self._ledger.exclude((rank, generation), suspects)
        self._story.excluded(rank, self.current.number, quarantined, first)
        if self._roster[rank].generation == generation:
            self._roster[rank].exclusions += 1
        fields: dict[str, Any] = {"rank": rank, "generation": generation, "round": self.current.number}
        told = {"suspects": suspects, "quarantined": quarantined, "first": first}
        record = Record("exclusion", {**fields, **told})
        return record, 0 < batches == len(quarantined)

    def _commit(self, event: Reduced) -> Verdict:
        """From here on nothing takes the round back."""
        round_ = self.current
        attempt = round_.accept(event)
        settled = self._ledger.commit((c.rank, c.generation) for c in round_.cohort)
        for contribution in round_.cohort:
            if self._roster[contribution.rank].generation == contribution.generation:
                self._roster[contribution.rank].exclusions = 0
        self._story.committed(round_, settled)
        effects = self._judge(event)
        state = {
            "anchor": self._cadence.anchor,
            "closed_epochs": list(settled.closed_epochs),
            "quarantined": self._ledger.quarantined(),
        }
        commit = CommitRound(round_.number, attempt, round_.is_seed, settled.batches, state)
        effects += [*self._epochs(settled.closed_epochs), commit]
        return Verdict(effects, closed_epochs=settled.closed_epochs)

    def _epochs(self, closed: Iterable[int]) -> list[Record]:
        """What the epochs that are closed now came to."""
        return [Record("epoch", self._story.epochs[epoch].as_dict(epoch)) for epoch in closed]

    def _judge(self, event: Reduced) -> list[Effect]:
        if self.current.is_seed or event.norm <= 0.0:
            return []
        drift = self._story.drift = max(event.distance) / event.norm
        if self._guard is None:
            return []
        messages = self.current.sealed.values()
        verdict = self._guard.judge(drift, max(m.batches for m in messages), min(m.factor for m in messages))
        if verdict.word == "halve":
            self._cadence.shorten()
        elif verdict.word == "hold":
            self._cadence.hold()
        else:
            self._cadence.release()
            return []
        return [Record("guard", {"round": self.current.number, "word": verdict.word, "reason": verdict.reason})]


def _mean_loss(message: Sealed) -> float | None:
    """Over the samples of its window; None where it has none."""
    samples = sum(n for _, _, n in message.losses)
    return sum(summed for _, summed, _ in message.losses) / samples if samples else None
