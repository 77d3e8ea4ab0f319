"""The controller: one machine that decides who is in, who does how many batches, when to average and what to keep.

Sans-I/O: `receive`, `tell` and `tick` return effects; the driver performs them and reports back. It composes the
ledger (batches), the roster (ranks), the cadence (speeds), the windows (work), the rounds and the evaluations.
"""

from __future__ import annotations

from typing import Any

from flodl.protocol.cadence import Cadence
from flodl.protocol.commits import Commits
from flodl.protocol.draining import Draining
from flodl.protocol.effects import (
    CheckpointEnded,
    Committed,
    Effect,
    RankExited,
    Record,
    Reduced,
    ReleaseMemory,
)
from flodl.protocol.ending import Ending
from flodl.protocol.evaluations import Evaluations
from flodl.protocol.forming import Forming
from flodl.protocol.ledger import Ledger, epoch_sizes
from flodl.protocol.liveness import Progress as ProgressLimits
from flodl.protocol.machine import RunMachine
from flodl.protocol.membership import Loss, Phase, RankState, Roster
from flodl.protocol.messages import (
    Adopted,
    Evaluated,
    Failed,
    FromRank,
    Hello,
    Leaving,
    Paused,
    Progress,
    Recalled,
    Resumed,
    Saved,
    Sealed,
)
from flodl.protocol.rounds import Rounds
from flodl.protocol.saves import Saves
from flodl.protocol.settings import Beginning, ControllerSettings
from flodl.protocol.story import EpochStory, Story
from flodl.protocol.windows import Duties, Share, Windows


class Controller(RunMachine):
    """Decides a whole run. What takes `now` (seconds, any origin, never backwards) returns effects, in order."""

    def __init__(self, settings: ControllerSettings) -> None:
        self._settings = settings
        sizes = epoch_sizes(
            settings.batches_per_epoch, settings.epochs, settings.dataset_length, settings.samples, settings.batch_size
        )
        self._ledger = Ledger(sizes)
        self._cadence = Cadence(
            anchor=settings.anchor,
            overhead_target=settings.overhead_target,
            max_ratio=settings.max_ratio,
            batches_per_epoch=settings.batches_per_epoch,
            min_window=settings.outer_min_window,
        )
        self._roster = Roster(settings)
        self._limits = ProgressLimits(settings, self._cadence)
        self._story = Story(len(sizes), settings.world_size)
        self._evaluations = Evaluations(self._cadence, settings.eval_rank)
        self._saves = Saves(settings, self._ledger, self._roster, self._cadence, self._story)
        duties = Duties(self._evaluations, self._saves)
        self._windows = Windows(settings, self._ledger, self._roster, self._cadence, duties)
        self._rounds = Rounds(settings, self._ledger, self._roster, self._cadence, self._story)
        self._commits = Commits(self._roster, self._rounds, self._windows, duties)
        self._forming = Forming(settings, self._roster)
        if settings.beginning is not None:
            self._go_on_from(settings.beginning)
        self._first_lease_at: float | None = None
        self._last_commit_at = 0.0
        self._last_loss: Loss | None = None
        self._ending = Ending(self._roster, self._story)
        self._draining = Draining(self._roster, self._cadence, self._commits, self._windows, duties)
        if settings.mode.endswith("-sync") and settings.outer_min_window > 1:
            self._story.degrade(
                f"{settings.mode} averages after every batch: outer.min_window={settings.outer_min_window} cannot be "
                'kept, and a large outer learning rate or momentum may oscillate; warm="momentum" takes less of it'
            )

    def _go_on_from(self, beginning: Beginning) -> None:
        self._ledger.restore(beginning.contributed, beginning.quarantined)
        self._cadence.restore(beginning.anchor, beginning.ms)
        epochs = (
            EpochStory(loss_sum, samples, closed, metrics=dict(metrics))
            for loss_sum, samples, closed, metrics in beginning.epochs
        )
        self._story.restore(epochs, beginning.quarantined)
        self._story.first_round = beginning.round

    # ---- the machine's face

    @property
    def phase(self) -> str:
        """waiting, forming, training, done or failed."""
        if self._ending.end is not None:
            return "failed" if self._ending.end.failed else "done"
        if self._rounds.committed is not None:
            return "training"
        return "forming" if self._forming.is_under_way else "waiting"

    def start(self, now: float) -> list[Effect]:
        """The first call."""
        return [Record("phase", {"phase": "waiting", "reason": "ranks are started"}), *self._roster.start_due(now)]

    def tick(self, now: float) -> list[Effect]:
        """Whatever became due."""
        if self.is_over:
            return []
        effects: list[Effect] = []
        if not self._ending.reason:
            effects += [] if self._draining.reason else self._roster.start_due(now)
            effects += self._windows.cut(now)
        if self._draining.is_overdue(now):
            effects += self._ending.begin(self._draining.reason, now)
        for state in self._roster:
            word, why = self._limits.verdict(state, now)
            if word == "warn":
                state.warned = True
                effects.append(Record("warning", {"rank": state.rank, "reason": why}))
            elif word == "evict":
                effects += self._evict(state, why)
        return effects + self._ending.kill_overdue(now) + self._advance(now)

    def next_deadline(self) -> float | None:
        """When tick() has something to do, if nothing else happens."""
        due = [self._ending.stop_by] + [self._limits.deadline(state) for state in self._roster]
        if not self._ending.reason:
            due += [self._windows.next_deadline(), self._draining.ends_by]
        if not self._ending.reason and not self._draining.reason:
            due += [state.start_at for state in self._roster if state.phase is Phase.WAITING]
        return min((at for at in due if at is not None), default=None)

    def summary(self) -> dict[str, Any]:
        """The run as plain values, for result.json and the views."""
        self._roster.account_absences(self._last_commit_at)
        summary = self._story.summary(self._roster, self._cadence, self._ledger, self.phase, self._ending.end)
        started = self._first_lease_at
        summary["training_s"] = 0.0 if started is None else max(0.0, self._last_commit_at - started)
        return summary

    # ---- messages

    def _dispatch(self, state: RankState, message: FromRank, now: float) -> list[Effect]:
        match message:
            case Hello():
                return self._hello(state, message, now)
            case Adopted():
                return self._adopted(state, message, now)
            case Sealed():
                return self._sealed(state, message, now)
            case Progress():
                state.trained = message.batches
                return self._windows.top_up(state)
            case Recalled(epoch, index):
                self._windows.recalled(state, epoch, index)
            case Paused(kind):
                state.paused = kind
            case Resumed(kind, seconds):
                state.paused = None
                if state.absent_since is None:  # its absence ends with its adoption, and holds all that it did before
                    state.add_pause(kind, seconds)
            case Evaluated():
                return self._evaluated(state, message)
            case Failed():
                state.failed = message
            case Leaving():
                pass  # nobody told it to stop, so that its exit is a death, whatever its code
            case Saved():
                return self._saves.saved(state.holder, message)
        return []

    def _hello(self, state: RankState, hello: Hello, now: float) -> list[Effect]:
        if state.phase is not Phase.STARTING:
            raise ValueError("said hello twice")
        if misfit := self._forming.misfit(hello):
            return self._ending.fail(misfit)
        effects = self._roster.admit(state, hello)
        if state not in self._roster.present():
            self._story.degrade(state.ending_reason)
        if self._rounds.committed is not None and state in self._roster.present():
            effects.append(self._commits.tell(state, Share(), (), now))
        return effects

    def _adopted(self, state: RankState, message: Adopted, now: float) -> list[Effect]:
        committed = self._rounds.committed
        if committed is None or message.round > committed.round:
            raise ValueError(f"adopted round {message.round}, which is not committed")
        fields = {"rank": state.rank, "generation": state.generation, "round": message.round, "step": message.step}
        effects: list[Effect] = [Record("adopt", fields)]
        state.adopted = message.round
        state.trained = message.step - state.sealed_step
        self._story.discarded_steps += state.trained - message.kept_steps
        if state.phase is Phase.ADOPTING:
            state.phase = Phase.ACTIVE
            self._roster.account_absence(state, now)
        if message.round < committed.round:
            state.told = committed.round
            return effects
        state.told = None
        if message.hash not in (0, committed.hash):
            effects.append(Record("mismatch", {"rank": state.rank, "round": message.round, "hash": message.hash}))
            why = f"evicted: it read another θ of round {message.round} than was committed"
            return effects + self._evict(state, why)
        return effects + self._rounds.adopted(now)

    def _sealed(self, state: RankState, message: Sealed, now: float) -> list[Effect]:
        round_ = self._rounds.current
        if state.window is None or not (round_.is_seed or state.adopted == round_.number - 1):
            raise ValueError(f"sealed round {message.round} without a window for it")
        round_.check(state.holder, message)  # before the ledger counts batches for a round that will not have them
        if not round_.is_seed:
            self._ledger.seal(state.holder, message.batches)
            self._windows.sealed(now)
        round_.seal(state.holder, message)
        is_first = state.sealed_batches == 0
        state.sealed_batches += message.batches
        state.sealed_step = message.step
        state.window, state.trained, state.sealed_at = None, 0, now
        if message.batches:
            self._cadence.observe(state.rank, message.report, is_late=self._windows.was_cut(state.holder))
            if is_first and (usual := self._cadence.ms(state.rank)):
                state.add_pause("first batch", max(0.0, message.report.first_ms - usual) / 1000.0)
        self._story.sealed(state.rank, message)
        fields = {"round": message.round, "step": message.step, "batches": message.batches, "samples": message.samples}
        return [Record("seal", {"rank": state.rank, "generation": state.generation, **fields})]

    def _evaluated(self, state: RankState, message: Evaluated) -> list[Effect]:
        if self._evaluations.done(message.epoch, state.holder):
            state.evaluation_ms = message.seconds * 1000.0
            self._story.evaluated(message)
        fields = {"rank": state.rank, "epoch": message.epoch, "round": message.round, "metrics": message.metrics}
        return [Record("evaluation", {**fields, "seconds": message.seconds})]

    # ---- deaths

    def _exited(self, event: RankExited, now: float) -> list[Effect]:
        state = self._roster.current(event.rank, event.generation)
        if state is None:
            return []
        holder, committed = state.holder, self._rounds.committed
        loss = self._roster.lose(state, event, committed.round if committed else None, now)
        if self._ending.reason:
            state.phase = Phase.GONE
        returned = self._ledger.forfeit(holder)
        effects: list[Effect] = [] if holder in self._rounds.current.sealed else [ReleaseMemory(*holder)]
        fields = {"rank": event.rank, "generation": event.generation, "code": event.code, "reason": loss.reason}
        effects.append(Record("exit", {**fields, "is_death": loss.is_death, "returned": returned}))
        self._evaluations.lost(holder)
        self._saves.lost(holder, is_ending=bool(self._ending.reason))
        if loss.is_death:
            self._last_loss = loss
            self._story.lost(max(0, event.steps_started - state.sealed_batches), loss.reason)
        if loss.ends_run and not self._ending.reason:
            effects += self._ending.fail(f"{loss.ends_run}: {loss.reason}", loss.traceback)
        return effects

    def _contradicted(self, state: RankState, fault: ValueError) -> list[Effect]:
        """A rank that contradicts the ledger or the round is not trusted with either."""
        return self._roster.kill(state, f"evicted: {fault}")

    def _fell_silent(self, state: RankState, how: str) -> list[Effect]:
        return self._evict(state, f"evicted: {how}")

    def _evict(self, state: RankState, why: str) -> list[Effect]:
        record = Record("evict", {"rank": state.rank, "generation": state.generation, "reason": why})
        return [record, *self._roster.kill(state, why)]

    # ---- an end before all is done

    def _checkpoint_ended(self, event: CheckpointEnded) -> list[Effect]:
        return self._saves.ended(event)

    def _interrupted(self, reason: str, now: float) -> list[Effect]:
        if self._draining.reason:
            return []
        effects = [] if self._ending.reason or not self._rounds.committed else self._draining.begin(reason, now)
        return effects or self._ending.begin(reason, now)

    # ---- rounds

    def _reduced(self, event: Reduced, now: float) -> list[Effect]:
        verdict = self._rounds.reduced(event)
        self._saves.closed(verdict.closed_epochs)
        if self._settings.evaluates:
            self._evaluations.owe(verdict.closed_epochs)
        if verdict.failure:
            return verdict.effects + self._ending.fail(verdict.failure)
        ranks = [s for s in self._roster.present() if s.holder in verdict.overwrite]
        return verdict.effects + [self._commits.tell(s, Share(), (), now, is_excluded=True) for s in ranks]

    def _stands(self, event: Committed, now: float) -> list[Effect]:
        """The commit is journalled and swapped in: plan the next window, tell everyone."""
        stood = self._rounds.stands(event, now)
        if stood is None:
            return []
        finished, effects = stood
        self._last_commit_at = now
        if self._first_lease_at is None:
            self._first_lease_at = now
            self._roster.begin_accounts(now)
        return effects + self._commits.open_window(finished, now)

    # ---- what can be done now

    def _advance(self, now: float) -> list[Effect]:
        """Everything that the last event may have made possible."""
        if self.is_over:
            return []
        if self._ending.reason:
            effects = self._saves.advance(lambda epochs: False)
            is_idle = self._rounds.is_sealing and not self._saves.is_under_way
            return effects + self._ending.complete(is_idle, self._ledger.is_complete)
        rounds = self._rounds
        if rounds.committed is None and rounds.is_sealing and not rounds.current.sealed:
            return self._form(now)
        effects = self._saves.advance(self._evaluations.await_any)
        if rounds.is_sealing and not rounds.current.is_seed:
            effects += self._windows.end_open(now) + self._windows.feed_idle(rounds.current, now)
        if rounds.is_ready():
            effects += rounds.begin(now)
        if self._draining.is_done:
            return effects + self._ending.begin(self._draining.reason, now) + self._advance(now)
        if self._is_finishing():
            return effects + self._finish(now)
        if rounds.is_sealing and self._roster.is_lost():
            effects += self._draining.save_without_ranks(now) if rounds.committed else []
            if self._saves.is_under_way:
                return effects + self._saves.advance(lambda epochs: False)
            return effects + self._ending.fail_for_loss("no rank is left", self._last_loss)
        return effects

    def _form(self, now: float) -> list[Effect]:
        """Once nobody is still to come, the lowest rank present seals its state as round 0."""
        if self._forming.is_awaiting:
            return []
        if members := self._roster.present():
            return self._forming.begin(members, now)
        is_lost = self._roster.is_lost()
        return self._ending.fail_for_loss("no rank was admitted", self._last_loss) if is_lost else []

    def _is_finishing(self) -> bool:
        return self._ledger.is_complete and self._rounds.committed is not None and self._rounds.is_sealing

    # ---- the end

    def _finish(self, now: float) -> list[Effect]:
        """All batches are contributed: the last evaluations, then everyone may go."""
        members = self._roster.present()
        if self._evaluations.owed and members:
            evaluations = self._evaluations.assign(members)
            return [
                self._commits.tell(self._roster[rank], Share(), epochs, now) for rank, epochs in evaluations.items()
            ]
        if self._evaluations.owed and self._roster.awaits_somebody():
            return []
        effects: list[Effect] = []
        if not_evaluated := self._evaluations.give_up():
            self._story.degrade(f"epochs {not_evaluated} were not evaluated: no rank was left")
            effects += self._saves.advance(self._evaluations.await_any)
        if self._evaluations.are_under_way or any(s.told is not None and s.phase is Phase.ACTIVE for s in members):
            return effects
        if self._saves.is_due and not self._saves.is_under_way:
            effects += self._commits.save_last(now)
        if self._saves.is_under_way:
            return effects
        return effects + self._ending.begin("all batches are contributed", now)
