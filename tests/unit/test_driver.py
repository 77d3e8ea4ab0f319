"""The driver's loop over a scripted controller and scripted events: what is told, what is done, in which order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from flodl.native import EventKind
from flodl.processes import clock as clock_room
from flodl.processes.clock import RunClock
from flodl.processes.driver import LONGEST_WAIT_S, Driver, Performers
from flodl.processes.output import Console, RankOutput, RawLog
from flodl.processes.perform_processes import RankPerformer
from flodl.processes.rank_process import DRAIN_S, LEAVING_S, LINKLESS_S, RankProcess
from flodl.processes.signals import Signals
from flodl.protocol.effects import (
    CommitRound,
    Committed,
    DriverEvent,
    Effect,
    EndRun,
    Interrupted,
    KillRank,
    RankExited,
    RankHeard,
    RankSilent,
    RankStopped,
    Record,
    Send,
    StartFailed,
    StartRank,
)
from flodl.protocol.messages import DataSpec, FromRank, Hello, LayoutSpec, Leaving, Progress, Recalled, Stop, encode

HELLO = Hello(1, "cpu", {}, LayoutSpec(0, (), ()), DataSpec(1, ""))


@dataclass
class Happening:
    """Stands for a native event."""

    kind: EventKind
    id: int = 0
    generation: int = 0
    status: int = 0
    seconds: float = 0.0
    reason: str = ""
    payload: bytes = b""
    descriptors: list[int] = field(default_factory=list)

    def take_descriptors(self) -> list[int]:
        taken, self.descriptors = self.descriptors, []
        return taken


class Time:
    """Moves only when told."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@dataclass
class Wait:
    """One wait of the endpoint: how long it takes (None: its whole timeout), and what it gives."""

    takes_s: float | None
    events: tuple[Happening, ...] = ()


class ScriptedEndpoint:
    """Gives the scripted waits, then full timeouts without events."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.script: list[Wait] = []
        self.timeouts: list[float] = []
        self.closed: list[int] = []

    def wait(self, timeout_s: float) -> list[Happening]:
        self.timeouts.append(timeout_s)
        assert len(self.timeouts) < 200, "the run does not end"
        wait = self.script.pop(0) if self.script else Wait(None)
        self.time.at += timeout_s if wait.takes_s is None else wait.takes_s
        return list(wait.events)

    def close_link(self, link: int) -> None:
        self.closed.append(link)


class ScriptedMachine:
    """A controller that answers from a table and remembers what it was told, with the time."""

    def __init__(self, answer: Callable[[object], list[Effect]], first: tuple[Effect, ...] = ()) -> None:
        self.answer = answer
        self.first = first
        self.told: list[object] = []
        self.times: list[float] = []
        self.deadline: float | None = None
        self.is_over = False

    def start(self, now: float) -> list[Effect]:
        return list(self.first)

    def receive(self, rank: int, generation: int, message: FromRank, now: float) -> list[Effect]:
        return self._note((rank, generation, message), now)

    def tell(self, event: DriverEvent, now: float) -> list[Effect]:
        return self._note(event, now)

    def tick(self, now: float) -> list[Effect]:
        return self.answer(("tick", now))

    def next_deadline(self) -> float | None:
        return self.deadline

    def _note(self, what: object, now: float) -> list[Effect]:
        self.told.append(what)
        self.times.append(now)
        return self.answer(what)


class FakeProcess:
    """Stands for Popen. Its number is that of no process, so that a signal to its group reaches nobody."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None


class FakeRanks(RankPerformer):
    """Starts nothing, and notes what is asked for; the table and what happens in it are the real ones."""

    def __init__(self, endpoint: ScriptedEndpoint, log: Path) -> None:
        super().__init__(cast(Any, endpoint), cast(Any, None), lambda rank: RawLog(log), Console(is_quiet=True))
        self.done: list[Effect | str] = []
        self.unstartable: set[int] = set()
        self.log = log

    def start(self, effect: StartRank) -> StartFailed | None:
        self.done.append(effect)
        if effect.rank in self.unstartable:
            return StartFailed(effect.rank, effect.generation, "no such program")
        number = effect.rank + 10 * effect.generation
        output = RankOutput(effect.rank, RawLog(self.log), Console(is_quiet=True))
        process = cast(Any, FakeProcess(2**30 + number))
        self.table.add(RankProcess(effect.rank, effect.generation, process, 500 + number, 900 + number, output))
        return None

    def kill(self, effect: KillRank) -> None:
        self.done.append(effect)

    def send(self, effect: Send) -> None:
        self.done.append(effect)

    def kill_all(self, reason: str) -> None:
        self.done.append("kill all")


class FakeMemory:
    """Knows how far ranks came, and ends a commit when its task ends."""

    def __init__(self) -> None:
        self.is_busy = False
        self.waits = 0
        self.commits: list[CommitRound] = []

    def steps_started(self, rank: int, generation: int) -> int:
        return 40 + rank

    def commit(self, effect: CommitRound) -> None:
        self.is_busy = True
        self.commits.append(effect)

    def task_done(self, event: Happening) -> Committed:
        self.is_busy = False
        return Committed(self.commits[-1].round, 1, 7, 0.5)

    def start_no_more(self) -> None:
        self.waits += 1


class FakeRecords:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def record(self, kind: str, fields: dict[str, Any]) -> None:
        self.lines.append((kind, fields))

    def tick(self) -> None:
        """Time passed: nothing is drawn here."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.lines if name == kind]


class Stage:
    """A driver with everything around it scripted."""

    def __init__(self, log: Path) -> None:
        self.time = Time()
        self.endpoint = ScriptedEndpoint(self.time)
        self.ranks, self.memory, self.records = FakeRanks(self.endpoint, log), FakeMemory(), FakeRecords()
        self.signals = Signals(-1)
        performers = Performers(cast(Any, self.ranks), cast(Any, self.memory), cast(Any, self.records))
        self.driver = Driver(cast(Any, self.endpoint), performers, self.signals, RunClock(self.time))

    def events(self, *events: Happening, takes_s: float | None = 0.0) -> None:
        self.endpoint.script.append(Wait(takes_s, events))

    def run(self, answer: Callable[[object], list[Effect]], *first: Effect) -> ScriptedMachine:
        machine = ScriptedMachine(answer, first)
        self.driver.run(machine)
        return machine


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "rank.log")


def start(rank: int, generation: int = 0) -> StartRank:
    return StartRank(rank, generation, "the run starts")


def says(rank: int, message: FromRank, generation: int = 0) -> Happening:
    return Happening(EventKind.message, 500 + rank + 10 * generation, generation, payload=encode(message))


def end_after(count: int, end: EndRun = EndRun("done", False)) -> Callable[[object], list[Effect]]:  # noqa: B008
    """Nothing happens until so many things were told (ticks left out); then the run ends."""
    seen: list[object] = []

    def answer(what: object) -> list[Effect]:
        if not (isinstance(what, tuple) and what[0] == "tick"):
            seen.append(what)
            if len(seen) == count:
                return [end]
        return []

    return answer


def test_effects_are_done_in_order_and_what_they_cause_comes_after_them(stage: Stage) -> None:
    stage.ranks.unstartable = {1}

    def answer(what: object) -> list[Effect]:
        if what == StartFailed(1, 0, "no such program"):
            return [Send(0, Stop("one is missing")), Record("told", {}), EndRun("over", True)]
        return []

    machine = stage.run(answer, start(1), Record("first", {"a": 1}), start(0))
    assert stage.ranks.done == [start(1), start(0), Send(0, Stop("one is missing"))]
    assert [kind for kind, _ in stage.records.lines] == ["first", "process_started", "told"]
    assert machine.told == [StartFailed(1, 0, "no such program")]
    assert stage.endpoint.timeouts == []


def test_a_message_reaches_the_machine_with_its_sender(stage: Stage) -> None:
    stage.events(says(0, HELLO), says(1, Progress(3, 4)), takes_s=0.25)
    machine = stage.run(end_after(2), start(0), start(1))
    assert machine.told == [(0, 0, HELLO), (1, 0, Progress(3, 4))]
    assert machine.times == [0.25, 0.25]


def test_messages_of_unknown_links_and_old_generations_are_dropped_with_a_record(stage: Stage) -> None:
    stage.events(
        Happening(EventKind.message, 77, 0, payload=encode(HELLO)),
        says(0, Progress(1, 1)),
        Happening(EventKind.message, 510, 0, payload=encode(HELLO)),
        says(0, Progress(2, 2), generation=1),
    )
    machine = stage.run(end_after(1), start(0), start(0, 1))
    assert machine.told == [(0, 1, Progress(2, 2))]
    assert len(stage.records.of("dropped")) == 3


def test_leases_that_a_rank_gives_up_are_recorded_before_they_are_dealt_again(stage: Stage) -> None:
    stage.events(says(0, Recalled()), says(0, Recalled(1, 7)))
    stage.run(end_after(2), start(0))
    assert stage.records.of("recall") == [{"rank": 0, "generation": 0, "epoch": 1, "index": 7}]


def test_descriptors_that_a_rank_sends_are_closed(stage: Stage) -> None:
    read_end, write_end = os.pipe()
    message = says(0, HELLO)
    message.descriptors = [read_end, write_end]
    stage.events(message)
    stage.run(end_after(1), start(0))
    for descriptor in (read_end, write_end):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_bytes_that_are_no_message_kill_the_rank(stage: Stage) -> None:
    stage.events(Happening(EventKind.message, 500, payload=b"\xc1"))
    stage.events(Happening(EventKind.child_exited, 2**30, status=-9), Happening(EventKind.link_closed, 500))
    stage.events(Happening(EventKind.stream_closed, 900))
    machine = stage.run(end_after(1), start(0))
    [exited] = machine.told
    assert isinstance(exited, RankExited)
    assert exited.words.startswith("killed by the launcher: rank 0 sent a message of 1 bytes")
    assert [fields["rank"] for fields in stage.records.of("killed")] == [0]


def test_an_exit_is_told_when_its_last_words_and_messages_were_heard(stage: Stage) -> None:
    stage.events(Happening(EventKind.child_exited, 2**30, status=1), takes_s=0.1)
    stage.events(says(0, Progress(5, 5)), Happening(EventKind.link_closed, 500, reason="end of file"), takes_s=0.1)
    stage.events(Happening(EventKind.stream_data, 900, payload=b"Traceback\nValueError: x\n"), takes_s=0.1)
    stage.events(Happening(EventKind.stream_closed, 900), takes_s=0.1)
    machine = stage.run(end_after(2), start(0))
    assert machine.told == [(0, 0, Progress(5, 5)), RankExited(0, 0, 1, 40, "Traceback\nValueError: x")]
    assert machine.times == pytest.approx([0.2, 0.4])
    assert stage.driver.death is not None
    assert (stage.driver.death.rank, stage.driver.death.is_own) == (0, True)


def test_a_pipe_that_stays_open_delays_an_exit_only_so_long(stage: Stage) -> None:
    stage.events(Happening(EventKind.child_exited, 2**30, status=-9), takes_s=0.25)
    machine = stage.run(end_after(1), start(0))
    assert machine.told == [RankExited(0, 0, -9, 40, "")]
    assert machine.times == pytest.approx([0.25 + DRAIN_S])
    assert stage.endpoint.closed == [500]


def test_an_exit_without_hello_says_so(stage: Stage) -> None:
    stage.events(
        Happening(EventKind.child_exited, 2**30, status=0),
        Happening(EventKind.link_closed, 500),
        Happening(EventKind.stream_closed, 900),
    )
    [exited] = stage.run(end_after(1), start(0)).told
    assert isinstance(exited, RankExited)
    assert (exited.code, exited.words) == (
        0,
        "the script ended without reaching the run() of a Trainer that it was started for",
    )


@pytest.mark.parametrize(("message", "patience"), [(Progress(1, 1), LINKLESS_S), (Leaving(1), LEAVING_S)])
def test_a_process_without_a_link_is_killed_after_a_while(stage: Stage, message: FromRank, patience: float) -> None:
    stage.events(says(0, message), Happening(EventKind.link_closed, 500, reason="end of file"))

    def answer(what: object) -> list[Effect]:
        is_killed = bool(stage.records.of("killed"))
        return [EndRun("done", False)] if isinstance(what, tuple) and what[0] == "tick" and is_killed else []

    stage.run(answer, start(0))
    assert stage.time.at - 100.0 == pytest.approx(patience)
    assert stage.records.of("killed") == [{"rank": 0, "reason": "it closed its link (end of file) and went on running"}]


def test_silence_and_its_end_are_told(stage: Stage) -> None:
    stage.events(Happening(EventKind.link_silent, 500, seconds=5.25), Happening(EventKind.link_heard, 500))
    stage.events(Happening(EventKind.link_silent, 4711, seconds=5.25))
    machine = stage.run(end_after(2), start(0))
    assert machine.told == [RankSilent(0, 0, 5.25), RankHeard(0, 0)]


def test_a_stop_is_told(stage: Stage) -> None:
    stage.events(Happening(EventKind.child_stopped, 2**30, seconds=5.5), Happening(EventKind.child_stopped, 4711))
    machine = stage.run(end_after(1), start(0))
    assert machine.told == [RankStopped(0, 0, 5.5)]


def test_the_machine_is_asked_again_at_its_deadline(stage: Stage) -> None:
    class Impatient(ScriptedMachine):
        def next_deadline(self) -> float | None:
            return 2.25

    ticks: list[float] = []

    def answer(what: object) -> list[Effect]:
        assert isinstance(what, tuple)
        ticks.append(what[1])
        return [EndRun("done", False)] if what[1] >= 2.25 else []

    stage.driver.run(Impatient(answer))
    assert ticks == pytest.approx([LONGEST_WAIT_S, 2 * LONGEST_WAIT_S, 2.25])
    assert stage.endpoint.timeouts == pytest.approx([LONGEST_WAIT_S, LONGEST_WAIT_S, 0.25])


def test_time_in_which_this_process_did_not_run_ages_nobody(stage: Stage) -> None:
    stage.events(takes_s=1.0 + clock_room.OVERSHOOT_S + 600.0)
    stage.events(takes_s=1.0 + clock_room.OVERSHOOT_S)
    ticks: list[float] = []

    def answer(what: object) -> list[Effect]:
        assert isinstance(what, tuple)
        ticks.append(what[1])
        return [EndRun("done", False)] if len(ticks) == 2 else []

    stage.run(answer)
    assert ticks == pytest.approx([1.0, 1.0 + 1.0 + clock_room.OVERSHOOT_S])
    assert [fields["seconds"] for fields in stage.records.of("absent")] == pytest.approx([601.0])


def test_the_end_of_a_task_is_told(stage: Stage) -> None:
    stage.events(Happening(EventKind.task_done, 3))
    commit = CommitRound(3, 9, False, ())
    machine = stage.run(end_after(1), commit)
    assert (stage.memory.commits, machine.told) == ([commit], [Committed(3, 1, 7, 0.5)])


@pytest.mark.parametrize(
    ("number", "name", "raised"),
    [(signal.SIGINT, "Ctrl-C", KeyboardInterrupt), (signal.SIGTERM, "SIGTERM", SystemExit)],
)
def test_the_first_signal_is_told_and_the_second_ends(
    stage: Stage, number: int, name: str, raised: type[BaseException]
) -> None:
    stage.events(Happening(EventKind.signal, number))
    stage.events(Happening(EventKind.signal, number))
    machine = ScriptedMachine(end_after(99))
    with pytest.raises(raised):
        stage.driver.run(machine)
    [interrupted] = machine.told
    assert isinstance(interrupted, Interrupted)
    assert interrupted.reason.startswith(name)
    assert stage.driver.interruption == name


def test_what_is_left_at_the_end_is_killed_and_a_begun_commit_is_completed(stage: Stage) -> None:
    end = EndRun("one rank failed", True)
    stage.run(lambda _: [], start(0), start(1), CommitRound(4, 2, False, ()), end)
    stage.events(Happening(EventKind.child_exited, 2**30, status=0), Happening(EventKind.link_closed, 500))
    stage.events(Happening(EventKind.stream_data, 901, payload=b"bye\n"), takes_s=None)
    stage.events(Happening(EventKind.child_exited, 2**30 + 1, status=-9), Happening(EventKind.task_done, 4))
    stage.driver.end_ranks(0.5)
    assert stage.ranks.done[-1] == "kill all"
    assert len(stage.ranks.table) == 0
    assert not stage.memory.is_busy
    assert {(f["rank"], f["code"]) for f in stage.records.of("process_ended")} == {(0, 0), (1, -9)}
    # The deaths that the end itself caused explain nothing.
    assert stage.driver.death is None


def test_a_process_that_does_not_die_is_named(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.run(lambda _: [], start(3), EndRun("over", True))
    stage.driver.end_ranks(0.0)
    assert f"process {2**30 + 3} (rank 3) was killed and lives on" in capsys.readouterr().err
