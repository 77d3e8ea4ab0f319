"""Where a run stands, folded from the records of one with a death and a respawn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flodl.records.snapshot import PACE_ROUNDS, Fold, RankSnapshot, Snapshot

PLAN = {
    "mode": "cpu-cadence",
    "data": {"epochs": 2, "batch_size": 16},
    "cluster": {"devices": ["emulated:10ms", "emulated:47ms"]},
}

# Two ranks, 100 batches an epoch and 150 in all; rank 1 is killed in round 2 and comes back in round 3.
RUN = """
{"time_s":0.1,"kind":"head","epochs":2,"batches_per_epoch":100,"batches":150}
{"time_s":0.1,"kind":"phase","phase":"waiting","reason":"ranks are started"}
{"time_s":0.2,"kind":"process_started","rank":0,"generation":0,"pid":11}
{"time_s":0.3,"kind":"process_started","rank":1,"generation":1,"pid":12}
{"time_s":1.0,"kind":"join","rank":1,"generation":1,"device":"emulated:47ms","pid":12}
{"time_s":1.1,"kind":"join","rank":0,"generation":0,"device":"emulated:10ms","pid":11}
{"time_s":1.2,"kind":"phase","phase":"forming","reason":"2 of 2 ranks are here"}
{"time_s":1.3,"kind":"attempt","round":0,"attempt":1,"cohort":[
 {"rank":0,"generation":0,"batches":0,"samples":0,"weight":1.0,"ms":null,"loss":null}]}
{"time_s":2.0,"kind":"commit","round":0,"hash":1,"seconds":0.1,"epoch":0,"left":150,"anchor":10,"drift":0.0}
{"time_s":2.0,"kind":"phase","phase":"training","reason":"every rank has the initial state"}
{"time_s":2.1,"kind":"adopt","rank":0,"generation":0,"round":0,"step":0}
{"time_s":2.1,"kind":"adopt","rank":1,"generation":1,"round":0,"step":0}
{"time_s":2.9,"kind":"seal","rank":0,"generation":0,"round":1,"step":30,"batches":30,"samples":480}
{"time_s":3.0,"kind":"attempt","round":1,"attempt":2,"cohort":[
 {"rank":0,"generation":0,"batches":30,"samples":480,"weight":0.75,"ms":10.5,"loss":2.0},
 {"rank":1,"generation":1,"batches":10,"samples":160,"weight":0.25,"ms":47.5,"loss":3.0}]}
{"time_s":4.0,"kind":"commit","round":1,"hash":2,"seconds":0.1,"epoch":0,"left":110,"anchor":12,"drift":0.5}
{"time_s":4.5,"kind":"exit","rank":1,"generation":1,"code":-9,"is_death":true,"returned":4,
 "reason":"rank 1 was killed by signal 9"}
{"time_s":5.0,"kind":"process_started","rank":1,"generation":2,"pid":13}
{"time_s":5.5,"kind":"attempt","round":2,"attempt":3,"cohort":[
 {"rank":0,"generation":0,"batches":40,"samples":640,"weight":0.5,"ms":10.0,"loss":1.0},
 {"rank":1,"generation":1,"batches":20,"samples":320,"weight":0.5,"ms":47.0,"loss":9.0}]}
{"time_s":5.6,"kind":"exclusion","rank":1,"generation":1,"round":2,"quarantined":[],"first":"w"}
{"time_s":5.7,"kind":"attempt","round":2,"attempt":4,"cohort":[
 {"rank":0,"generation":0,"batches":40,"samples":640,"weight":1.0,"ms":10.0,"loss":1.0}]}
{"time_s":6.0,"kind":"epoch","epoch":0,"loss":1.5,"samples":1600,"round":2,"metrics":{}}
{"time_s":6.0,"kind":"commit","round":2,"hash":3,"seconds":0.1,"epoch":1,"left":40,"anchor":12,"drift":0.25}
{"time_s":6.2,"kind":"evaluation","rank":0,"epoch":0,"round":2,"metrics":{"accuracy":0.5},"seconds":0.1}
{"time_s":7.0,"kind":"join","rank":1,"generation":2,"device":"emulated:47ms","pid":13}
"""


def records() -> list[dict[str, Any]]:
    """The lines of RUN, a record's own line breaks taken out; the head gets the plan."""
    lines = [json.loads(line) for line in RUN.replace("\n ", "").splitlines() if line]
    return [{**lines[0], "plan": PLAN}, *lines[1:]]


def fold_until(time_s: float) -> Fold:
    fold = Fold()
    for record in records():
        if record["time_s"] <= time_s:
            fold.add(record)
    return fold


def test_before_anything_is_known() -> None:
    snapshot = Fold().snapshot(0.5)
    assert snapshot == Snapshot("", "waiting", "", 0.5, None, 0, None, None, None, 1, 1, 0.0, metrics={}, ranks=())


def test_the_ranks_are_known_from_the_head_on() -> None:
    fold = fold_until(0.25)
    assert [(r.device, r.state) for r in fold.snapshot(0.25).ranks] == [
        ("emulated:10ms", "starting"),
        ("emulated:47ms", "waiting"),
    ]


def test_after_the_first_round() -> None:
    snapshot = fold_until(4.0).snapshot(4.5)
    assert snapshot == Snapshot(
        mode="cpu-cadence",
        phase="training",
        reason="every rank has the initial state",
        elapsed_s=4.5,
        eta_s=pytest.approx(110 * 2.0 / 40 - 0.5),
        rounds=1,
        anchor=12,
        drift=0.5,
        loss=pytest.approx((2.0 * 480 + 3.0 * 160) / 640),
        epoch=1,
        epochs=2,
        epoch_progress=pytest.approx(0.4),
        metrics={},
        ranks=(
            RankSnapshot(0, "emulated:10ms", "training", 0.75, 10.5, 30, 2.0, 0),
            RankSnapshot(1, "emulated:47ms", "training", 0.25, 47.5, 10, 3.0, 0),
        ),
    )


def test_a_death_and_a_respawn() -> None:
    assert fold_until(4.5).snapshot(4.5).ranks[1].state == "lost"
    again = fold_until(5.0).snapshot(5.0).ranks[1]
    assert (again.state, again.restarts, again.ms_per_batch) == ("starting", 1, 47.5)
    joined = fold_until(7.0).snapshot(7.0).ranks[1]
    assert (joined.state, joined.restarts) == ("joined", 1)


def test_only_what_the_committed_attempt_holds_is_counted() -> None:
    snapshot = fold_until(7.0).snapshot(7.0)
    assert (snapshot.rounds, snapshot.loss) == (2, 1.0)
    assert [rank.share for rank in snapshot.ranks] == pytest.approx([70 / 80, 10 / 80])
    assert snapshot.ranks[1].loss == 3.0


def test_the_second_epoch_is_the_short_one() -> None:
    snapshot = fold_until(7.0).snapshot(7.0)
    assert (snapshot.epoch, snapshot.epochs) == (2, 2)
    assert snapshot.epoch_progress == pytest.approx(10 / 50)
    assert snapshot.metrics == {"accuracy": 0.5}


def test_nothing_is_left_at_the_end() -> None:
    fold = fold_until(7.0)
    fold.add({"time_s": 8.0, "kind": "commit", "round": 3, "epoch": 2, "left": 0, "anchor": 12, "drift": 0.1})
    fold.add({"time_s": 8.1, "kind": "exit", "rank": 0, "generation": 0, "code": 0, "is_death": False, "reason": ""})
    fold.add({"time_s": 8.2, "kind": "phase", "phase": "done", "reason": "all batches are contributed"})
    snapshot = fold.snapshot(8.2)
    assert (snapshot.phase, snapshot.epoch, snapshot.epoch_progress, snapshot.eta_s) == ("done", 2, 1.0, 0.0)
    assert snapshot.ranks[0].state == "done"


def test_a_refused_rank_stays_refused_and_an_evicted_one_is_lost_when_it_is_gone() -> None:
    fold = fold_until(1.1)
    fold.add({"kind": "refused", "rank": 0, "generation": 0, "differences": ["data.length"]})
    fold.add({"kind": "exit", "rank": 0, "generation": 0, "code": 0, "is_death": False, "reason": ""})
    fold.add({"kind": "evict", "rank": 1, "generation": 1, "reason": "silent"})
    assert [rank.state for rank in fold.snapshot(2.0).ranks] == ["refused", "evicted"]
    fold.add({"kind": "exit", "rank": 1, "generation": 1, "code": -9, "is_death": True, "reason": ""})
    assert fold.snapshot(2.0).ranks[1].state == "lost"


def test_what_is_left_is_timed_by_the_last_rounds_only() -> None:
    fold = fold_until(0.1)
    time_s, left = 0.0, 2000
    for number in range(3 * PACE_ROUNDS):
        time_s, left = time_s + (10.0 if number < PACE_ROUNDS else 1.0), left - 10
        fold.add({"time_s": time_s, "kind": "commit", "round": number, "left": left, "epoch": 0})
    assert fold.snapshot(time_s).eta_s == pytest.approx(left / 10)


def test_records_without_the_figures_and_of_unknown_kinds_leave_them_unknown() -> None:
    fold = Fold()
    fold.add({"time_s": 1.0, "kind": "something new"})
    fold.add({"time_s": 2.0, "kind": "attempt", "round": 1, "cohort": [{"rank": 1, "batches": 3, "samples": 9}]})
    fold.add({"time_s": 3.0, "kind": "commit", "round": 1})
    snapshot = fold.snapshot(3.0)
    assert (snapshot.rounds, snapshot.eta_s, snapshot.anchor, snapshot.loss) == (1, None, None, None)
    assert [rank.share for rank in snapshot.ranks] == [0.0, 1.0]
