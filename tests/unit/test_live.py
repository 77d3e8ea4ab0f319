"""The table at the foot of a terminal: what a person sees of a run, and what it costs."""

from __future__ import annotations

import io
import itertools
import sys
from typing import TextIO

import pytest
from rich.console import Console

from flodl.records import live
from flodl.records.live import LiveView
from flodl.records.snapshot import RankSnapshot, Snapshot
from flodl.records.terminal import Foot
from tests.unit.screen import Screen
from tests.unit.test_snapshot import records

END = {"time_s": 9.0, "kind": "phase", "phase": "done", "reason": "all batches\nare contributed"}
ABOVE_THE_TABLE = [
    "flodl      4.5 s  rank 1 was killed by signal 9; its 4 batches are dealt again",
    "flodl      5.6 s  rank 1 is left out of round 2: not finite (w)",
    "flodl      6.0 s  epoch 1 of 2 is done: loss 1.5, 1600 samples, round 2",
    "flodl      6.2 s  evaluation after epoch 1: accuracy 0.5",
]
TABLE = [
    "flodl cpu-cadence   done   0:09   all batches are contributed",
    "epoch 2 of 2, 20 %   round 2   anchor 12   drift 0.25   loss 1   accuracy 0.5",
    "rank  device         state      share  ms/batch  window  loss  restarts",
    "   0  emulated:10ms  training  87.5 %      10.0      40     1         0",
    "   1  emulated:47ms  joined    12.5 %      47.5      10     3         1",
]


class Clock:
    """Stands until it is told to go on; each reading may cost something."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 100.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def console_on(stream: TextIO) -> Console:
    return Console(file=stream, force_terminal=True, width=100, height=25, color_system="standard")


def live_view(screen: Screen, clock: Clock) -> LiveView:
    return LiveView(screen, clock, console_on)


def test_the_table_stands_at_the_foot_and_what_is_worth_a_line_above_it() -> None:
    screen, clock = Screen(), Clock()
    view = live_view(screen, clock)
    for record in [*records(), END]:
        clock.now = 100.0 + record["time_s"]
        view.record(record)
        view.tick()
    view.close()
    assert screen.seen() == [*ABOVE_THE_TABLE, *TABLE]


def test_it_is_drawn_four_times_a_second_at_most_and_goes_on_between_records() -> None:
    screen, clock = Screen(), Clock()
    view = live_view(screen, clock)
    for record in records():
        view.record(record)
    before = screen.writes
    for _ in range(1000):
        clock.now += 0.01
        view.tick()
    assert 38 <= screen.writes - before <= 40
    assert screen.seen()[-5].split()[3] == "0:17"


def test_dear_drawing_is_done_less_often() -> None:
    screen, clock = Screen(), Clock(step=0.0005)
    view = live_view(screen, clock)
    drawn = []
    while clock.now < 120.0:
        before = screen.writes
        view.tick()
        if screen.writes > before:
            drawn.append(clock.now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(drawn)]
    assert min(gaps) == pytest.approx(0.5, abs=0.01)


def test_nothing_is_drawn_while_records_come_without_a_tick() -> None:
    screen = Screen()
    view = live_view(screen, Clock(step=1.0))
    for record in records()[:5]:
        view.record(record)
    assert screen.writes == 0


def test_what_is_printed_goes_above_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, clock = Screen(), Clock()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    view = live_view(screen, clock)
    printed = []
    for number, record in enumerate(records()):
        clock.now = 100.0 + record["time_s"]
        view.record(record)
        view.tick()
        printed.append(f"[rank {number % 2}] line {number}")
        print(printed[-1], file=sys.stderr if number % 3 else sys.stdout)
    sys.stdout.write("\r 10 %\r 20 %")
    assert screen.seen()[-1].startswith("   1  emulated:47ms")
    print("\r100 %\nno end", end="")
    clock.now = 109.0
    view.record(END)
    view.close()
    assert (sys.stdout, sys.stderr) == (screen, screen)
    seen = screen.seen()
    assert [line for line in seen if line.startswith("[rank")] == printed
    assert [line for line in seen if line.startswith("flodl   ")] == ABOVE_THE_TABLE
    assert seen[-7:] == ["100 %", *TABLE, "no end"]


def test_a_stream_that_is_no_terminal_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, file = Screen(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "stderr", screen)
    foot = Foot(screen)
    foot.begin()
    foot.begin()
    assert sys.stdout is file
    assert sys.stderr is not screen
    foot.end()
    foot.end()
    assert sys.stderr is screen


def test_a_stream_that_was_replaced_meanwhile_is_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, other = Screen(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    foot = Foot(screen)
    foot.begin()
    sys.stdout = other
    foot.end()
    assert sys.stdout is other


def test_what_a_stream_raises_reaches_the_printer_and_the_table_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Screen):
        def write(self, text: str, /) -> int:
            raise BrokenPipeError("gone")

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", Broken())
    foot = Foot(screen)
    foot.begin()
    foot.draw("a\nb\n")
    with pytest.raises(BrokenPipeError):
        print("x")
    assert screen.seen() == ["a", "b"]
    sys.stdout.write("no end")
    foot.end()


def ranks(count: int) -> tuple[RankSnapshot, ...]:
    return tuple(RankSnapshot(n, "cpu", "training", 1 / count, 10.0, 5, 0.5, 0) for n in range(count))


def shown(count: int, **console: int) -> list[str]:
    snapshot = Snapshot("cpu-sync", "training", "", 75.0, 3600.0, 9, 10, None, 0.5, 1, 2, 0.5, {}, ranks(count))
    on = Console(file=io.StringIO(), force_terminal=True, color_system=None, **console)
    return live.render(snapshot, on).splitlines()


def test_what_is_left_is_shown_while_training() -> None:
    lines = shown(1, width=80, height=25)
    assert lines[:2] == [
        "flodl cpu-sync   training   1:15   1:00:00 left",
        "epoch 1 of 2, 50 %   round 9   anchor 10   loss 0.5",
    ]


@pytest.mark.parametrize(("count", "height", "more"), [(4, 8, 0), (5, 8, 2), (64, 8, 61), (3, 2, 2)])
def test_more_ranks_than_lines_are_counted(count: int, height: int, more: int) -> None:
    lines = shown(count, width=80, height=height)
    assert len(lines) < max(height, 6)
    assert (lines[-1] == f"and {more} more") == (more > 0)
    assert sum(line.strip().split()[1] == "cpu" for line in lines[3:] if not line.startswith("and")) == count - more


def test_a_narrow_terminal_cuts_lines_and_never_wraps_them() -> None:
    lines = shown(3, width=20, height=25)
    assert len(lines) == 6
    assert all(len(line) <= 20 for line in lines)


def test_a_drawing_that_raises_gives_the_streams_back(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, clock = Screen(), Clock()
    monkeypatch.setattr(sys, "stdout", screen)
    view = LiveView(screen, clock, console_on)
    clock.now += 1.0
    view.tick()
    assert sys.stdout is not screen

    def raises(*_: object) -> str:
        raise RuntimeError("no colours left")

    monkeypatch.setattr(live, "render", raises)
    with pytest.raises(RuntimeError):
        view.close()
    assert sys.stdout is screen


def test_the_stand_ins_hand_everything_else_on(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    foot = Foot(screen)
    foot.begin()
    sys.stdout.writelines(["a", "b\n"])
    assert (sys.stdout.encoding, sys.stdout.isatty(), sys.stdout.write("c")) == ("utf-8", True, 1)
    foot.end()
    assert screen.seen() == ["ab", "c"]
