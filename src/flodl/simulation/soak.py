"""Seeded scenarios at random: mismatched ranks and whatever can befall them, at random moments and in chosen phases."""

from __future__ import annotations

import random
from dataclasses import dataclass

from flodl.protocol.settings import ControllerSettings, SaveSettings
from flodl.simulation.scenario import Batch, Fault, Scenario
from flodl.simulation.world import World

MODES = ("cpu-sync", "cpu-cadence", "cpu-async")
CERTAIN_PHASES = ("boot", "seed", "train", "seal", "adopt", "reduce", "commit")
"""Every run goes through these: a kill that waits for one always strikes."""


def scenario(seed: int) -> Scenario:
    """One scenario per seed. Its first fault kills a rank in a phase that every run goes through."""
    draw = random.Random(seed)
    world_size = draw.randint(1, 6)
    batch_size = draw.choice([1, 3, 8])
    batches = draw.randint(1, 24 * world_size)
    dataset_length = max(world_size, batches * batch_size - draw.randrange(batch_size))
    settings = ControllerSettings(
        world_size=world_size,
        mode=draw.choice(MODES),
        dataset_length=dataset_length,
        batch_size=batch_size,
        epochs=draw.randint(1, 3),
        samples=draw.randint(1, 2 * dataset_length) if draw.random() < 0.1 else None,
        anchor=draw.choice([1, 2, 5, 10]),
        gamma=draw.choice([0.0, 1.0, 1.0, 1.0]),
        respawn=draw.choice([0, 1, 2, 3]),
        max_failures=draw.choice([None, None, None, None, None, 2, 0.5]),
        prefetch=draw.randint(0, 4),
        evaluates=draw.random() < 0.5,
        outer_min_window=draw.choice([0, 0, 0, 4]),
        saves=_saves(seed),
    )
    step_ms = tuple(draw.choice([5.0, 10.0, 47.0, 90.0]) * draw.uniform(0.8, 1.25) for _ in range(world_size))
    return Scenario(
        settings,
        step_ms,
        seed,
        _faults(draw, settings, step_ms),
        nan_batches=_some(draw, settings, 0.15),
        failing_batches=_some(draw, settings, 0.03),
        jitter=draw.choice([0.0, 0.0, 0.2]),
        evaluation_ms=draw.choice([5.0, 50.0, 900.0]),
        start_ms=draw.choice([(20.0, 200.0), (20.0, 200.0), (500.0, 4000.0)]),
        failing_saves=frozenset({seed % world_size}) if seed % 11 == 0 else frozenset(),
    )


def _saves(seed: int) -> SaveSettings | None:
    """Half of all runs save, most after every epoch."""
    if seed % 2:
        return None
    return SaveSettings("/checkpoints", f"run-{seed}", every_epochs=2 if seed % 5 == 0 else 1)


def _faults(draw: random.Random, settings: ControllerSettings, step_ms: tuple[float, ...]) -> tuple[Fault, ...]:
    phase = draw.choice(CERTAIN_PHASES)
    # Before this, everyone is still starting, and a phase later than the first few steps may be the run's last.
    faults = [Fault(0.0, None, "kill", when=phase)]
    total = settings.epochs * settings.batches_per_epoch
    length_ms = 4000.0 + total / sum(1.0 / ms for ms in step_ms)
    for _ in range(draw.randint(0, 3)):
        faults.append(_fault(draw, settings.world_size, length_ms))
    thaws = [Fault(f.at_ms + draw.uniform(10.0, 8000.0), f.rank, "thaw") for f in faults if f.kind == "stop"]
    return (*faults, *thaws)


def _fault(draw: random.Random, world_size: int, length_ms: float) -> Fault:
    kinds = ["kill", "kill", "kill", "stop", "quit", "slow", "partition", "flip", "start_failure", "raise", "interrupt"]
    kind = draw.choices(kinds, [3, 3, 3, 3, 2, 3, 3, 2, 2, 1, 1])[0]
    # What ends a run by rule when it comes before the first round would leave little to see.
    earliest_ms = 5000.0 if kind in ("quit", "raise", "start_failure", "interrupt") else 600.0
    at_ms = draw.uniform(earliest_ms, earliest_ms + length_ms)
    when = draw.choice(["", "", "evaluate", *CERTAIN_PHASES]) if kind in ("kill", "quit", "partition") else ""
    return Fault(at_ms, draw.randrange(world_size), kind, draw.choice([0.5, 2.0, 5.0, 7.0]), when)


def _some(draw: random.Random, settings: ControllerSettings, chance: float) -> frozenset[Batch]:
    if draw.random() >= chance:
        return frozenset()
    batches = [(e, i) for e in range(settings.epochs) for i in range(settings.batches_per_epoch)]
    return frozenset(draw.sample(batches, min(len(batches), draw.randint(1, 2))))


@dataclass(frozen=True)
class Survey:
    """What one seed came to. problem: '' or why the run is wrong."""

    seed: int
    deaths: int = 0
    late_joins: int = 0
    is_failed: bool = False
    problem: str = ""


def survey(seed: int) -> Survey:
    """Runs one seed. Whatever goes wrong is in the result, so that it can cross a process boundary."""
    try:
        outcome = World(scenario(seed)).run()
    except Exception as error:
        return Survey(seed, problem=f"{type(error).__name__}: {error}")
    return Survey(seed, outcome.deaths, outcome.late_joins, outcome.end.failed)
