"""A rank of the simulated world: the rules of rank/loop.py with virtual steps instead of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from flodl.protocol.messages import (
    Adopted,
    BatchRange,
    Commit,
    Continue,
    Evaluated,
    Failed,
    FromRank,
    Grant,
    Hello,
    LayoutSpec,
    Leaving,
    Paused,
    Progress,
    Recall,
    Recalled,
    Refused,
    Restore,
    Resumed,
    Saved,
    Sealed,
    SealNow,
    SectionSpec,
    Seed,
    Stop,
    TensorSpec,
    ToRank,
    Welcome,
    Window,
    WindowReport,
)
from flodl.simulation.scenario import Batch, Holder, Scenario, Violation

Said = Callable[[FromRank], None]

LAYOUT = LayoutSpec(64, (SectionSpec("parameter", "f32", 0, 16),), (TensorSpec("w", (16,), "f32", "parameter", 0),))

OTHER_LAYOUT = LayoutSpec(
    128, (SectionSpec("parameter", "f32", 0, 32),), (TensorSpec("w", (32,), "f32", "parameter", 0),)
)


@dataclass
class Memory:
    """What stands in a rank's shared memory. `version` moves with every write: one under a reduce is seen."""

    version: int = 0
    sealed_round: int = -1
    based_on: int = -1  # the round that the parameters were adopted from
    batches: list[Batch] = field(default_factory=list)
    poisoned: bool = False


class Health(Enum):
    RUNNING = "running"
    STOPPED = "stopped"  # SIGSTOP: computes and says nothing
    DEAD = "dead"


@dataclass
class Costs:
    """Milliseconds, in virtual time; step_ms: how long the next step takes."""

    step_ms: Callable[[], float]
    start_ms: float
    copy_ms: float
    evaluation_ms: float


@dataclass(frozen=True)
class Surroundings:
    """What a simulated process stands in. `later(delay_ms, action)` schedules; `say` puts a message on its link;
    `enters(phase, ms)` tells what it does next, and for how long; `reads(commit)` is called when a copy of θ has ended.
    """

    later: Callable[[float, Callable[[], None]], None]
    say: Said
    enters: Callable[[str, float], None]
    reads: Callable[[Commit], None]
    now: Callable[[], float]
    exit: Callable[[int], None]


class SimRank:
    """One process. `hello` is what it introduces itself with."""

    def __init__(
        self, holder: Holder, scenario: Scenario, costs: Costs, surroundings: Surroundings, hello: Hello
    ) -> None:
        self.rank, self.generation = holder
        self.scenario = scenario
        self.costs = costs
        self.is_async = scenario.settings.mode == "cpu-async"
        self.memory = Memory()
        self.health = Health.RUNNING
        self.reading: int | None = None  # the host buffer that a copy is under way from
        self.raises_next = False
        self.misreads_next = False
        self.steps_started = 0
        self.idle_since: float | None = None
        self._world = surroundings
        self._say = surroundings.say
        self._hello = hello
        self._inbox: deque[ToRank] = deque()
        self._leases: deque[BatchRange] = deque()
        self._window: Window | None = None
        self._commit: Commit | None = None
        self._continue: Window | None = None
        self._adopted = -1
        self._trained: list[Batch] = []
        self._suspects: tuple[Batch, ...] = ()  # as a rank tells them: the first not finite, and the one before
        self._window_ms: list[float] = []
        self._poisoned = False  # the parameters, not the snapshot
        self._step = 0
        self._ahead = 0
        self._seals_round = -1
        self._keeps = False  # a copy of what the optimizer was at the last seal
        self._seed_asked = False
        self._stop: str | None = None
        self._is_busy = False
        self._held_up: list[Callable[[], None]] = []

    # ---- life

    def boot(self) -> None:
        self._is_busy = True
        self._world.enters("boot", self.costs.start_ms)
        self._after(self.costs.start_ms, self._introduce)

    def _introduce(self) -> None:
        self._is_busy = False
        self._say(self._hello)
        self._boundary()

    def deliver(self, message: ToRank) -> None:
        if self.health is Health.DEAD:
            return
        self._inbox.append(message)
        if not self._is_busy and self.health is Health.RUNNING:
            self._boundary()

    def die(self) -> None:
        self.health = Health.DEAD
        self.idle_since = None
        self.reading = None

    def freeze(self) -> None:
        self.health = Health.STOPPED

    def thaw(self) -> None:
        if self.health is Health.STOPPED:
            self.health = Health.RUNNING
            held, self._held_up = self._held_up, []
            for action in held:
                action()
            if not self._is_busy:
                self._boundary()

    def _after(self, delay_ms: float, action: Callable[[], None]) -> None:
        def run() -> None:
            if self.health is Health.DEAD:
                return
            if self.health is Health.STOPPED:
                self._held_up.append(run)
                return
            action()

        self._world.later(delay_ms, run)

    def _busy(self, phase: str, delay_ms: float, then: Callable[[], None]) -> None:
        self._is_busy = True
        self.idle_since = None
        self._world.enters(phase, delay_ms)

        def done() -> None:
            self._is_busy = False
            then()
            if self.health is not Health.DEAD and not self._is_busy:
                self._boundary()

        self._after(delay_ms, done)

    # ---- the loop's rules

    def _boundary(self) -> None:
        while self._inbox:
            self._take(self._inbox.popleft())
            if self.health is Health.DEAD:
                return
        if self._stop is not None:
            self._say(Leaving(self._step))
            self._end(0)
        elif self._seed_asked:
            self._seed_asked = False
            self._busy("seed", self.costs.copy_ms, lambda: self._finish_seal(0))
        elif self._commit is not None:
            commit, self._commit = self._commit, None
            self.reading = commit.buffer
            if commit.save:
                self._busy("save", self.costs.copy_ms, lambda: self._finish_save(commit))
                return
            self._busy("adopt", self.costs.copy_ms, lambda: self._finish_adopt(commit))
        elif self._is_due():
            round_ = self._window.round if self._window else -1
            self._busy("seal", self.costs.copy_ms if self.is_async else 0.0, lambda: self._finish_seal(round_))
        elif self._may_train() and self._leases:
            self._train()
        else:
            self.idle_since = self._world.now()

    def _end(self, code: int) -> None:
        self.die()
        self._world.exit(code)

    def _take(self, message: ToRank) -> None:
        match message:
            case Refused():
                self._end(1)
            case Welcome() | Restore():
                pass
            case Seed():
                self._seed_asked = True
            case Grant(batches):
                self._leases.extend(batches)
            case Commit():
                self._leases.extend(message.grant)
                if self._commit is not None:
                    self._save(self._commit)
                    message = _latest(self._commit, message)
                self._commit = message
            case Continue(window, grant):
                self._leases.extend(grant)
                self._window, self._seals_round = window, -1
            case SealNow(round_):
                self._seals_round = round_
            case Recall(keep):
                self._give_up(keep)
            case Stop(reason):
                self._stop = reason

    def _is_due(self) -> bool:
        if self._window is None or self._adopted != self._window.round - 1:
            return False
        is_told = self._seals_round == self._window.round
        if self._window.batches is None:
            return is_told and bool(self._trained or not self._leases)
        return is_told or len(self._trained) >= self._window.batches

    def _may_train(self) -> bool:
        if self._adopted < 0:
            return False
        if self._window is not None:
            return self._window.batches is None or len(self._trained) < self._window.batches
        return len(self._trained) < self._ahead

    def _train(self) -> None:
        first = self._leases[0]
        batch = (first.epoch, first.first)
        if first.count == 1:
            self._leases.popleft()
        else:
            self._leases[0] = BatchRange(first.epoch, first.first + 1, first.count - 1)
        self.steps_started += 1
        if self.raises_next or batch in self.scenario.failing_batches:
            self._say(Failed("ValueError: planned", f"Traceback: planned in batch {batch}", batch))
            self._end(1)
            return
        if not self.is_async:
            self.memory.version += 1
        step_ms = self.costs.step_ms()
        self._busy("train", step_ms, lambda: self._finish_step(batch, step_ms))

    def _finish_step(self, batch: Batch, step_ms: float) -> None:
        self._step += 1
        self._trained.append(batch)
        self._window_ms.append(step_ms)
        self._poisoned = self._poisoned or batch in self.scenario.nan_batches
        if self._poisoned and not self._suspects:
            self._suspects = tuple(self._trained[-2:])
        if not self.is_async:
            self.memory.version += 1
        if self._window is not None and self._window.batches is None:
            self._say(Progress(self._step, len(self._trained)))

    def _finish_seal(self, round_: int) -> None:
        trained, self._trained = self._trained, []
        suspects, self._suspects = self._suspects, ()
        cost, self._window_ms = self._window_ms, []
        memory = self.memory
        memory.version += 1
        memory.batches, memory.sealed_round, memory.based_on = trained, round_, self._adopted
        memory.poisoned = self._poisoned
        self._ahead = self._window.run_ahead if self._window else 0
        self._keeps = self._window is not None and self._window.saves
        self._window = None
        samples = sum(self._samples(index) for _, index in trained)
        report = WindowReport(max(0, len(cost) - 1), sum(cost[1:]), 0.0, cost[0] if cost else 0.0)
        losses = tuple((epoch, 1.0 * self._samples(index), self._samples(index)) for epoch, index in trained)
        self._say(Sealed(round_, self._step, len(trained), samples, report, losses, suspects=suspects))

    def _finish_save(self, commit: Commit) -> None:
        self._save(commit)
        self.reading = None
        self._commit = msgspec.structs.replace(commit, save="")

    def _save(self, commit: Commit) -> None:
        if not commit.save:
            return
        if self.is_async and self._trained and not self._keeps:
            raise Violation(f"rank {self.rank} is to save round {commit.round} and has trained on without a copy")
        self._world.reads(commit)
        names = [*(["consensus.safetensors"] if commit.saves_consensus else []), f"rank-{self.rank}.safetensors"]
        error = "No space left on device" if self.rank in self.scenario.failing_saves else ""
        self._say(Paused("checkpoint"))
        for name in names:
            self._say(Saved(commit.round, name, "" if error else "00" * 32, 1, error))
        self._say(Resumed("checkpoint", self.costs.copy_ms / 1000.0))

    def _finish_adopt(self, commit: Commit) -> None:
        self._world.reads(commit)
        # A delta keeps the steps made since the snapshot, and with them what was not finite.
        self._poisoned = self._poisoned and self.is_async and not commit.excluded
        if commit.excluded:
            self._leases.extendleft(BatchRange(epoch, index, 1) for epoch, index in reversed(self._trained))
            self._step -= len(self._trained)
            self._trained, self._window_ms, self._suspects = [], [], ()
        self.reading = None
        self._adopted = commit.round
        if not self.is_async:
            self.memory.version += 1
        self._window, self._ahead = commit.window, 0
        misread, self.misreads_next = self.misreads_next, False
        self._say(Adopted(commit.round, self._step, commit.hash + misread, len(self._trained)))
        self._evaluate(list(commit.evaluate), commit.round)

    def _evaluate(self, epochs: list[int], round_: int) -> None:
        if not epochs:
            return
        self._say(Paused("evaluate"))

        def done() -> None:
            seconds = self.costs.evaluation_ms / 1000.0
            self._say(Evaluated(epochs[0], round_, {"accuracy": 0.5}, seconds))
            self._say(Resumed("evaluate", seconds))
            self._evaluate(epochs[1:], round_)

        self._busy("evaluate", self.costs.evaluation_ms, done)

    def _give_up(self, keep: int) -> None:
        kept: deque[BatchRange] = deque()
        given: BatchRange | None = None
        for lease in self._leases:
            if keep >= lease.count:
                kept.append(lease)
                keep -= lease.count
                continue
            if keep > 0:
                kept.append(BatchRange(lease.epoch, lease.first, keep))
            if given is None:
                given = BatchRange(lease.epoch, lease.first + keep, lease.count - keep)
            keep = 0
        self._leases = kept
        self._say(Recalled(given.epoch, given.first) if given else Recalled())

    def _samples(self, index: int) -> int:
        return self.scenario.settings.samples_of(index)


def _latest(earlier: Commit, later: Commit) -> Commit:
    """Two commits before one boundary, as the real loop takes them."""
    evaluate = (*earlier.evaluate, *later.evaluate)
    return msgspec.structs.replace(later, excluded=earlier.excluded or later.excluded, evaluate=evaluate)
