"""What a person or a program reads of a run: sentences, JSON lines, and the table at the foot of a terminal."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from flodl.records.json_lines import JsonView
from flodl.records.live import LiveView
from flodl.records.plain import PlainView, duration, figure
from flodl.records.terminal import Foot
from flodl.records.views import GuardedView, is_view, make_view
from tests.unit.screen import Screen
from tests.unit.test_snapshot import records

END = {"time_s": 9.0, "kind": "phase", "phase": "done", "reason": "all batches\nare contributed"}
PLAIN = """\
flodl      0.1 s  waiting: ranks are started
flodl      1.0 s  rank 1 is here: emulated:47ms
flodl      1.1 s  rank 0 is here: emulated:10ms
flodl      1.2 s  forming: 2 of 2 ranks are here
flodl      2.0 s  training: every rank has the initial state
flodl      4.5 s  rank 1 was killed by signal 9; its 4 batches are dealt again
flodl      5.6 s  rank 1 is left out of round 2: not finite (w)
flodl      6.0 s  epoch 1 of 2 is done: loss 1.5, 1600 samples, round 2
flodl      6.2 s  evaluation after epoch 1: accuracy 0.5
flodl      7.0 s  rank 1 is here again (restart 1): emulated:47ms
flodl      9.0 s  done: all batches are contributed
"""


# ---- plain


def test_plain_lines() -> None:
    out = io.StringIO()
    view = PlainView(out)
    for record in [*records(), END]:
        view.record(record)
    view.close()
    assert out.getvalue() == PLAIN


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"kind": "warning", "rank": 1, "reason": "rank 1 is slow"}, "warning: rank 1 is slow"),
        ({"kind": "guard", "word": "halve", "reason": "drift"}, "warning: drift; the window is halved"),
        ({"kind": "guard", "word": "hold", "reason": "drift"}, None),
        ({"kind": "absent", "seconds": 3.21}, "warning: the launcher did not run for 3.2 s; nobody is blamed for it"),
        ({"kind": "refused", "rank": 0, "differences": ["a", "b"]}, "rank 0 is refused: a; b"),
        (
            {"kind": "exit", "rank": 0, "is_death": True, "returned": 0, "reason": "rank 0 failed: E\nof two lines"},
            "rank 0 failed: E of two lines",
        ),
        ({"kind": "exit", "rank": 0, "is_death": False, "returned": 0, "reason": "all is done"}, None),
        (
            {"kind": "exclusion", "rank": 2, "round": 7, "quarantined": [[0, 1], [0, 2]], "first": ""},
            "rank 2 is left out of round 7: not finite; 2 batches were so twice and are left out",
        ),
        ({"kind": "epoch", "epoch": 0, "loss": None, "samples": 5}, "epoch 1 of 1 is done: loss not finite, 5 samples"),
        ({"kind": "evaluation", "epoch": 1, "metrics": {}}, "evaluation after epoch 2: no metrics"),
        ({"kind": "lease", "rank": 0, "batches": []}, None),
    ],
)
def test_every_sentence(record: dict[str, Any], said: str | None) -> None:
    out = io.StringIO()
    PlainView(out).record({"time_s": 12.34, **record})
    assert out.getvalue() == ("" if said is None else f"flodl     12.3 s  {said}\n")


def test_a_run_with_nothing_to_say_says_once_a_minute_how_far_it_is() -> None:
    out = io.StringIO()
    view = PlainView(out)
    view.record(records()[0])
    for number in range(1, 200):
        view.record({"time_s": float(number), "kind": "commit", "round": number, "left": 150 - number // 2, "epoch": 0})
    lines = out.getvalue().splitlines()
    assert lines[0] == "flodl     60.0 s  epoch 1 of 2, 30 %; 60 rounds; 4:00 left"
    assert [line.split()[1] for line in lines] == ["60.0", "120.0", "180.0"]


def test_a_stream_that_knows_few_characters_or_goes_away_ends_nothing() -> None:
    raw = io.BytesIO()
    narrow = io.TextIOWrapper(raw, encoding="ascii")
    view = PlainView(narrow)
    view.record({"time_s": 1.0, "kind": "warning", "reason": "θ drifts"})
    narrow.flush()
    assert raw.getvalue() == b"flodl      1.0 s  warning: ? drifts\n"
    narrow.close()
    view.record({"time_s": 2.0, "kind": "warning", "reason": "nobody reads this"})
    view.close()


def test_figures_and_durations() -> None:
    assert [figure(x) for x in (0.123456, 12345.6, 3, True, float("nan"), None, "new")] == [
        "0.1235",
        "1.235e+04",
        "3",
        "True",
        "not finite",
        "not finite",
        "new",
    ]
    assert [duration(s) for s in (0.4, 59.6, 750, 3723)] == ["0:00", "1:00", "12:30", "1:02:03"]


# ---- json


def test_json_lines_are_the_records_worth_a_line_and_a_snapshot_after_a_commit() -> None:
    out = io.StringIO()
    view = JsonView(out)
    for record in [*records(), END]:
        view.record(record)
    view.close()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    told = [line for line in lines if line["kind"] != "snapshot"]
    kinds = {"phase", "join", "exit", "exclusion", "epoch", "evaluation"}
    assert told == [record for record in [*records(), END] if record["kind"] in kinds]
    snapshots = [line for line in lines if line["kind"] == "snapshot"]
    assert [line["time_s"] for line in snapshots] == [2.0, 4.0, 6.0]
    assert snapshots[1]["ranks"][1] == {
        "rank": 1,
        "device": "emulated:47ms",
        "state": "training",
        "share": 0.25,
        "ms_per_batch": 47.5,
        "window": 10,
        "loss": 3.0,
        "restarts": 0,
    }


def test_snapshots_are_at_most_one_a_second() -> None:
    out = io.StringIO()
    view = JsonView(out)
    for number in range(100):
        view.record({"time_s": number / 10, "kind": "commit", "round": number, "epoch": 0, "left": 9})
    assert len(out.getvalue().splitlines()) == 10


# ---- which view


def test_a_terminal_gets_the_table_and_everything_else_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Screen())
    assert isinstance(make_view("live", "xterm"), LiveView)
    assert isinstance(make_view("live", "dumb"), PlainView)
    assert isinstance(make_view("plain", "xterm"), PlainView)
    assert isinstance(make_view("json", "xterm"), JsonView)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(make_view("live", "xterm"), PlainView)


def test_a_process_without_streams_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    for view in (make_view("live", None), make_view("json", None)):
        view.record(END)
        view.close()
    foot = Foot(Screen())
    foot.begin()
    foot.end()
    assert sys.stdout is None


def test_what_is_a_view() -> None:
    assert is_view(PlainView(io.StringIO()))
    assert not is_view(object())
    assert not is_view(None)


# ---- a view that fails


class Failing:
    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise RuntimeError("no colours left")

    def record(self, record: dict[str, Any]) -> None:
        self._called("record")

    def tick(self) -> None:
        self._called("tick")

    def close(self) -> None:
        self._called("close")


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ("record", ["record", "close"]),
        ("tick", ["record", "tick", "close"]),
        ("close", ["record", "tick", "record", "tick", "close"]),
    ],
)
def test_a_view_that_raises_is_off_from_then_on_and_said_once(fails: str, calls: list[str]) -> None:
    warnings: list[str] = []
    inner = Failing(fails)
    view = GuardedView(inner, warnings.append)
    for _ in range(2):
        view.record(END)
        view.tick()
    view.close()
    view.close()
    assert inner.calls == calls
    assert len(warnings) == 1
    assert "no colours left" in warnings[0]
