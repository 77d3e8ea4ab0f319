"""The one loop of a run: wait, tell the controller what happened, do what it asks, in order."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from flodl.errors import WireError
from flodl.native import Endpoint, Event, EventKind
from flodl.processes.clock import RunClock
from flodl.processes.perform_checkpoint import CheckpointPerformer
from flodl.processes.perform_memory import MemoryPerformer
from flodl.processes.perform_processes import REAP_S, RankPerformer
from flodl.processes.perform_records import RecordPerformer
from flodl.processes.rank_process import RankProcess
from flodl.processes.signals import ENDING, Signals
from flodl.protocol.effects import (
    Admit,
    CheckpointEnded,
    CommitRound,
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
    RankStopped,
    Record,
    Reduce,
    ReleaseMemory,
    SaveVelocity,
    Send,
    StartFailed,
    StartRank,
)
from flodl.protocol.messages import FromRank, Hello, Leaving, Recalled, decode_from_rank
from flodl.records.schedule import warn_on_stderr

# A wait is never longer, so that a deadline that nobody announced costs a second at most.
LONGEST_WAIT_S = 1.0


class Machine(Protocol):
    """The controller as its driver sees it. Every method but next_deadline and is_over gives effects, in order."""

    @property
    def is_over(self) -> bool: ...
    def start(self, now: float) -> list[Effect]: ...
    def receive(self, rank: int, generation: int, message: FromRank, now: float) -> list[Effect]: ...
    def tell(self, event: DriverEvent, now: float) -> list[Effect]: ...
    def tick(self, now: float) -> list[Effect]: ...
    def next_deadline(self) -> float | None: ...


@dataclass(frozen=True)
class Performers:
    """Who does what the controller asks for."""

    ranks: RankPerformer
    memory: MemoryPerformer
    records: RecordPerformer
    checkpoints: CheckpointPerformer | None = None


@dataclass(frozen=True)
class Death:
    """An exit that ended no finished rank: what an error message shows. is_own: nobody killed it."""

    rank: int
    code: int
    words: str
    is_own: bool


class Driver:
    """Runs one controller over one endpoint. The performers, and the ranks still alive at the end, are the caller's."""

    def __init__(self, endpoint: Endpoint, performers: Performers, signals: Signals, clock: RunClock) -> None:
        self._endpoint = endpoint
        self._ranks = performers.ranks
        self._memory = performers.memory
        self._records = performers.records
        self._checkpoints = performers.checkpoints
        self._signals = signals
        self._clock = clock
        self._now = clock.now()
        self._effects: deque[Effect] = deque()
        self._interruption = ""
        self._end: EndRun | None = None
        self.death: Death | None = None

    @property
    def interruption(self) -> str:
        """What the user ended the run with; empty if they did not."""
        return self._interruption

    def run(self, machine: Machine) -> EndRun:
        """Until the controller says that the run is over.

        Raises KeyboardInterrupt or SystemExit at the second Ctrl-C or SIGTERM, and what a performer raises.
        """
        self._machine = machine
        self._perform(machine.start(self._now))
        while self._end is None and not machine.is_over:
            for event in self._wait(machine.next_deadline()):
                self._hear(event)
            self._tell_exits()
            self._perform(machine.tick(self._now))
            self._records.tick()
        return self._end or EndRun("the run is over", failed=False)

    def end_ranks(self, grace_s: float) -> None:
        """No rank of this run lives afterwards: they have grace_s to exit by themselves, then they are killed.

        No task on the host's memory runs afterwards either; a commit that was begun is completed.
        """
        self._memory.start_no_more()
        self._drain(grace_s)
        self._ranks.kill_all("the run is over")
        self._drain(REAP_S)
        for process in self._ranks.table:
            warn_on_stderr(f"process {process.pid} (rank {process.rank}) was killed and lives on after {REAP_S:g} s")

    # ---- what happened

    def _wait(self, deadline: float | None) -> list[Event]:
        deadlines = [d for d in (deadline, self._ranks.next_deadline()) if d is not None]
        timeout_s = min([LONGEST_WAIT_S, *(d - self._now for d in deadlines)])
        timeout_s = max(0.0, timeout_s)
        began = self._clock.real()
        events = self._endpoint.wait(timeout_s)
        absent_s = self._clock.leave_out_overshoot(began, timeout_s)
        self._now = self._clock.now()
        if absent_s:
            self._records.record("absent", {"seconds": absent_s})
        return events

    def _hear(self, event: Event) -> None:
        hear = self._HEARS.get(event.kind)
        if hear is not None:
            hear(self, event)

    def _message(self, event: Event) -> None:
        for descriptor in event.take_descriptors():
            os.close(descriptor)
        process = self._ranks.table.of_link(event.id)
        if process is None or event.generation != process.generation:
            self._records.record("dropped", {"link": event.id, "generation": event.generation})
            return
        name = f"rank {process.rank}"
        if process is not self._ranks.table.current(process.rank):
            self._records.record("dropped", {"rank": process.rank, "generation": process.generation})
            return
        try:
            message = decode_from_rank(event.payload, name)
        except WireError as error:
            self._kill(process, str(error).partition("\n")[0])
            return
        process.has_said_hello |= isinstance(message, Hello)
        process.is_leaving |= isinstance(message, Leaving)
        if isinstance(message, Recalled) and message.epoch is not None:
            holder = {"rank": process.rank, "generation": process.generation}
            self._records.record("recall", {**holder, "epoch": message.epoch, "index": message.index})
        self._perform(self._machine.receive(process.rank, process.generation, message, self._now))

    def _link_closed(self, event: Event) -> None:
        process = self._ranks.table.of_link(event.id)
        if process is not None:
            process.link_closed_s = self._now
            process.link_reason = process.link_reason or event.reason

    def _link_silent(self, event: Event) -> None:
        process = self._ranks.table.of_link(event.id)
        if process is not None and process.is_alive:
            self._tell(RankSilent(process.rank, process.generation, event.seconds))

    def _link_heard(self, event: Event) -> None:
        process = self._ranks.table.of_link(event.id)
        if process is not None:
            self._tell(RankHeard(process.rank, process.generation))

    def _stream_data(self, event: Event) -> None:
        process = self._ranks.table.of_stream(event.id)
        if process is not None and process.output is not None:
            process.output.feed(event.payload)

    def _stream_closed(self, event: Event) -> None:
        process = self._ranks.table.of_stream(event.id)
        if process is not None:
            process.is_stream_open = False

    def _child_exited(self, event: Event) -> None:
        process = self._ranks.table.of_pid(event.id)
        if process is not None:
            process.exited(event.status, self._now)

    def _child_stopped(self, event: Event) -> None:
        process = self._ranks.table.of_pid(event.id)
        if process is not None and process.is_alive:
            self._tell(RankStopped(process.rank, process.generation, event.seconds))

    def _task_done(self, event: Event) -> None:
        ended = self._memory.task_done(event)
        if ended is not None:
            self._tell(ended)

    def _signal(self, event: Event) -> None:
        number = signal.Signals(event.id)
        self._signals.taken(number)
        if number.name == "SIGTSTP":
            self._stop_here()
        elif number.name == "SIGCONT":
            self._ranks.continue_all()
        elif self._interruption:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        else:
            self._interruption = "Ctrl-C" if number == signal.SIGINT else number.name
            self._tell(Interrupted(f"{self._interruption}: what is committed is kept; once more ends at once"))

    _HEARS: ClassVar[dict[EventKind, Callable[[Driver, Event], None]]] = {
        EventKind.message: _message,
        EventKind.link_closed: _link_closed,
        EventKind.link_silent: _link_silent,
        EventKind.link_heard: _link_heard,
        EventKind.stream_data: _stream_data,
        EventKind.stream_closed: _stream_closed,
        EventKind.child_exited: _child_exited,
        EventKind.child_stopped: _child_stopped,
        EventKind.task_done: _task_done,
        EventKind.signal: _signal,
    }

    def _stop_here(self) -> None:
        """Ctrl-Z: the ranks stop, then this process; both go on together, and the time between ages nobody."""
        self._ranks.pause_all()
        began = self._clock.real()
        # To this very thread: a signal to the process may stop it only after some more lines of this function.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        self._clock.leave_out(self._clock.real() - began)
        self._now = self._clock.now()
        self._ranks.continue_all()

    def _tell_exits(self) -> None:
        for process in self._ranks.kill_linkless(self._now):
            self._records.record("killed", {"rank": process.rank, "reason": process.kill_reason})
        for process in self._ranks.settled(self._now):
            self._tell(self._exit_of(process))

    def _exit_of(self, process: RankProcess) -> RankExited:
        code = -1 if process.exit_code is None else process.exit_code
        steps = self._memory.steps_started(process.rank, process.generation)
        words = process.words()
        if self._end is None and (code != 0 or not process.is_leaving):
            death = Death(process.rank, code, words, is_own=not process.kill_reason)
            if death.is_own or self.death is None or not self.death.is_own:
                self.death = death
        self._records.record(
            "process_ended",
            {"rank": process.rank, "generation": process.generation, "code": code, "steps_started": steps},
        )
        return RankExited(process.rank, process.generation, code, steps, words)

    def _drain(self, seconds: float) -> None:
        """Hears the ranks' ends and their last output, and tells nobody. A signal cuts it short."""
        ends = self._clock.real() + seconds
        while (len(self._ranks.table) or self._memory.is_busy) and self._clock.real() < ends:
            for event in self._wait(self._now + ends - self._clock.real()):
                if event.kind in _ENDS:
                    self._hear(event)
                elif event.kind == EventKind.task_done:
                    self._memory.task_done(event)
                elif event.kind == EventKind.signal and event.id in _ENDING_NUMBERS:
                    self._signals.taken(event.id)
                    return
            for process in self._ranks.settled(self._now):
                self._exit_of(process)

    # ---- what to do about it

    def _tell(self, event: DriverEvent) -> None:
        self._perform(self._machine.tell(event, self._now))

    def _kill(self, process: RankProcess, reason: str) -> None:
        self._records.record("killed", {"rank": process.rank, "reason": reason})
        process.kill(reason)

    def _perform(self, effects: Iterable[Effect]) -> None:
        """In order; what an effect makes happen at once is told, and its effects come after those already asked for."""
        self._effects.extend(effects)
        while self._effects:
            happened = self._perform_one(self._effects.popleft())
            if happened is not None:
                self._effects.extend(self._machine.tell(happened, self._now))

    def _perform_one(self, effect: Effect) -> DriverEvent | None:
        match effect:
            case Send():
                self._ranks.send(effect)
            case Record():
                self._records.record(effect.kind, effect.fields)
            case StartRank():
                return self._start(effect)
            case KillRank():
                self._ranks.kill(effect)
            case OpenHost():
                self._memory.open_host(effect)
            case Admit():
                self._memory.admit(effect)
            case ReleaseMemory():
                self._memory.release(effect)
            case Reduce():
                self._memory.reduce(effect)
            case CommitRound():
                self._memory.commit(effect)
            case SaveVelocity() | FinishCheckpoint() | DropCheckpoint():
                return self._save(effect)
            case EndRun():
                self._end = effect
        return None

    def _save(self, effect: SaveVelocity | FinishCheckpoint | DropCheckpoint) -> CheckpointEnded | None:
        assert self._checkpoints is not None, "the controller saves only where the run has a folder for checkpoints"
        match effect:
            case SaveVelocity():
                self._checkpoints.save_velocity(effect)
            case FinishCheckpoint():
                return self._checkpoints.finish(effect)
            case DropCheckpoint():
                self._checkpoints.drop(effect)
        return None

    def _start(self, effect: StartRank) -> StartFailed | None:
        failed = self._ranks.start(effect)
        process = self._ranks.table.of(effect.rank, effect.generation)
        if process is not None:
            self._records.record(
                "process_started", {"rank": effect.rank, "generation": effect.generation, "pid": process.pid}
            )
        return failed


_ENDS = frozenset({EventKind.link_closed, EventKind.stream_data, EventKind.stream_closed, EventKind.child_exited})
_ENDING_NUMBERS = frozenset(signal.Signals[name].value for name in ENDING if hasattr(signal, name))
