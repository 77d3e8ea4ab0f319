"""The machine that plays a recorded run again: the same leases, seals, adoptions, sums and deaths, for the same bits.

It stands where the controller stands and decides nothing: what was recorded is asked for, and whatever differs ends the
run by name. A round is summed once everything recorded before its sum is done. Recorded is a total order in which
causes come first, so this never waits in a circle, and no buffer is written while a rank has yet to read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flodl.protocol.cadence import Cadence
from flodl.protocol.effects import (
    CommitRound,
    Committed,
    Contribution,
    Effect,
    RankExited,
    Record,
    Reduce,
    Reduced,
    ReleaseMemory,
    Send,
)
from flodl.protocol.ending import Ending
from flodl.protocol.ledger import Contributed, Holder, Ledger, epoch_sizes
from flodl.protocol.liveness import Progress as ProgressLimits
from flodl.protocol.machine import RunMachine
from flodl.protocol.membership import PRESENT, Phase, RankState, Roster
from flodl.protocol.messages import (
    Adopted,
    Commit,
    Continue,
    Evaluated,
    Failed,
    FromRank,
    Hello,
    Paused,
    Resumed,
    Sealed,
)
from flodl.protocol.part import Part
from flodl.protocol.round import Round
from flodl.protocol.script import PlayedRound, Script
from flodl.protocol.settings import ControllerSettings
from flodl.protocol.story import Story
from flodl.protocol.windows import lease_record

KILLED = "ended where the recorded run lost it"


class Replay(RunMachine):
    """Plays a script. The face of Controller; `notes` are sentences for the result's reasons."""

    def __init__(self, settings: ControllerSettings, script: Script, notes: Sequence[str] = ()) -> None:
        self._settings = settings
        self._script = script
        self._sizes = epoch_sizes(
            settings.batches_per_epoch, settings.epochs, settings.dataset_length, settings.samples, settings.batch_size
        )
        self._settled = [0] * len(self._sizes)
        self._open_epoch = 0
        self._cadence = Cadence(
            anchor=settings.anchor,
            overhead_target=settings.overhead_target,
            max_ratio=settings.max_ratio,
            batches_per_epoch=settings.batches_per_epoch,
        )
        self._roster = Roster(settings)
        self._parts = [Part(state, script.lives.get(state.rank, ())) for state in self._roster]
        self._limits = ProgressLimits(settings, self._cadence)
        self._story = Story(len(self._sizes), settings.world_size)
        self._story.reasons += notes
        self._ending = Ending(self._roster, self._story)
        self._next = 0  # the round that is open or being summed
        self._is_in_flight = False
        self._done: dict[Holder, int] = {}
        self._sealed: dict[Holder, Sealed] = {}
        self._standing: dict[int, Committed] = {}
        self._first_commit_at: float | None = None
        self._last_commit_at = 0.0

    # ---- the machine's face

    @property
    def phase(self) -> str:
        """waiting, training, done or failed."""
        if self._ending.end is not None:
            return "failed" if self._ending.end.failed else "done"
        return "training" if self._next else "waiting"

    def start(self, now: float) -> list[Effect]:
        """The first call."""
        reason = f"the {len(self._script.rounds)} rounds of run {self._script.head.run} are played again"
        effects: list[Effect] = [Record("phase", {"phase": "waiting", "reason": reason})]
        return effects + [part.begin(now) for part in self._parts if part.has_more_lives]

    def tick(self, now: float) -> list[Effect]:
        """Whatever became due."""
        effects: list[Effect] = []
        for state in self._roster:
            word, why = ("", "") if self.is_over else self._limits.verdict(state, now)
            if word == "warn":
                state.warned = True
                effects.append(Record("warning", {"rank": state.rank, "reason": why}))
            elif word == "evict":
                effects += self._ending.fail(f"rank {state.rank} was {why}; a replay cannot go on without it")
        return effects if self.is_over else effects + self._ending.kill_overdue(now) + self._advance(now)

    def next_deadline(self) -> float | None:
        """When tick() has something to do, if nothing else happens."""
        due = [self._ending.stop_by] + [self._limits.deadline(state) for state in self._roster]
        return min((at for at in due if at is not None), default=None)

    def summary(self) -> dict[str, Any]:
        """The run as plain values, as the controller's."""
        summary = self._story.summary(self._roster, self._cadence, Ledger(self._sizes), self.phase, self._ending.end)
        summary["open_epoch"] = self._open_epoch
        started = self._first_commit_at
        summary["training_s"] = 0.0 if started is None else max(0.0, self._last_commit_at - started)
        summary["replayed"] = self._script.head.run
        return summary

    # ---- messages

    def _dispatch(self, state: RankState, message: FromRank, now: float) -> list[Effect]:
        part = self._parts[state.rank]
        match message:
            case Hello():
                return self._hello(part, message)
            case Adopted():
                return self._adopted(part, message)
            case Sealed():
                return self._seal(part, message)
            case Paused(kind):
                state.paused = kind
            case Resumed(kind, seconds):
                state.paused = None
                state.add_pause(kind, seconds)
            case Evaluated():
                part.evaluated(message.epoch)
                self._story.evaluated(message)
                fields = {"rank": state.rank, "epoch": message.epoch, "round": message.round}
                more = {"metrics": message.metrics, "seconds": message.seconds}
                return [Record("evaluation", {**fields, **more})]
            case Failed():
                state.failed = message
            case _:
                pass  # progress, and what a replay never asks for
        return []

    def _hello(self, part: Part, hello: Hello) -> list[Effect]:
        if part.state.phase is not Phase.STARTING:
            raise ValueError("said hello twice")
        effects = self._roster.admit(part.state, hello)
        if part.state.ending_reason:
            return effects + self._ending.fail(part.state.ending_reason)
        recorded = self._script.head.threads.get("rank", hello.threads)
        if hello.threads != recorded:
            self._story.reasons.append(
                f"rank {part.state.rank} computes with {hello.threads} threads, the recorded run with {recorded}: "
                "sums may be rounded in another order"
            )
        return effects

    def _adopted(self, part: Part, message: Adopted) -> list[Effect]:
        act = part.adopted(message)
        committed = self._standing[act.round].hash
        if message.hash not in (0, committed):
            raise ValueError(f"read θ of round {act.round} as {message.hash:016x}, committed as {committed:016x}")
        self._done[part.holder] = part.done
        self._story.discarded_steps += message.step - part.state.sealed_step - message.kept_steps
        return [_record("adopt", part, {"round": message.round, "step": message.step})]

    def _seal(self, part: Part, message: Sealed) -> list[Effect]:
        act = part.sealed(message)
        self._done[part.holder] = part.done
        self._sealed[part.holder] = message
        if message.batches:
            self._cadence.observe(part.state.rank, message.report)
        self._story.sealed(part.state.rank, message)
        fields = {"round": act.round, "step": act.step, "batches": act.count, "samples": act.samples}
        effects: list[Effect] = [_record("seal", part, fields)]
        if act.exclusion is not None:
            quarantined, first = list(act.exclusion.quarantined), act.exclusion.first
            self._story.excluded(part.state.rank, act.round, quarantined, first)
            for epoch, _ in quarantined:
                self._settled[epoch] += 1
            effects.append(_record("exclusion", part, {"round": act.round, "quarantined": quarantined, "first": first}))
        return effects

    # ---- ends of processes

    def _exited(self, event: RankExited, now: float) -> list[Effect]:
        """As recorded, or when everything is over; any other exit is one that the recorded run did not have."""
        state = self._roster.current(event.rank, event.generation)
        if state is None:
            return []
        part = self._parts[event.rank]
        is_played = part.is_played
        is_death = not self._ending.reason
        reason = f"rank {event.rank} was {state.ending_reason}" if state.phase is Phase.ENDING else _how(event)
        if state.failed is not None:
            reason = f"rank {event.rank} failed: {state.failed.error}"
        fields = {"code": event.code, "reason": reason, "is_death": is_death, "returned": 0}
        effects: list[Effect] = [_record("exit", part, fields)]
        if part.holder not in self._cohort():
            effects.append(ReleaseMemory(*part.holder))
        state.phase, state.window, state.told = Phase.GONE, None, None
        if not is_death:
            return effects
        if not is_played:
            words = state.failed.traceback if state.failed is not None else event.words
            return effects + self._ending.fail(f"{reason}, which the recorded run did not lose there", words)
        state.deaths += 1
        self._roster.deaths += 1
        self._story.lost(max(0, event.steps_started - state.sealed_batches), reason)
        return [*effects, part.begin(now)] if part.has_more_lives else effects

    def _contradicted(self, state: RankState, fault: ValueError) -> list[Effect]:
        return self._ending.fail(f"the replay differs from what was recorded: rank {state.rank} {fault}")

    def _fell_silent(self, state: RankState, how: str) -> list[Effect]:
        return self._ending.fail(f"rank {state.rank} was {how}; a replay cannot go on without it")

    def _interrupted(self, reason: str, now: float) -> list[Effect]:
        return self._ending.begin(reason, now)

    # ---- rounds

    @property
    def _round(self) -> PlayedRound | None:
        """The one that is open or being summed; None once all are committed."""
        return self._script.rounds[self._next] if self._next < len(self._script.rounds) else None

    def _cohort(self) -> list[Holder]:
        return [(c.rank, c.generation) for c in self._round.cohort] if self._round else []

    def _attempt(self) -> list[Effect]:
        """Sums the recorded cohort, once everything that was recorded before is done."""
        round_ = self._round
        if round_ is None or self._is_in_flight:
            return []
        if any(self._done.get(holder, 0) < acts for holder, acts in round_.before.items()):
            return []
        self._is_in_flight = True
        cohort = [self._member(contribution) for contribution in round_.cohort]
        fields = {"round": round_.number, "attempt": self._next + 1, "cohort": cohort}
        return [Record("attempt", fields), Reduce(round_.number, self._next + 1, round_.cohort)]

    def _member(self, contribution: Contribution) -> dict[str, Any]:
        losses = self._sealed[contribution.rank, contribution.generation].losses
        samples = sum(n for _, _, n in losses)
        return {
            "rank": contribution.rank,
            "generation": contribution.generation,
            "batches": contribution.batches,
            "samples": contribution.samples,
            "weight": contribution.weight,
            "ms": self._cadence.ms(contribution.rank),
            "loss": sum(summed for _, summed, _ in losses) / samples if samples else None,
        }

    def _reduced(self, event: Reduced, now: float) -> list[Effect]:
        round_ = self._round
        assert round_ is not None
        if not all(event.is_finite):
            first = event.first_nonfinite
            return self._ending.fail(
                f"round {round_.number} is not finite in the replay ({first}), and was as recorded"
            )
        if round_.number and event.norm > 0.0:
            self._story.drift = max(event.distance) / event.norm
        closed = self._settle(round_)
        played = Round(round_.number, self._settings.batch_size, self._settings.gamma)
        played.sealed = {holder: self._sealed[holder] for holder in self._cohort()}
        self._story.committed(played, Contributed(round_.contributed, closed))
        epochs: list[Effect] = [Record("epoch", self._story.epochs[epoch].as_dict(epoch)) for epoch in closed]
        state = {"closed_epochs": list(closed)}
        return [*epochs, CommitRound(round_.number, self._next + 1, round_.number == 0, round_.contributed, state)]

    def _settle(self, round_: PlayedRound) -> tuple[int, ...]:
        """Counts the round's batches. Returns the epochs of which nothing is left."""
        for piece in round_.contributed:
            self._settled[piece.epoch] += piece.count
        before = self._open_epoch
        while self._open_epoch < len(self._sizes) and self._settled[self._open_epoch] == self._sizes[self._open_epoch]:
            self._open_epoch += 1
        return tuple(range(before, self._open_epoch))

    def _stands(self, event: Committed, now: float) -> list[Effect]:
        round_, cohort = self._round, self._cohort()
        assert round_ is not None
        self._is_in_flight = False
        self._next += 1
        self._last_commit_at = now
        if self._first_commit_at is None:
            self._first_commit_at = now
        self._standing = {event.round - 1: self._standing[event.round - 1]} if self._standing else {}
        self._standing[event.round] = event
        fields = {"round": event.round, "hash": event.hash, "seconds": event.seconds}
        left = sum(self._sizes) - sum(self._settled)
        where = {"epoch": self._open_epoch, "left": left, "drift": self._story.drift}
        effects: list[Effect] = [Record("commit", {**fields, **where})]
        if event.round == 0:
            effects.append(Record("phase", {"phase": "training", "reason": "the initial state stands"}))
        gone = [holder for holder in cohort if self._roster.current(*holder) is None]
        effects += [ReleaseMemory(*holder) for holder in gone]
        if event.hash == round_.hash:
            return effects
        why = (
            f"round {event.round} of the replay differs: its hash is {event.hash:016x}, recorded is {round_.hash:016x}"
        )
        return effects + self._ending.fail(why)

    # ---- what can be done now

    def _advance(self, now: float) -> list[Effect]:
        """Everything that the last event may have made possible."""
        if self.is_over:
            return []
        effects: list[Effect] = []
        if not self._ending.reason:
            effects = [effect for part in self._parts for effect in self._play(part, now)] + self._attempt()
            if self._round is None and all(self._is_at_its_end(part) for part in self._parts):
                effects += self._ending.begin(f"all {self._next} recorded rounds are played", now)
        if self._ending.reason:
            effects += self._ending.complete(not self._is_in_flight, self._round is None)
        return effects

    def _is_at_its_end(self, part: Part) -> bool:
        return not part.has_more_lives and (part.state.phase is Phase.GONE or (part.is_played and not part.is_to_die))

    def _play(self, part: Part, now: float) -> list[Effect]:
        """What this rank is to do next, if it is free to."""
        if part.state.phase not in PRESENT:
            return []
        if part.is_to_die:
            return self._roster.kill(part.state, KILLED)
        message = part.next_message(self._standing, self._settings.evaluates)
        if message is None:
            return []
        part.state.expect(now)
        granted = message.grant if isinstance(message, Commit | Continue) else ()
        return [Send(part.state.rank, message), *lease_record(part.state, granted)]


def _record(kind: str, part: Part, fields: dict[str, Any]) -> Record:
    rank, generation = part.holder
    return Record(kind, {"rank": rank, "generation": generation, **fields})


def _how(event: RankExited) -> str:
    if event.code < 0:
        return f"rank {event.rank} was killed by signal {-event.code}"
    return f"rank {event.rank} exited with code {event.code}"
