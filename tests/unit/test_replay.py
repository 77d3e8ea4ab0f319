"""The machine that plays a recorded run: simulated runs are played again, by the rank's real loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flodl.protocol.effects import (
    Interrupted,
    RankExited,
    RankSilent,
    RankStopped,
    Reduced,
    Send,
)
from flodl.protocol.messages import Failed, Stop
from flodl.protocol.script import Adopt, Script, Seal, read_script
from flodl.protocol.settings import ControllerSettings
from flodl.rank.leases import Lease
from flodl.records.record import decode_line, encode_line
from flodl.simulation.scenario import Fault, Outcome, Scenario
from flodl.simulation.soak import scenario as random_scenario
from flodl.simulation.world import World
from tests.unit.replay_cluster import HEAD, Cluster, Records

MODES = ("cpu-sync", "cpu-cadence", "cpu-async")


def recorded(scenario: Scenario) -> tuple[Outcome, Records]:
    """A simulated run, and its schedule as the file has it."""
    world = World(scenario)
    outcome = world.run()
    return outcome, [dict(HEAD), *(decode_line(encode_line(record)) for record in outcome.records)]


def a_run(**changes: Any) -> Scenario:
    settings = ControllerSettings(
        world_size=3, mode="cpu-async", dataset_length=600, batch_size=4, epochs=2, prefetch=2
    )
    ours = {name: value for name, value in changes.items() if name in ControllerSettings.__dataclass_fields__}
    rest = {name: value for name, value in changes.items() if name not in ours}
    return Scenario(replace(settings, **ours), (10.0, 25.0, 47.0), **rest)


def acts_of(records: Records) -> list[tuple[Any, ...]]:
    """Every seal and adoption."""
    fields = ("kind", "rank", "generation", "round", "step")
    return sorted(tuple(r[f] for f in fields) for r in records if r["kind"] in ("seal", "adopt"))


def assert_same(script: Script, again: Script) -> None:
    """Two schedules that ask for the same bits."""
    assert again.lives == script.lives
    assert [(r.number, r.cohort, r.hash, r.contributed) for r in again.rounds] == [
        (r.number, r.cohort, r.hash, r.contributed) for r in script.rounds
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_with_deaths_is_played_again_act_by_act(mode: str, seed: int) -> None:
    faults = (Fault(5000.0, 1, "kill", when="train"), Fault(9000.0, 2, "kill", when="seal"), Fault(6000.0, 0, "stop"))
    scenario = a_run(mode=mode, seed=seed, faults=faults, evaluates=True, epochs=4)
    outcome, records = recorded(scenario)
    assert outcome.deaths >= 2
    script = read_script(records)
    cluster = Cluster(scenario.settings, script, seed)
    end = cluster.play()
    assert not end.failed, end
    assert acts_of(cluster.records) == acts_of(records)
    assert_same(script, read_script(cluster.records))
    for life in (life for lives in script.lives.values() for life in lives):
        asked = [Lease(p.epoch, p.first + i) for p in life.batches for i in range(p.count)]
        assert cluster.lives[life.holder].trained == asked
    summary = cluster.replay.summary()
    assert (summary["phase"], summary["samples"], summary["deaths"]) == ("done", 2400, outcome.deaths)
    assert summary["open_epoch"] == 4
    assert summary["reasons"][0] == "a note"
    evaluated = sorted(epoch for rank in cluster.lives.values() for epoch in rank.evaluated)
    assert evaluated == [0, 1, 2, 3]
    assert [epoch["metrics"] for epoch in summary["epochs"]] == [{"accuracy": 0.5}] * 4


ABORTING = (387, 390)
"""Seeds of runs in which a round held nothing but batches that were not finite twice."""


def test_whatever_befell_a_run_it_can_be_played_again() -> None:
    played = set()
    for seed in (*range(80), *ABORTING):
        scenario = random_scenario(seed)
        _, records = recorded(scenario)
        if not any(record["kind"] == "commit" for record in records):
            continue
        script = read_script(records)
        cluster = Cluster(scenario.settings, script, seed)
        end = cluster.play()
        assert not end.failed, f"seed {seed}: {end.reason}"
        assert_same(script, read_script(cluster.records))
        played |= {record["kind"] for record in cluster.records}
        played |= {"recall"} & {record["kind"] for record in records}
        played |= {"abort"} & {record["kind"] for record in records}
    # Without these the seeds would show little.
    assert {"exit", "exclusion", "recall", "evaluation", "abort"} <= played


def test_an_exclusion_is_played_as_it_was() -> None:
    scenario = a_run(nan_batches=frozenset({(0, 40)}))
    outcome, records = recorded(scenario)
    exclusions = outcome.of("exclusion")
    assert len(exclusions) == 2
    script = read_script(records)
    cluster = Cluster(scenario.settings, script)
    assert not cluster.play().failed
    assert (0, 40) in cluster.replay.summary()["quarantined"]
    assert cluster.replay.summary()["quarantined"] == outcome.summary["quarantined"]
    acts = [act for lives in script.lives.values() for life in lives for act in life.acts]
    assert sum(isinstance(act, Adopt) and act.is_excluded for act in acts) == 2
    left_out = {(e["rank"], e["generation"], e["round"]) for e in exclusions}
    counted = {(c.rank, c.generation, r.number) for r in script.rounds for c in r.cohort}
    assert not left_out & counted
    assert_same(script, read_script(cluster.records))
    assert sum(len(rank.overwritten) for rank in cluster.lives.values()) == 2
    assert sum(rank.forgotten for rank in cluster.lives.values()) == 2


def test_a_schedule_that_ends_anywhere_is_used_up_to_its_last_commit() -> None:
    scenario = a_run(faults=(Fault(5000.0, 1, "kill", when="train"),))
    _, records = recorded(scenario)
    first = next(i for i, record in enumerate(records) if record["kind"] == "commit")
    for length in range(first + 1, len(records), 7):
        script = read_script(records[:length])
        commits = [record["round"] for record in records[:length] if record["kind"] == "commit"]
        assert [round_.number for round_ in script.rounds] == commits
        cluster = Cluster(scenario.settings, script, length)
        end = cluster.play()
        assert not end.failed, end
        last = max(commits)
        assert end.reason == f"all {last + 1} recorded rounds are played"
        seals = [act for lives in script.lives.values() for life in lives for act in life.acts if isinstance(act, Seal)]
        assert max(seal.round for seal in seals) <= last


# ---- what ends a replay


def script_of(**changes: Any) -> tuple[ControllerSettings, Script]:
    scenario = a_run(**changes)
    return scenario.settings, read_script(recorded(scenario)[1])


def test_a_round_whose_hash_differs_ends_the_run_and_is_named_with_both() -> None:
    cluster = Cluster(*script_of())
    cluster.hashes[3] = 0xABC
    end = cluster.play()
    assert end.failed
    assert end.reason == ("round 3 of the replay differs: its hash is 0000000000000abc, recorded is 00000000000003eb")
    assert cluster.replay.phase == "failed"
    assert cluster.replay.tick(1.0) == []


def test_a_contribution_that_is_not_finite_ends_the_run() -> None:
    settings, script = script_of()
    cluster = Cluster(settings, script)
    cluster.perform(cluster.replay.start(0.0))
    while not cluster.work:
        cluster.happen(cluster.draw.choice(cluster.chances()))
    cluster.perform(cluster.replay.tell(Reduced(1, (False,), (0.0,), 1.0, 1, 0.0, "layer.weight"), 0.0))
    assert cluster.end is not None
    assert "round 0 is not finite in the replay (layer.weight)" in cluster.end.reason


def test_a_rank_that_does_something_else_ends_the_run() -> None:
    settings, script = script_of()
    cluster = Cluster(replace(settings, batch_size=5), script)
    end = cluster.play()
    assert end.failed
    assert "sealed round 1" in end.reason
    assert "recorded: sealed round 1 at step" in end.reason


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (RankExited(1, 1, -11, words="segmentation"), "rank 1 was killed by signal 11, which the recorded run did not"),
        (RankExited(1, 1, 0), "rank 1 exited with code 0, which the recorded run did not lose there"),
    ],
)
def test_a_death_that_was_not_recorded_ends_the_run(event: RankExited, words: str) -> None:
    cluster = Cluster(*script_of())
    cluster.perform(cluster.replay.start(0.0))
    cluster.perform(cluster.replay.tell(event, 0.0))
    assert cluster.end is not None
    assert words in cluster.end.reason
    assert cluster.end.traceback == event.words


def test_an_exception_of_the_users_ends_the_run_with_its_traceback() -> None:
    cluster = Cluster(*script_of())
    cluster.perform(cluster.replay.start(0.0))
    cluster.perform(cluster.replay.receive(0, 0, Failed("ValueError: no", "Traceback …"), 0.0))
    cluster.perform(cluster.replay.tell(RankExited(0, 0, 1), 0.0))
    assert cluster.end is not None
    assert cluster.end.reason.startswith("rank 0 failed: ValueError: no")
    assert cluster.end.traceback == "Traceback …"


def test_a_stopped_rank_ends_the_run_even_while_it_starts() -> None:
    cluster = Cluster(*script_of())
    cluster.perform(cluster.replay.start(0.0))
    cluster.perform(cluster.replay.tell(RankStopped(0, 0, 9.0), 9.0))
    assert cluster.end is not None
    assert "rank 0 was stopped by a signal for 9.0 s" in cluster.end.reason


def test_a_silent_rank_ends_the_run_unless_it_only_starts() -> None:
    cluster = Cluster(*script_of())
    cluster.perform(cluster.replay.start(0.0))
    assert cluster.replay.tell(RankSilent(0, 0, 9.0), 9.0) == []
    assert cluster.replay.next_deadline() == 60.0
    cluster.perform(cluster.replay.receive(0, 0, cluster.ranks[0].outbox[0], 10.0))
    cluster.perform(cluster.replay.tell(RankSilent(0, 0, 9.0), 20.0))
    assert cluster.end is not None
    assert "rank 0 was silent for 9.0 s" in cluster.end.reason


def test_a_rank_that_makes_no_progress_is_warned_of_and_then_ends_the_run() -> None:
    settings, script = script_of()
    cluster = Cluster(replace(settings, stall_s=10.0), script)
    cluster.perform(cluster.replay.start(0.0))
    cluster.perform(cluster.replay.receive(0, 0, cluster.ranks[0].outbox[0], 1.0))
    assert cluster.replay.next_deadline() == 6.0
    cluster.perform(cluster.replay.tick(6.0))
    assert cluster.records[-1]["kind"] == "warning"
    cluster.perform(cluster.replay.tick(11.0))
    assert cluster.end is not None
    assert "no progress" in cluster.end.reason


def test_an_interruption_stops_everyone_and_is_no_success() -> None:
    cluster = Cluster(*script_of())
    cluster.perform(cluster.replay.start(0.0))
    while cluster.replay.phase != "training":
        cluster.happen(cluster.draw.choice(cluster.chances()))
    effects = cluster.replay.tell(Interrupted("Ctrl-C"), 0.0)
    assert sum(isinstance(effect, Send) and isinstance(effect.message, Stop) for effect in effects) >= 1
    cluster.perform(effects)
    while cluster.end is None:
        cluster.happen(cluster.draw.choice(cluster.chances()))
    assert cluster.end.failed
    assert "interrupted: Ctrl-C" in cluster.end.reason


def test_another_number_of_threads_is_said() -> None:
    settings, script = script_of()
    cluster = Cluster(settings, script, threads=4)
    assert not cluster.play().failed
    reasons = cluster.replay.summary()["reasons"]
    assert "rank 2 computes with 4 threads, the recorded run with 1: sums may be rounded in another order" in reasons
