"""A recorded run read as a script: what each rank trained, sealed and adopted, and what cannot have happened."""

from __future__ import annotations

from typing import Any

import pytest

from flodl.protocol.messages import BatchRange
from flodl.protocol.script import Adopt, Seal, read_script
from tests.unit.replay_cluster import HEAD, Records


def record(kind: str, rank: int = 0, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "generation": rank, **fields}


def attempt(round_: int, *cohort: tuple[int, int, float]) -> dict[str, Any]:
    """cohort: (rank, batches, weight), batches of 4."""
    names = ("rank", "generation", "batches", "samples", "weight")
    members = [dict(zip(names, (rank, rank, n, 4 * n, weight), strict=True)) for rank, n, weight in cohort]
    return {"kind": "attempt", "round": round_, "attempt": round_, "cohort": members}


def seal(rank: int, round_: int, step: int, batches: int) -> dict[str, Any]:
    return record("seal", rank, round=round_, step=step, batches=batches, samples=4 * batches)


BEGINNING: Records = [
    HEAD,
    seal(0, 0, 0, 0),
    attempt(0, (0, 0, 1.0)),
    {"kind": "commit", "round": 0, "hash": 7},
    record("lease", 0, batches=[[0, 0, 4]]),
    record("adopt", 0, round=0, step=0),
    record("lease", 1, batches=[[0, 4, 3]]),
    record("adopt", 1, round=0, step=0),
]


def test_batches_follow_from_leases_recalls_and_steps() -> None:
    script = read_script(
        [
            *BEGINNING,
            record("recall", 1, epoch=0, index=6),
            record("lease", 1, batches=[[0, 9, 4]]),
            record("recall", 1, epoch=0, index=10),
            record("lease", 1, batches=[[0, 20, 2]]),
            seal(0, 1, 3, 3),
            seal(1, 1, 3, 3),
            attempt(1, (0, 3, 0.5), (1, 3, 0.5)),
            {"kind": "commit", "round": 1, "hash": 8},
            record("adopt", 1, round=1, step=4),
            record("exit", 1, is_death=True),
        ]
    )
    (life,) = script.lives[1]
    assert life.batches == (BatchRange(0, 4, 2), BatchRange(0, 9, 1), BatchRange(0, 20, 1))
    assert life.is_killed
    assert life.acts[1] == Seal(1, 3, 12, (BatchRange(0, 4, 2), BatchRange(0, 9, 1)))
    assert life.acts[2] == Adopt(1, 4)
    assert script.rounds[1].before == {(0, 0): 3, (1, 1): 2}
    assert script.rounds[1].contributed == (BatchRange(0, 0, 3), BatchRange(0, 4, 2), BatchRange(0, 9, 1))
    assert [c.buffer_weight for c in script.rounds[1].cohort] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "there is no head"),
        ([HEAD], "no round was committed"),
        ([*BEGINNING[1:]], r"record 1 \(seal\): comes before the head"),
        ([HEAD, HEAD], r"record 2 \(head\): a second head"),
        ([{**HEAD, "resumed_from": "runs/1"}], "the run went on from runs/1"),
        ([*BEGINNING, {"kind": "lost", "lines": 3}], "3 lines were lost"),
        ([*BEGINNING, seal(1, 1, 5, 5)], "came from step 0 to 5 with other batches than it held"),
        ([*BEGINNING, seal(1, 1, 2, 3)], "sealed 3 batches and trained 2"),
        ([*BEGINNING, seal(1, 2, 2, 2)], "sealed round 2 out of turn"),
        ([*BEGINNING, seal(2, 1, 0, 0)], "rank 2 sealed round 1 out of turn"),
        ([*BEGINNING, attempt(1, (1, 3, 1.0))], "rank 1 had not sealed round 1"),
        ([*BEGINNING, seal(1, 1, 3, 3), attempt(1, (1, 2, 1.0))], "counts with other batches than it sealed"),
        ([*BEGINNING, {"kind": "commit", "round": 1, "hash": 1}], "committed without having been summed"),
        ([*BEGINNING, record("adopt", 0, round=1, step=0)], "adopted round 1, which did not stand"),
        ([*BEGINNING, {"kind": "seal", "rank": "one"}], r"record 9 \(seal\): "),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused_by_record(records: Records, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_script(records)
