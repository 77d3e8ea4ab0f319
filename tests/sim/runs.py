"""What the named scenarios are made of: one plain run, its variations, and how it must end."""

from dataclasses import replace
from typing import Any

from flodl.protocol.settings import ControllerSettings
from flodl.simulation.scenario import Fault, Outcome, Scenario
from flodl.simulation.world import World

MODES = ("cpu-sync", "cpu-cadence", "cpu-async")


def a_run(step_ms: tuple[float, ...] = (10.0, 47.0, 47.0), batches: int = 400, **changes: Any) -> Scenario:
    """`changes` go to the settings or to the scenario, whichever has the field."""
    settings = ControllerSettings(
        world_size=len(step_ms), mode="cpu-cadence", dataset_length=4 * batches, batch_size=4, epochs=1
    )
    ours = {name: value for name, value in changes.items() if name in ControllerSettings.__dataclass_fields__}
    rest = {name: value for name, value in changes.items() if name not in ours}
    return Scenario(replace(settings, **ours), step_ms, **rest)


def run(scenario: Scenario) -> Outcome:
    return World(scenario).run()


def completes(scenario: Scenario) -> Outcome:
    outcome = run(scenario)
    assert not outcome.end.failed, outcome.end
    return outcome


def fails(scenario: Scenario, words: str) -> Outcome:
    outcome = run(scenario)
    assert outcome.end.failed
    assert words in outcome.end.reason
    return outcome


def batches_of(outcome: Outcome, rank: int) -> int:
    ranks: Any = outcome.summary["ranks"]
    return int(ranks[rank]["batches"])


def kill(rank: int | None, when: str, at_ms: float = 0.0) -> Fault:
    return Fault(at_ms, rank, "kill", when=when)
