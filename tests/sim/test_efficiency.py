"""E in virtual time: contributed samples over what the ranks would have made alone in the time that training took."""

import random
from typing import Any

import pytest

from flodl.protocol.settings import ControllerSettings
from flodl.simulation.scenario import Fault, Scenario
from flodl.simulation.world import World


def efficiency(
    mode: str, step_ms: tuple[float, ...], seconds: float, epochs: int = 1, faults: tuple[Fault, ...] = (), **more: Any
) -> float:
    """Of a run that an ideal schedule finishes in so many seconds. Rounds take 2 to 12 ms, copies up to 3."""
    batches = int(1000.0 * seconds * sum(1.0 / ms for ms in step_ms) / epochs)
    settings = ControllerSettings(
        world_size=len(step_ms), mode=mode, dataset_length=4 * batches, batch_size=4, epochs=epochs
    )
    costs: dict[str, Any] = {"reduce_ms": (2.0, 12.0), "copy_ms": (0.1, 3.0), "start_ms": (500.0, 1500.0)}
    outcome = World(Scenario(settings, step_ms, faults=faults, **costs, **more)).run()
    assert not outcome.end.failed
    summary: Any = outcome.summary
    able = sum(
        (summary["training_s"] - sum(rank["pauses_s"].values())) * 1000.0 / ms
        for ms, rank in zip(step_ms, summary["ranks"], strict=True)
    )
    return float(summary["batches"]) / able


@pytest.mark.parametrize("mode", ["cpu-cadence", "cpu-async"])
def test_three_ranks_of_10_47_47_ms_lose_under_three_percent(mode: str) -> None:
    assert 0.97 <= efficiency(mode, (10.0, 47.0, 47.0), 30.0) <= 1.005


@pytest.mark.parametrize("mode", ["cpu-cadence", "cpu-async"])
@pytest.mark.parametrize(
    "step_ms",
    [(10.0, 200.0), (10.0, 12.0, 15.0, 20.0, 30.0, 50.0, 80.0, 100.0), (20.0, 20.0), (20.0, 400.0, 400.0, 130.0)],
    ids=str,
)
def test_ratios_up_to_20_and_8_ranks_lose_under_five_percent(mode: str, step_ms: tuple[float, ...]) -> None:
    assert 0.95 <= efficiency(mode, step_ms, 30.0) <= 1.005


@pytest.mark.parametrize("mode", ["cpu-cadence", "cpu-async"])
@pytest.mark.parametrize("seed", range(4))
def test_random_worlds_lose_under_five_percent(mode: str, seed: int) -> None:
    draw = random.Random(seed)
    step_ms = tuple(20.0 * draw.uniform(1.0, 20.0) for _ in range(draw.randint(2, 8)))
    assert 0.95 <= efficiency(mode, step_ms, 40.0, seed=seed) <= 1.005


def test_async_hides_what_steps_of_uneven_length_cost() -> None:
    assert efficiency("cpu-async", (10.0, 47.0, 47.0), 20.0, jitter=0.2) >= 0.97


def test_an_absence_is_a_pause_and_a_restart_costs_little() -> None:
    faults = (Fault(8000.0, 1, "kill"),)
    assert efficiency("cpu-cadence", (10.0, 47.0, 47.0), 30.0, faults=faults) >= 0.95
