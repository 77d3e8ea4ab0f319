"""Named runs in virtual time: ranks that come, fall silent, evaluate, differ, or are told to end."""

from dataclasses import replace
from typing import Any

import pytest

from flodl.simulation.scenario import Fault
from tests.sim.runs import a_run, batches_of, completes, fails, kill, run

# ---- joiners


def test_a_joiner_enters_while_a_window_is_open() -> None:
    outcome = completes(a_run((10.0, 2000.0), batches=3000, faults=(Fault(0.0, 0, "kill", when="train"),)))
    assert outcome.late_joins == 1
    assert batches_of(outcome, 0) > 2000


def test_a_joiner_at_the_end_is_not_waited_for() -> None:
    scenario = a_run((10.0, 10.0), batches=500, start_ms=(1000.0, 1000.0))
    alone = completes(scenario).virtual_s
    late = replace(scenario, faults=(Fault(1000.0 * alone - 600.0, 1, "kill"),))
    assert completes(late).virtual_s < alone + 1.5


def test_a_joiner_is_not_in_the_plan_before_it_has_adopted() -> None:
    outcome = completes(a_run(batches=1200, copy_ms=(400.0, 400.0), faults=(Fault(6000.0, 1, "kill"),)))
    joined = outcome.of("join")[-1]
    generation = joined["generation"]
    adopted = next(r for r in outcome.of("adopt") if r["generation"] == generation)
    leased = next(r for r in outcome.of("lease") if r["generation"] == generation)
    assert float(str(adopted["time_ms"])) <= float(str(leased["time_ms"]))


# ---- silence and stalls


def test_a_rank_stopped_for_less_than_detect_s_is_left_alone() -> None:
    outcome = completes(a_run(faults=(Fault(6000.0, 1, "stop"), Fault(9000.0, 1, "thaw"))))
    assert outcome.deaths == 0


def test_a_rank_stopped_beyond_detect_s_is_evicted_and_what_it_says_afterwards_is_not_heard() -> None:
    outcome = completes(a_run(batches=900, faults=(Fault(6000.0, 1, "stop"), Fault(11_500.0, 1, "thaw"))))
    assert outcome.deaths == 1
    assert outcome.of("evict")[0]["reason"] == "evicted: silent for 5.0 s"


def test_a_partitioned_rank_is_evicted_and_comes_back() -> None:
    outcome = completes(a_run(batches=1800, faults=(Fault(6000.0, 1, "partition", 7.0),)))
    assert outcome.deaths == 1
    assert outcome.late_joins == 1


def test_a_short_partition_costs_nobody() -> None:
    assert completes(a_run(faults=(Fault(6000.0, 1, "partition", 2.0),))).deaths == 0


def test_a_hung_rank_is_warned_about_at_half_of_stall_s_and_evicted_at_the_limit() -> None:
    outcome = completes(a_run(batches=900, stall_s=8.0, faults=(Fault(6000.0, 1, "slow", 1000.0),)))
    warned, evicted = outcome.of("warning")[0], outcome.of("evict")[0]
    assert "no progress for 4.0 s; at 8 s it is evicted" in str(warned["reason"])
    assert evicted["reason"] == "evicted: no progress for 8.0 s (stall_s 8)"
    assert batches_of(outcome, 1) < 200
    assert float(str(evicted["time_ms"])) - float(str(warned["time_ms"])) == pytest.approx(4000.0, abs=1.0)


@pytest.mark.parametrize("mode", ["cpu-cadence", "cpu-async"])
def test_the_wait_for_a_rank_that_hangs_makes_no_later_window_longer(mode: str) -> None:
    """Seen: a minute's wait counted as what a round costs, and the anchor doubled for eight rounds."""
    hangs = Fault(6000.0, 1, "slow", 1000.0)
    outcome = completes(a_run((10.0, 20.0, 20.0), batches=900, mode=mode, stall_s=8.0, faults=(hangs,)))
    evicted = float(str(outcome.of("evict")[0]["time_ms"]))
    anchors = [(float(str(r["time_ms"])), int(str(r["anchor"]))) for r in outcome.of("commit")]
    before = max(anchor for at, anchor in anchors if at < evicted)
    assert before > 2 * anchors[0][1]
    assert max(anchor for _, anchor in anchors) < 1.3 * before


def test_an_evaluation_longer_than_stall_s_is_not_blamed() -> None:
    outcome = completes(a_run(evaluates=True, evaluation_ms=9000.0, stall_s=4.0, batches=200))
    assert outcome.deaths == 0
    assert outcome.of("evict") == []
    assert {line["reason"] for line in outcome.of("warning")} == {
        "rank 0 has been in 'evaluate' for 4 s; it is waited for"
    }


# ---- evaluation


def test_every_epoch_is_evaluated_on_the_round_that_closed_it() -> None:
    outcome = completes(a_run(batches=100, epochs=4, evaluates=True, mode="cpu-async"))
    epochs: Any = outcome.summary["epochs"]
    for epoch, evaluation in zip(epochs, outcome.of("evaluation"), strict=True):
        assert (evaluation["epoch"], evaluation["round"]) == (epoch["epoch"], epoch["round"])


def test_an_evaluator_that_dies_is_replaced() -> None:
    outcome = completes(a_run(epochs=2, batches=150, evaluates=True, respawn=0, faults=(kill(None, "evaluate"),)))
    assert outcome.deaths == 1
    epochs: Any = outcome.summary["epochs"]
    assert all(epoch["metrics"] for epoch in epochs)


def test_an_evaluator_that_dies_alone_is_waited_for() -> None:
    outcome = completes(a_run((10.0,), batches=30, evaluates=True, respawn=1, faults=(kill(0, "evaluate"),)))
    epochs: Any = outcome.summary["epochs"]
    assert epochs[0]["metrics"] == {"accuracy": 0.5}


def test_an_epoch_that_nobody_is_left_to_evaluate_degrades_the_run_and_no_more() -> None:
    outcome = completes(a_run((10.0,), batches=30, evaluates=True, respawn=0, faults=(kill(0, "evaluate"),)))
    assert "were not evaluated" in str(outcome.summary["degraded"])


def test_the_chosen_rank_evaluates() -> None:
    outcome = completes(a_run(epochs=2, batches=100, evaluates=True, eval_rank=2))
    assert {evaluation["rank"] for evaluation in outcome.of("evaluation")} == {2}


# ---- admission, agreement, ends


def test_a_rank_with_another_model_is_refused_and_only_it_is_lost() -> None:
    outcome = completes(a_run(layouts=frozenset({2}), start_ms=(1000.0, 1000.0), message_ms=(1.0, 1.0)))
    refused = outcome.of("refused")[0]
    assert refused["rank"] == 2
    assert "w" in str(refused["differences"])
    assert outcome.deaths == 0
    assert batches_of(outcome, 2) == 0


def test_a_rank_with_another_plan_is_refused_by_naming_the_field() -> None:
    ours, theirs = {"data": {"batch_size": 4}}, {"data": {"batch_size": 8}}
    outcome = completes(a_run(plan=ours, plans={1: theirs}))
    assert outcome.of("refused")[0]["differences"] == ["plan: data.batch_size is 8 here and 4 in the launcher"]


def test_a_run_that_admits_nobody_fails_with_the_differences() -> None:
    plans: dict[int, dict[str, object]] = {rank: {"seed": 1} for rank in range(3)}
    fails(a_run(plan={"seed": 0}, plans=plans), "no rank was admitted")


def test_a_rank_that_read_another_state_is_evicted_and_starts_from_the_committed_one() -> None:
    outcome = completes(a_run(batches=900, faults=(Fault(6000.0, 1, "flip"),)))
    assert len(outcome.of("mismatch")) == 1
    assert outcome.deaths == 1
    assert outcome.late_joins == 1


def test_an_interrupted_run_ends_everyone_and_keeps_what_is_committed() -> None:
    outcome = fails(a_run(faults=(Fault(6000.0, None, "interrupt"),)), "interrupted: Ctrl-C")
    assert outcome.virtual_s < 6.5
    assert outcome.summary["batches"] == len(outcome.contributed)
    assert outcome.deaths == 0


def test_an_interrupt_before_anyone_is_here_ends_the_run() -> None:
    assert fails(a_run(faults=(Fault(50.0, None, "interrupt"),)), "interrupted").virtual_s < 1.0


def test_a_rank_that_does_not_heed_the_end_is_killed_ten_seconds_later() -> None:
    outcome = run(
        a_run(
            (10.0, 10.0),
            batches=100,
            faults=(Fault(0.0, 1, "slow", 3000.0, when="adopt"), Fault(7000.0, None, "interrupt")),
        )
    )
    assert outcome.end.failed
    assert 16.0 < outcome.virtual_s < 18.0


def test_async_ranks_run_ahead_while_one_dies_between_seal_and_commit() -> None:
    scenario = a_run(mode="cpu-async", batches=600, reduce_ms=(300.0, 400.0), faults=(kill(1, "reduce", 6000.0),))
    outcome = completes(scenario)
    assert outcome.deaths == 1
    assert len(outcome.contributed) == 600


def test_an_absence_before_the_training_took_nothing_from_it() -> None:
    outcome = completes(a_run(batches=200, start_ms=(500.0, 600.0), faults=(Fault(450.0, 1, "kill"),)))
    assert outcome.deaths == 1
    began = next(line["time_ms"] for line in outcome.records if line.get("phase") == "training")
    left = next(line["time_ms"] for line in outcome.of("exit"))
    assert float(str(left)) < float(str(began))
    ranks: Any = outcome.summary["ranks"]
    assert float(ranks[1]["pauses_s"].get("absent", 0.0)) < 0.1
