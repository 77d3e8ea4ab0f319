"""Named runs in virtual time. Each test is a sentence; the world checks everything else at every event."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from flodl.simulation.scenario import Fault
from flodl.simulation.world import World
from tests.sim.runs import MODES, a_run, batches_of, completes, fails, kill

# ---- runs without a fault


@pytest.mark.parametrize("mode", MODES)
def test_every_batch_is_contributed_once_in_every_mode(mode: str) -> None:
    outcome = completes(a_run(mode=mode, epochs=2))
    assert len(outcome.contributed) == 800
    assert outcome.deaths == 0
    assert outcome.summary["recomputed"] == 0


def test_ranks_share_the_work_by_speed() -> None:
    outcome = completes(a_run((10.0, 40.0), batches=1000))
    assert batches_of(outcome, 0) / batches_of(outcome, 1) == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("mode", ["cpu-cadence", "cpu-async"])
def test_a_window_larger_than_an_epoch_starves_nobody(mode: str) -> None:
    """Seen: what the first rank reads ahead was leased before the others' windows were filled, and took it all."""
    steps = (20.0, 60.0, 94.0)
    outcome = completes(a_run(steps, batches=47, epochs=15, mode=mode, outer_min_window=30))
    total, speeds = sum(batches_of(outcome, rank) for rank in range(3)), sum(1.0 / ms for ms in steps)
    for rank, ms in enumerate(steps):
        assert batches_of(outcome, rank) / total == pytest.approx(1.0 / ms / speeds, rel=0.12)


def test_in_sync_mode_every_rank_makes_one_batch_per_round() -> None:
    outcome = completes(a_run(mode="cpu-sync", batches=30))
    assert {record["batches"] for record in outcome.of("seal") if record["round"]} == {1}
    assert outcome.summary["rounds"] == 10


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_one_batch_ends_with_two_ranks(mode: str) -> None:
    assert completes(a_run((10.0, 30.0), batches=1, mode=mode)).contributed == [(0, 0)]


@pytest.mark.parametrize("mode", MODES)
def test_epochs_smaller_than_the_world_are_not_waited_for(mode: str) -> None:
    outcome = completes(a_run((10.0, 20.0, 30.0, 40.0, 50.0), batches=2, epochs=6, mode=mode, evaluates=True))
    assert len(outcome.contributed) == 12
    assert [epoch["metrics"] for epoch in outcome.summary["epochs"]] == [{"accuracy": 0.5}] * 6  # type: ignore[attr-defined]


def test_a_short_last_batch_counts_by_its_samples() -> None:
    outcome = completes(a_run((10.0, 10.0), batches=10, mode="cpu-sync", dataset_length=37))
    assert outcome.summary["samples"] == 37
    attempts: Any = outcome.of("attempt")
    assert sorted(c["samples"] for c in attempts[-1]["cohort"]) == [1, 4]
    assert sorted(c["weight"] for c in attempts[-1]["cohort"]) == pytest.approx([0.2, 0.8])


@pytest.mark.parametrize(("samples", "batches"), [(1, 1), (5, 1), (6, 2), (7, 2), (12, 3), (21, 6)])
def test_samples_ends_the_run_at_the_batch_that_reaches_it(samples: int, batches: int) -> None:
    # An epoch is a batch of 5 and a short one of 2.
    outcome = completes(a_run((10.0, 30.0), dataset_length=7, batch_size=5, epochs=3, samples=samples))
    assert len(outcome.contributed) == batches


def test_a_ratio_of_64_leaves_the_slow_rank_its_share() -> None:
    outcome = completes(a_run((10.0, 640.0), batches=3000))
    assert batches_of(outcome, 1) >= 0.9 * 3000 / 65


def test_a_rank_slower_than_the_cap_is_still_not_given_what_it_cannot_do() -> None:
    outcome = completes(a_run((5.0, 2000.0), batches=3000))
    assert batches_of(outcome, 1) <= 0.05 * 3000


def test_a_rank_ten_times_slower_after_half_is_given_a_tenth_within_three_windows() -> None:
    scenario = a_run((10.0, 10.0), batches=4000, faults=(Fault(12_000.0, 1, "slow", 10.0),))
    outcome = completes(scenario)
    seals = [s for s in outcome.of("seal") if s["rank"] == 1 and float(str(s["time_ms"])) > 12_000.0]
    usual = max(int(str(s["batches"])) for s in outcome.of("seal") if s["rank"] == 1)
    assert int(str(seals[3]["batches"])) <= 0.2 * usual
    # 20 s alone at double speed; half of it is left at 12 s, which one rank does in 20 s.
    assert outcome.virtual_s < 35.0


def test_a_straggler_in_the_last_window_gives_its_leases_back() -> None:
    scenario = a_run((10.0, 10.0), batches=2000, anchor=50, start_ms=(1000.0, 1000.0))
    usual = completes(scenario)
    assert "the last window" in str(usual.of("window")[-1]["reason"])
    began = float(str(usual.of("window")[-1]["time_ms"]))
    outcome = completes(replace(scenario, faults=(Fault(began + 30.0, 1, "slow", 100.0),)))
    # One batch of a second is under way when the others are done, and one may follow before its speed is believed.
    assert 1 <= len(outcome.of("cut")) <= 2
    assert outcome.virtual_s < usual.virtual_s + 2.5


def test_a_rank_with_nothing_to_do_does_not_block_the_round() -> None:
    outcome = completes(a_run((10.0, 10.0, 2000.0), batches=40, start_ms=(1000.0, 1000.0)))
    assert outcome.virtual_s < 1.0 + 2.0 + 1.0
    assert batches_of(outcome, 2) == 1


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_alone_trains_through(mode: str) -> None:
    outcome = completes(a_run((10.0,), batches=50, epochs=2, mode=mode, evaluates=True))
    assert len(outcome.contributed) == 100


# ---- deaths


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", ["boot", "seed", "train", "seal", "adopt", "reduce", "commit"])
@pytest.mark.parametrize("respawn", [0, 2])
def test_a_kill_in_any_phase_costs_no_batch(mode: str, phase: str, respawn: int) -> None:
    faults = (kill(None, phase),)
    outcome = completes(a_run(mode=mode, batches=200, respawn=respawn, faults=faults, start_ms=(300.0, 300.0)))
    assert outcome.deaths == 1
    assert outcome.late_joins == (0 if phase in ("boot", "seed") or not respawn else 1)


def test_a_seed_rank_killed_while_the_run_forms_is_replaced_as_seed() -> None:
    outcome = completes(a_run(batches=30, respawn=0, faults=(kill(0, "seed"),)))
    assert [r["rank"] for r in outcome.of("seal") if r["round"] == 0] == [1]


def test_a_death_after_the_seal_withdraws_nothing() -> None:
    outcome = completes(a_run(batches=60, respawn=0, start_ms=(500.0, 500.0), faults=(kill(2, "reduce", 600.0),)))
    attempts: Any = outcome.of("attempt")
    died = outcome.of("exit")[0]["time_ms"]
    counted = [a for a in attempts if a["round"] > 0 and float(a["time_ms"]) <= float(str(died))][-1]
    assert 2 in {c["rank"] for c in counted["cohort"]}


def test_when_all_die_after_sealing_the_last_window_the_run_is_complete() -> None:
    scenario = a_run((10.0, 10.0, 10.0), batches=3, mode="cpu-sync", respawn=0, reduce_ms=(50.0, 50.0))
    last = float(str(completes(scenario).of("attempt")[-1]["time_ms"]))
    faults = tuple(Fault(last + 10.0, rank, "kill") for rank in range(3))
    outcome = completes(replace(scenario, faults=faults))
    assert outcome.deaths == 3
    assert len(outcome.contributed) == 3


def test_when_all_die_what_they_had_sealed_is_committed_before_the_run_fails() -> None:
    outcome = fails(a_run((10.0,), batches=400, respawn=0, faults=(kill(0, "reduce", 6000.0),)), "no rank is left")
    last_attempt, last_commit = outcome.of("attempt")[-1], outcome.of("commit")[-1]
    assert last_attempt["round"] == last_commit["round"]


def test_a_run_whose_ranks_are_all_dead_goes_on_when_they_come_back() -> None:
    faults = tuple(Fault(6000.0, rank, "kill") for rank in range(3))
    outcome = completes(a_run(faults=faults, respawn=1))
    assert outcome.deaths == 3
    assert outcome.late_joins == 3


def test_leases_on_their_way_to_a_rank_that_is_dead_go_back() -> None:
    outcome = completes(a_run(batches=300, respawn=0, faults=(kill(1, "commit", 5000.0),)))
    assert outcome.of("exit")[0]["returned"] != 0


@pytest.mark.parametrize("mode", MODES)
def test_survivors_of_a_kill_are_back_at_work_within_a_second(mode: str) -> None:
    outcome = completes(
        a_run((10.0, 47.0, 47.0), batches=600, mode=mode, respawn=0, faults=(Fault(6000.0, 1, "kill"),))
    )
    died = float(str(outcome.of("exit")[0]["time_ms"]))
    after = [float(str(r["time_ms"])) for r in outcome.of("seal") if float(str(r["time_ms"])) > died]
    windows = [float(str(r["time_ms"])) for r in outcome.of("commit")]
    longest = max(b - a for a, b in pairwise(windows))
    assert after[0] - died < longest + 1000.0


def test_a_rank_that_exits_with_zero_untold_is_a_death_and_is_restarted() -> None:
    outcome = completes(a_run(batches=1200, respawn=1, faults=(Fault(6000.0, 1, "quit"),)))
    assert outcome.deaths == 1
    assert outcome.late_joins == 1
    assert outcome.of("exit")[0]["reason"] == "rank 1 exited with code 0"


def test_a_rank_is_restarted_no_more_often_than_respawn_says() -> None:
    faults = tuple(Fault(5000.0 + 4000.0 * n, 1, "kill") for n in range(5))
    outcome = completes(a_run((10.0, 47.0), batches=2500, respawn=2, faults=faults))
    assert outcome.deaths == 3
    assert outcome.late_joins == 2


def test_max_failures_as_a_count_ends_the_run() -> None:
    faults = (Fault(6000.0, 1, "kill"), Fault(6500.0, 2, "kill"))
    completes(a_run(max_failures=2, faults=faults))
    fails(a_run(max_failures=1, faults=faults), "2 deaths are over max_failures=1")


def test_max_failures_as_a_share_of_the_ranks_ends_the_run() -> None:
    faults = (Fault(6000.0, 1, "kill"), Fault(6500.0, 2, "kill"))
    completes(a_run(max_failures=0.7, faults=faults))
    fails(a_run(max_failures=0.5, faults=faults), "2 deaths are over max_failures=0.5")


def test_a_start_that_fails_during_the_run_counts_as_a_death() -> None:
    faults = (Fault(5900.0, 1, "start_failure"), Fault(6000.0, 1, "kill"))
    outcome = completes(a_run(respawn=2, batches=900, faults=faults))
    assert outcome.deaths == 2
    assert outcome.late_joins == 1


# ---- exceptions


def test_an_exception_before_the_first_commit_ends_the_run_at_once_with_its_traceback() -> None:
    outcome = fails(a_run(failing_batches=frozenset({(0, 2)})), "a rank failed before the first round was committed")
    assert outcome.end.traceback == "Traceback: planned in batch (0, 2)"
    assert outcome.deaths == 1


def test_a_batch_that_fails_twice_ends_the_run_and_is_named() -> None:
    outcome = fails(a_run(failing_batches=frozenset({(0, 150)})), "batch 150 of epoch 0 failed twice")
    assert outcome.deaths == 2


def test_an_exception_that_does_not_come_again_costs_one_restart() -> None:
    outcome = completes(a_run(batches=900, faults=(Fault(6000.0, 0, "raise"),)))
    assert outcome.deaths == 1
    assert "rank 0 failed: ValueError: planned" in str(outcome.summary["degraded"])


def test_a_script_that_ends_before_run_ends_the_run_with_that_sentence() -> None:
    fails(a_run(faults=(Fault(100.0, 1, "quit"),)), "rank 1's script ended without reaching its run()")


# ---- not finite


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_is_not_finite_is_dealt_to_another_rank_and_then_quarantined(mode: str) -> None:
    outcome = completes(a_run((10.0, 12.0, 15.0), batches=300, mode=mode, nan_batches=frozenset({(0, 200)})))
    first, second = outcome.of("exclusion")
    assert first["rank"] != second["rank"]
    # Those beside it in the windows that were left out are innocent, and count.
    assert [tuple(b) for b in outcome.summary["quarantined"]] == [(0, 200)]  # type: ignore[attr-defined]
    assert len(outcome.contributed) == 299
    assert first["first"] == "w"
    assert "given up, for they were not finite twice: batch 200 of epoch 0" in outcome.summary["degraded"]  # type: ignore[operator]


def test_a_run_whose_ranks_are_all_not_finite_fails_naming_the_tensor() -> None:
    everything = frozenset((0, i) for i in range(400))
    outcome = fails(a_run(nan_batches=everything), "every contribution of round 1 is not finite; first: w")
    assert outcome.of("commit")[-1]["round"] == 0


def test_a_rank_that_is_not_finite_three_rounds_running_ends_the_run() -> None:
    scenario = a_run((10.0, 10.0), batches=400, mode="cpu-sync")
    # In sync mode rank 0 takes the even batches until its first exclusion shifts the parity.
    odd = frozenset((0, i) for i in range(400) if i % 2 == 0)
    world = World(replace(scenario, nan_batches=odd))
    outcome = world.run()
    assert outcome.end.failed
    assert "not finite" in outcome.end.reason


def test_a_batch_left_for_another_rank_is_not_waited_for_by_the_one_that_must_avoid_it() -> None:
    # The very last batch: only the other rank may try it again, and nothing else is left to do meanwhile.
    outcome = completes(a_run((10.0, 90.0), batches=40, nan_batches=frozenset({(0, 39)})))
    first, second = outcome.of("exclusion")
    assert first["rank"] != second["rank"]
    assert [tuple(b) for b in outcome.summary["quarantined"]] == [(0, 39)]  # type: ignore[attr-defined]
    assert len(outcome.contributed) == 39
