"""Checkpoints in virtual time: when they are made, what they hold, and what becomes of them when ranks die."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flodl.protocol.effects import FinishCheckpoint
from flodl.protocol.messages import BatchRange, DataSpec
from flodl.protocol.settings import Beginning, ControllerSettings, SaveSettings
from flodl.simulation.rank import LAYOUT, OTHER_LAYOUT
from flodl.simulation.scenario import Fault, Outcome, Scenario
from flodl.simulation.world import World

MODES = ("cpu-sync", "cpu-cadence", "cpu-async")
SAVES = SaveSettings("/checkpoints", "run")


def a_run(batches: int = 200, step_ms: tuple[float, ...] = (10.0, 47.0, 47.0), **changes: Any) -> Scenario:
    """Three epochs that are saved after each."""
    settings = ControllerSettings(
        world_size=len(step_ms), mode="cpu-cadence", dataset_length=4 * batches, batch_size=4, epochs=3, saves=SAVES
    )
    ours = {name: value for name, value in changes.items() if name in ControllerSettings.__dataclass_fields__}
    rest = {name: value for name, value in changes.items() if name not in ours}
    return Scenario(replace(settings, **ours), step_ms, **rest)


def completes(scenario: Scenario) -> Outcome:
    outcome = World(scenario).run()
    assert not outcome.end.failed, outcome.end
    return outcome


def closed(checkpoint: FinishCheckpoint, batches: int = 200) -> list[int]:
    """The epochs that are whole in it."""
    held = [0] * 3
    for piece in checkpoint.state["contributed"]:
        held[piece.epoch] += piece.count
    return [epoch for epoch, count in enumerate(held) if count == batches]


@pytest.mark.parametrize("mode", MODES)
def test_every_epoch_is_saved_and_so_is_the_end(mode: str) -> None:
    outcome = completes(a_run(mode=mode, evaluates=True))
    assert [closed(checkpoint) for checkpoint in outcome.checkpoints] == [[0], [0, 1], [0, 1, 2]]
    for checkpoint in outcome.checkpoints:
        assert {file.name for file in checkpoint.files} == {
            "consensus.safetensors",
            *(f"rank-{rank}.safetensors" for rank in range(3)),
        }
        metrics = [epoch["metrics"] for epoch in checkpoint.state["epochs"]]
        assert [bool(values) for values in metrics] == [epoch in closed(checkpoint) for epoch in range(3)]
    assert all("checkpoint" in rank["pauses_s"] for rank in outcome.summary["ranks"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", MODES)
def test_only_every_second_epoch_and_the_end_where_that_is_asked_for(mode: str) -> None:
    outcome = completes(a_run(mode=mode, saves=replace(SAVES, every_epochs=2)))
    assert [closed(checkpoint) for checkpoint in outcome.checkpoints] == [[0, 1], [0, 1, 2]]


def test_async_ranks_keep_a_copy_only_where_the_round_may_be_saved() -> None:
    world = World(a_run(batches=600, mode="cpu-async"))
    announced: list[bool] = []
    original = world.controller.tell

    def tell(event: Any, now: float) -> Any:
        effects = original(event, now)
        for effect in effects:
            window = getattr(getattr(effect, "message", None), "window", None)
            if window is not None:
                announced.append(window.saves)
        return effects

    world.controller.tell = tell  # type: ignore[method-assign]
    outcome = world.run()
    assert len(outcome.checkpoints) == 3
    assert 0 < sum(announced) < len(announced) / 2


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_dies_while_it_writes_is_left_out(mode: str) -> None:
    outcome = completes(a_run(mode=mode, faults=(Fault(0.0, 2, "kill", when="save"),)))
    assert outcome.deaths == 1
    names = [{file.name for file in checkpoint.files} for checkpoint in outcome.checkpoints]
    assert len(names) == 3
    assert "rank-2.safetensors" not in names[0]
    assert "consensus.safetensors" in names[0]
    assert "rank-2.safetensors" in names[-1]


@pytest.mark.parametrize("mode", MODES)
def test_the_host_writes_the_consensus_of_a_writer_that_died_or_says_that_it_is_lost(mode: str) -> None:
    outcome = completes(a_run(mode=mode, faults=(Fault(0.0, 0, "kill", when="save"),)))
    lost = [line for line in outcome.of("warning") if "the consensus was lost" in str(line["reason"])]
    assert len(outcome.checkpoints) + len(lost) == 3
    assert lost or outcome.checkpoints[0].writes_consensus
    assert not any(checkpoint.writes_consensus for checkpoint in outcome.checkpoints[1:])


@pytest.mark.parametrize("mode", MODES)
def test_a_full_disk_costs_the_checkpoints_and_nothing_else(mode: str) -> None:
    outcome = completes(a_run(mode=mode, failing_saves=frozenset({1})))
    assert outcome.checkpoints == []
    degraded: Any = outcome.summary["degraded"]
    assert len(degraded) == 3
    assert all("rank 1: No space left on device" in sentence for sentence in degraded)
    assert len(outcome.contributed) == 600


def test_ranks_wait_for_nobody_else_while_one_writes() -> None:
    with_saves = completes(a_run())
    without = completes(a_run(saves=None))
    assert with_saves.virtual_s < without.virtual_s + 1.0


# ---- going on


def beginning(**changes: Any) -> Beginning:
    """One epoch done, and every other batch of the next ten."""
    base: dict[str, Any] = {
        "path": "/checkpoints/round-000070",
        "round": 70,
        "layout": LAYOUT,
        "data": DataSpec(800, "sim"),
        "contributed": (BatchRange(0, 0, 200), *(BatchRange(1, first, 1) for first in range(0, 10, 2))),
        "quarantined": ((1, 3),),
        "epochs": ((200.0, 800, 70, {"accuracy": 0.25}), (20.0, 20, None, {}), (0.0, 0, None, {})),
        "anchor": 7,
        "ms": {0: 10.0, 1: 47.0, 2: 47.0},
    }
    return Beginning(**(base | changes))


def resumed(**changes: Any) -> World:
    return World(a_run(beginning=beginning(), saves=replace(SAVES, first_number=70), **changes))


@pytest.mark.parametrize("mode", MODES)
def test_exactly_what_is_left_is_dealt_in_order(mode: str) -> None:
    outcome = resumed(mode=mode).run()
    assert not outcome.end.failed
    leased = [
        (epoch, index)
        for line in outcome.of("lease")
        for epoch, first, count in line["batches"]  # type: ignore[attr-defined]
        for index in range(first, first + count)
    ]
    left = [(1, 1), (1, 5), (1, 7), (1, 9), *((1, i) for i in range(10, 200)), *((2, i) for i in range(200))]
    assert list(dict.fromkeys(leased)) == left
    summary: Any = outcome.summary
    assert summary["batches"] == len(left)
    assert summary["epochs"][0] == {
        "epoch": 0,
        "loss": 0.25,
        "samples": 800,
        "round": 70,
        "metrics": {"accuracy": 0.25},
    }
    assert summary["epochs"][1]["samples"] == 4 * 199
    assert summary["epochs"][1]["round"] > 70
    assert [checkpoint.number - checkpoint.round for checkpoint in outcome.checkpoints] == [70, 70]


def test_the_speeds_of_the_earlier_run_set_the_first_window() -> None:
    outcome = resumed().run()
    first: Any = outcome.of("window")[0]
    assert "open" not in first["reason"]
    assert outcome.of("phase")[1]["reason"] == (
        "3 of 3 ranks are here; rank 0 gives the state of /checkpoints/round-000070"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": OTHER_LAYOUT}, "tensor w has shape [16], not [32]"),
        ({"data": DataSpec(801, "sim")}, "800 items, not 801"),
    ],
)
def test_another_model_or_other_data_ends_the_run_before_it_forms(changes: dict[str, Any], words: str) -> None:
    outcome = World(a_run(beginning=beginning(**changes))).run()
    assert outcome.end.failed
    assert outcome.end.reason.startswith("the checkpoint does not fit: /checkpoints/round-000070: ")
    assert words in outcome.end.reason
    assert outcome.of("commit") == []


# ---- an end before all is done


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_an_interrupted_run_commits_and_saves_what_was_trained(mode: str, seed: int) -> None:
    at_ms = 5000.0 + 333.0 * seed
    outcome = World(a_run(mode=mode, seed=seed, faults=(Fault(at_ms, None, "interrupt"),))).run()
    assert outcome.end.reason == "interrupted: Ctrl-C"
    assert outcome.virtual_s < at_ms / 1000.0 + 1.5
    last = outcome.checkpoints[-1]
    saved = [(b.epoch, b.first + i) for b in last.state["contributed"] for i in range(b.count)]
    assert len(saved) > 0
    assert sorted(saved) == sorted(outcome.contributed)
    assert {file.name for file in last.files} == {"consensus.safetensors", *(f"rank-{r}.safetensors" for r in range(3))}
    assert outcome.deaths == 0


def test_an_interrupt_waits_no_longer_for_a_checkpoint_than_it_says() -> None:
    hangs = Fault(5000.0, 1, "slow", 1e6)
    outcome = World(a_run(faults=(hangs, Fault(7000.0, None, "interrupt")), stall_s=600.0)).run()
    assert outcome.end.reason == "interrupted: Ctrl-C"
    assert 17.0 < outcome.virtual_s < 28.5


@pytest.mark.parametrize("evaluates", [False, True])
def test_when_no_rank_is_left_the_host_saves_what_is_committed(evaluates: bool) -> None:
    kills = tuple(Fault(6000.0 + 5 * rank, rank, "kill") for rank in range(3))
    outcome = World(a_run(faults=kills, respawn=0, evaluates=evaluates)).run()
    assert outcome.end.reason.startswith("no rank is left")
    last = outcome.checkpoints[-1]
    saved = [(b.epoch, b.first + i) for b in last.state["contributed"] for i in range(b.count)]
    assert sorted(saved) == sorted(outcome.contributed) != []
    assert last.files == ()
    assert last.writes_consensus


@pytest.mark.parametrize("seed", [22, 41, 78, 167])
def test_a_rank_that_has_yet_to_adopt_has_its_part_in_the_last_checkpoint(seed: int) -> None:
    # The last rounds are the other rank's alone: this one still copies the state before the last when all is done.
    outcome = completes(a_run(62, (4.0, 9.0), mode="cpu-async", seed=seed, copy_ms=(0.1, 20.0)))
    parts = {file.name for file in outcome.checkpoints[-1].files}
    assert parts == {"consensus.safetensors", "rank-0.safetensors", "rank-1.safetensors"}
