"""Drives a Controller and simulated ranks in virtual time, and checks at each event what must always hold.

Every run is a function of its Scenario alone (seed included), so that a failure is replayed by printing its seed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable

from flodl.protocol.controller import Controller
from flodl.protocol.effects import (
    Admit,
    CommitRound,
    Committed,
    DriverEvent,
    DropCheckpoint,
    Effect,
    EndRun,
    FinishCheckpoint,
    Interrupted,
    KillRank,
    OpenHost,
    RankExited,
    RankHeard,
    RankSilent,
    Record,
    Reduce,
    Reduced,
    ReleaseMemory,
    SaveVelocity,
    Send,
    StartFailed,
    StartRank,
)
from flodl.protocol.messages import (
    Commit,
    DataSpec,
    FromRank,
    Hello,
    Recalled,
    Refused,
    Stop,
    ToRank,
    Welcome,
    decode_from_rank,
    decode_to_rank,
    encode,
)
from flodl.simulation.checkpoints import Checkpoints
from flodl.simulation.rank import LAYOUT, OTHER_LAYOUT, Costs, Health, SimRank, Surroundings
from flodl.simulation.scenario import Fault, Holder, Outcome, Scenario, Violation
from flodl.simulation.waiting import Waiting
from flodl.simulation.witness import Witness

SILENCE_MS = 5000.0
DRAIN_MS = 500.0
"""After an exit, what the process wrote is waited for so long, as the driver does."""
MAX_EVENTS = 200_000


class World:
    """One simulated run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._random = random.Random(scenario.seed)
        self.controller = Controller(scenario.settings)
        self._now = 0.0  # milliseconds
        self._due: float | None = None  # the controller's deadline; it changes only when the controller hears something
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ranks: dict[int, SimRank] = {}
        self._slow = [1.0] * scenario.settings.world_size
        self._partitioned_until = [0.0] * scenario.settings.world_size
        self._armed = [fault for fault in scenario.faults if fault.when]
        self._failing_starts: list[Fault] = []
        self._links: dict[Holder, float] = {}
        self._committed = -1
        self._standing = -1
        self._buffer = 0
        self._theta: list[int | None] = [None, None]  # which round's θ stands in each buffer
        self._reducing: tuple[Reduce, dict[Holder, int]] | None = None
        self._is_ending = False
        self._end: EndRun | None = None
        self._outcome = Outcome(EndRun("", True))
        self._witness = Witness(scenario, self._violation)
        self._checkpoints = Checkpoints(scenario, self._outcome, self._violation)
        self._waiting = Waiting(scenario, self._violation)

    def run(self) -> Outcome:
        """To the end. Raises Violation."""
        for fault in self._scenario.faults:
            if not fault.when:
                self._at(fault.at_ms, lambda fault=fault: self._inflict(fault))  # type: ignore[misc]
        self._perform(self.controller.start(self._seconds()))
        for _ in range(MAX_EVENTS):
            if self._end is not None:
                break
            self._step()
        else:
            raise self._violation(f"not over after {MAX_EVENTS} events: something asks again and again")
        return self._finish(self._end)

    def _finish(self, end: EndRun) -> Outcome:
        outcome = self._outcome
        outcome.end, outcome.virtual_s = end, self._seconds()
        outcome.summary = self.controller.summary()
        outcome.contributed = sorted(self._witness.contributed)
        self._witness.check_end(end, outcome.summary)
        alive = [sim.rank for sim in self._ranks.values() if sim.health is not Health.DEAD]
        if alive and (not end.failed or "interrupted" in end.reason):
            raise self._violation(f"the run ended and ranks {alive} still run")
        return outcome

    # ---- time

    def _seconds(self) -> float:
        return self._now / 1000.0

    def _at(self, at_ms: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(at_ms, self._now), next(self._order), action))

    def _later(self, delay_ms: float, action: Callable[[], None]) -> None:
        self._at(self._now + delay_ms, action)

    def _step(self) -> None:
        due = math.inf if self._due is None else self._due * 1000.0
        at = min(due, self._heap[0][0] if self._heap else math.inf)
        if at == math.inf:
            raise self._violation("deadlock: nothing is scheduled, and the run is not over")
        if not self._is_ending:
            self._waiting.check(self._now, max(self._now, at), self._ranks, is_open=self._reducing is None)
        self._now = max(self._now, at)
        if self._heap and self._heap[0][0] <= at:
            heapq.heappop(self._heap)[2]()
        else:
            self._perform(self.controller.tick(max(self._due or 0.0, self._seconds())))
        if self._now > self._scenario.limit_ms:
            raise self._violation(f"not over after {self._now / 1000:.0f} virtual seconds")

    def _between(self, bounds: tuple[float, float]) -> float:
        return self._random.uniform(*bounds)

    # ---- effects

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(rank, message):
                    self._send(rank, message)
                case StartRank(rank, generation):
                    self._start(rank, generation)
                case KillRank(rank, generation):
                    self._witness.dismissed.add((rank, generation))
                    self._kill(rank, generation, -9)
                case Admit(rank, generation):
                    size = self._scenario.settings.batches_per_epoch
                    self._send(rank, Welcome(rank, generation, size))
                case Reduce():
                    self._reduce(effect)
                case CommitRound():
                    self._commit(effect)
                case ReleaseMemory(rank, generation):
                    self._release((rank, generation))
                case SaveVelocity():
                    self._checkpoints.velocity(effect, self._standing)
                case FinishCheckpoint():
                    self._finish_checkpoint(effect)
                case DropCheckpoint():
                    self._checkpoints.dropped(effect)
                case Record(kind, fields):
                    self._outcome.records.append({"time_ms": round(self._now, 3), "kind": kind, **fields})
                    self._witness.record(effect)
                    self._is_ending = self._is_ending or fields.get("phase") == "ending"
                    if kind == "abort":
                        self._reducing = None
                case EndRun():
                    self._end = effect
                case OpenHost():
                    pass
        self._due = self.controller.next_deadline()

    def _send(self, rank: int, message: ToRank) -> None:
        sim = self._ranks.get(rank)
        if sim is None or sim.health is Health.DEAD:
            return
        if isinstance(message, Stop | Refused):
            self._witness.dismissed.add((rank, sim.generation))
        if isinstance(message, Commit) and (message.round, message.buffer) != (self._standing, self._buffer):
            raise self._violation(f"rank {rank} is told that round {message.round} stands, which is not journalled yet")
        self._waiting.told(sim, message)
        payload = encode(message)
        self._on_link((rank, -1 - sim.generation), lambda: sim.deliver(decode_to_rank(payload)))

    def _on_link(self, link: Holder, action: Callable[[], None]) -> None:
        """Messages of one link keep their order; links are independent."""
        at = max(self._now + self._between(self._scenario.message_ms), self._links.get(link, 0.0))
        at = max(at, self._partitioned_until[link[0]])
        self._links[link] = at
        self._at(at, action)

    def _start(self, rank: int, generation: int) -> None:
        for fault in self._failing_starts:
            if fault.rank == rank:
                self._failing_starts.remove(fault)
                self._outcome.befell.append(fault)
                self._later(0.1, lambda: self._tell(StartFailed(rank, generation, "no such command")))
                return
        scenario = self._scenario
        costs = Costs(
            step_ms=lambda: self._step_ms(rank),
            start_ms=self._between(scenario.start_ms),
            copy_ms=self._between(scenario.copy_ms),
            evaluation_ms=scenario.evaluation_ms,
        )

        def say(message: FromRank) -> None:
            payload = encode(message)
            self._on_link((rank, generation), lambda: self._hear(rank, generation, payload))

        surroundings = Surroundings(
            later=self._later,
            say=say,
            enters=lambda phase, ms: self._enters(rank, phase, ms),
            reads=lambda commit: self._reads(rank, commit),
            now=lambda: self._now,
            exit=lambda code: self._later(1.0, lambda: self._exited(rank, generation, code)),
        )
        layout = OTHER_LAYOUT if rank in scenario.layouts else LAYOUT
        plan = scenario.plans.get(rank, scenario.settings.plan)
        hello = Hello(1000 + generation, "sim", plan, layout, DataSpec(scenario.settings.dataset_length, "sim"))
        sim = SimRank((rank, generation), scenario, costs, surroundings, hello)
        self._ranks[rank] = sim
        self._witness.memories[rank, generation] = sim.memory
        sim.boot()

    def _step_ms(self, rank: int) -> float:
        jitter = self._scenario.jitter
        factor = self._random.uniform(1.0 - jitter, 1.0 + jitter) if jitter else 1.0
        return self._scenario.step_ms[rank] * self._slow[rank] * factor

    def _hear(self, rank: int, generation: int, payload: bytes) -> None:
        if self._end is not None:
            return
        message = decode_from_rank(payload, f"rank {rank}")
        if isinstance(message, Recalled) and (rank, generation) not in self._witness.dismissed:
            self._recalled(rank, generation, message)
        self._perform(self.controller.receive(rank, generation, message, self._seconds()))

    def _recalled(self, rank: int, generation: int, message: Recalled) -> None:
        if message.epoch is not None and message.index is not None:
            self._witness.recalled((rank, generation), (message.epoch, message.index))
            fields = {"rank": rank, "generation": generation, "epoch": message.epoch, "index": message.index}
            self._outcome.records.append({"time_ms": round(self._now, 3), "kind": "recall", **fields})

    def _tell(self, event: DriverEvent) -> None:
        if self._end is None:
            self._perform(self.controller.tell(event, self._seconds()))

    # ---- faults

    def _enters(self, rank: int | None, phase: str, ms: float) -> None:
        """A rank (None: the host) begins something that takes so long: what was armed for it strikes within."""
        for fault in self._armed:
            if fault.when == phase and fault.at_ms <= self._now and (rank is None or fault.rank in (None, rank)):
                self._armed.remove(fault)
                victim = fault.rank if fault.rank is not None else rank
                if victim is None:
                    victim = self._random.choice(sorted(self._ranks))
                struck = Fault(self._now, victim, fault.kind, fault.factor)
                self._later(self._random.uniform(0.0, 0.9 * ms), lambda: self._inflict(struck))  # noqa: B023
                return

    def _inflict(self, fault: Fault) -> None:
        if fault.kind == "interrupt":
            self._outcome.befell.append(fault)
            self._tell(Interrupted("Ctrl-C"))
            return
        assert fault.rank is not None
        if fault.kind == "start_failure":
            self._failing_starts.append(fault)
            return
        sim = self._ranks.get(fault.rank)
        if sim is None or sim.health is Health.DEAD:
            return
        self._outcome.befell.append(fault)
        if fault.kind in ("stop", "partition"):
            self._waiting.silenced(self._now)
        match fault.kind:
            case "kill":
                self._kill(fault.rank, sim.generation, -9)
            case "quit":
                self._kill(fault.rank, sim.generation, 0)
            case "stop":
                sim.freeze()
                self._silence(sim, lambda: sim.health is Health.STOPPED)
            case "thaw":
                if sim.health is Health.STOPPED:
                    sim.thaw()
                    self._tell(RankHeard(fault.rank, sim.generation))
            case "slow":
                self._slow[fault.rank] *= fault.factor
                self._waiting.slowed(self._step_ms(fault.rank))
            case "raise":
                sim.raises_next = True
            case "flip":
                sim.misreads_next = True
            case "partition":
                self._partition(sim, 1000.0 * fault.factor)

    def _partition(self, sim: SimRank, ms: float) -> None:
        self._partitioned_until[sim.rank] = self._now + ms
        if ms >= SILENCE_MS:
            self._silence(sim, lambda: True)
            self._later(ms, lambda: self._tell(RankHeard(sim.rank, sim.generation)))

    def _silence(self, sim: SimRank, is_silent: Callable[[], bool]) -> None:
        event = RankSilent(sim.rank, sim.generation, SILENCE_MS / 1000.0)
        self._later(SILENCE_MS, lambda: self._tell(event) if is_silent() else None)

    def _kill(self, rank: int, generation: int, code: int) -> None:
        sim = self._ranks.get(rank)
        if sim is not None and sim.generation == generation and sim.health is not Health.DEAD:
            sim.die()
            self._later(self._between((0.5, 5.0)), lambda: self._exited(rank, generation, code))

    def _exited(self, rank: int, generation: int, code: int) -> None:
        # What a process wrote before it died is still read from its link before its end of file.
        last = min(self._links.get((rank, generation), self._now), self._now + DRAIN_MS)
        steps = self._ranks[rank].steps_started
        self._at(last, lambda: self._tell(RankExited(rank, generation, code, steps)))

    # ---- the host's memory

    def _reads(self, rank: int, commit: Commit) -> None:
        if self._theta[commit.buffer] != commit.round:
            found = self._theta[commit.buffer]
            raise self._violation(f"rank {rank} adopts round {commit.round} and its buffer holds round {found}")

    def _reduce(self, effect: Reduce) -> None:
        self._witness.check_cohort(effect)
        pending = 1 - self._buffer
        self._theta[pending] = None
        for sim in self._ranks.values():
            if sim.reading == pending and sim.health is not Health.DEAD:
                raise self._violation(f"round {effect.round} writes buffer {pending} while rank {sim.rank} reads it")
        holders = [(c.rank, c.generation) for c in effect.contributions]
        self._reducing = (effect, {holder: self._witness.memories[holder].version for holder in holders})
        ms = self._between(self._scenario.reduce_ms)
        self._later(ms, lambda: self._end_reduce(effect))
        self._enters(None, "reduce", ms)

    def _end_reduce(self, effect: Reduce) -> None:
        if self._reducing is None or self._reducing[0] is not effect:
            return
        memories = self._witness.memories
        for holder, version in self._reducing[1].items():
            if holder not in memories or memories[holder].version != version:
                raise self._violation(f"torn: the contribution of {holder} changed while round {effect.round} read it")
        finite = tuple(not memories[c.rank, c.generation].poisoned for c in effect.contributions)
        distance = tuple(0.01 for _ in effect.contributions)
        first = "" if all(finite) else "w"
        self._tell(Reduced(effect.attempt, finite, distance, 1.0, 1000 + effect.round, 0.01, first))

    def _commit(self, effect: CommitRound) -> None:
        if effect.round != self._committed + 1:
            raise self._violation(f"round {effect.round} is committed after round {self._committed}")
        if self._reducing is None or self._reducing[0].attempt != effect.attempt:
            raise self._violation(
                f"round {effect.round} commits attempt {effect.attempt}, which is not what is pending"
            )
        self._witness.commit(effect, self._reducing[0])
        self._checkpoints.committed(effect.round, self._witness.earlier | self._witness.contributed)
        self._reducing = None
        self._committed = effect.round
        ms = self._between((0.1, 3.0))
        self._later(ms, lambda: self._stand(effect))
        self._enters(None, "commit", ms)

    def _stand(self, effect: CommitRound) -> None:
        self._standing, self._buffer = effect.round, 1 - self._buffer
        self._theta[self._buffer] = effect.round
        self._tell(Committed(effect.round, self._buffer, 1000 + effect.round, 0.001))

    def _finish_checkpoint(self, effect: FinishCheckpoint) -> None:
        ended = self._checkpoints.finish(effect, self._standing)
        self._later(self._between(self._scenario.copy_ms), lambda: self._tell(ended))

    def _release(self, holder: Holder) -> None:
        if self._reducing is not None and holder in self._reducing[1]:
            raise self._violation(f"the memory of {holder} is released while it is summed")
        self._witness.memories.pop(holder, None)

    def _violation(self, what: str) -> Violation:
        tail = "\n".join(str(record) for record in self._outcome.records[-25:])
        return Violation(f"seed {self._scenario.seed}, t = {self._now:.1f} ms: {what}\n{tail}")
