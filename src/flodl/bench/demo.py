"""The demo: what one fast device does alone, what it does with two slow ones beside it, and the figures of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flodl.bench.efficiency import PAD_TO_RAW, SLOW_RATIO, Case, Efficiency, measure_alone
from flodl.bench.workloads import LENET_BATCH_SIZE, image_sets, lenet_entry
from flodl.devices.cpu import threads_per_rank
from flodl.plan import DiLoCo, OuterPlan
from flodl.result import RunResult
from flodl.trainer import Trainer

SOLO_STEPS = 60
TRAINING_S = 110.0
"""Both runs together are planned for no longer, on a slow machine with fewer images."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """How a data set is trained, alone and together. Chosen by benchmarks/demo_sweep.py."""

    epochs: int
    lr: float
    has_outer: bool = False

    @property
    def outer(self) -> OuterPlan | None:
        return DiLoCo() if self.has_outer else None


RECIPES = {"Fashion-MNIST": Recipe(epochs=2, lr=0.05)}
SMALL_SET = Recipe(epochs=20, lr=0.05)


@dataclass(frozen=True)
class Setting:
    """One demo: the entry and what it trains, on three emulated devices, the first of them fast."""

    entry: str
    recipe: Recipe
    batches_per_epoch: int
    batches: int
    devices: tuple[str, ...]

    def train(self, mode: str, devices: tuple[str, ...], view: _Progress | None = None) -> RunResult:
        """With the recipe, and with the threads of a rank also where the fast device is alone."""
        torch.set_num_threads(threads_per_rank(len(self.devices)))
        return Trainer(
            entry=self.entry,
            mode=mode,
            devices=list(devices),
            batch_size=LENET_BATCH_SIZE,
            epochs=-(-self.batches // self.batches_per_epoch),
            samples=self.batches * LENET_BATCH_SIZE,
            outer=None if mode == "solo" else self.recipe.outer,
            seed=0,
        ).run(view=view, quiet=True)


def run_demo(directory: str | None, epochs: int | None, mode: str, say: Say) -> tuple[RunResult, RunResult]:
    """Says each line as it becomes known. Returns the runs alone and together. Raises DataError without images."""
    name, train, test = image_sets(directory)
    recipe = RECIPES.get(name, SMALL_SET)
    if epochs is not None:
        recipe = Recipe(epochs, recipe.lr, recipe.has_outer)
    say(f"LeNet on {name}: {len(train)} images to learn, {len(test)} to test, {_times(recipe.epochs)} over.")
    entry = lenet_entry(recipe.lr, directory)
    batches_per_epoch = -(-len(train) // LENET_BATCH_SIZE)
    probe = lenet_entry(recipe.lr, directory, is_tested=False)
    raw_ms = _measure(probe, ("cpu",), batches_per_epoch, 1)["cpu"][1]
    fast_ms, slow_ms = PAD_TO_RAW * raw_ms, SLOW_RATIO * PAD_TO_RAW * raw_ms
    devices = (f"emulated:{fast_ms:.2f}ms", *[f"emulated:{slow_ms:.2f}ms"] * 2)
    say(
        f"A step takes {raw_ms:.1f} ms of this processor. Three emulated devices are it, padded: "
        f"one of {fast_ms:.0f} ms a step, two of {slow_ms:.0f} ms."
    )
    batches = _batches_in_time(recipe.epochs * batches_per_epoch, fast_ms, say)
    setting = Setting(entry, recipe, batches_per_epoch, batches, devices)
    rates = {d: rate for d, (rate, _) in _measure(probe, devices, batches_per_epoch, threads_per_rank(3)).items()}
    say(f"The fast device alone, for about {batches * fast_ms / 1e3:.0f} s:")
    alone = setting.train("solo", devices[:1])
    _say_epochs(alone, say)
    say(f"The three together ({mode}), for about {batches / sum(rates[d] for d in devices):.0f} s:")
    together = setting.train(mode, devices, _Progress(say))
    _say_figures((alone, together), devices, rates, say)
    return alone, together


def _times(epochs: int) -> str:
    return {1: "once", 2: "twice"}.get(epochs, f"{epochs} times")


def _measure(
    entry: str, devices: tuple[str, ...], batches_per_epoch: int, threads: int
) -> dict[str, tuple[float, float]]:
    """Per device, steps per second and milliseconds per step."""
    case = Case("demo", "solo", devices, entry, LENET_BATCH_SIZE, batches_per_epoch)
    found = {device: measure_alone(case, device, threads, SOLO_STEPS) for device in dict.fromkeys(devices)}
    return {device: (one.rate, one.raw_ms) for device, one in found.items()}


def _batches_in_time(wanted: int, fast_ms: float, say: Say) -> int:
    """As many as both runs can do in TRAINING_S; fewer than wanted only where this machine is slow."""
    speed_up = 1.0 + 2.0 / SLOW_RATIO
    possible = int(TRAINING_S / (fast_ms / 1e3 * (1.0 + 1.0 / speed_up)))
    if possible < wanted:
        say(f"This machine is slow or busy: {possible * LENET_BATCH_SIZE} images are trained instead of all.")
    return min(wanted, possible)


@dataclass
class _Progress:
    """The view of a run that says each test as it ends."""

    say: Say

    def record(self, record: dict[str, Any]) -> None:
        if record["kind"] == "evaluation":
            accuracy = record["metrics"].get("accuracy", float("nan"))
            self.say(f"  epoch {record['epoch'] + 1}: {100 * accuracy:.1f} % right, after {record['time_s']:.1f} s")
        elif record["kind"] == "phase" and record["phase"] == "training":
            self.say(f"  all three are there after {record['time_s']:.1f} s")

    def close(self) -> None:
        """Nothing is open."""


def _say_epochs(result: RunResult, say: Say) -> None:
    for epoch in result.metrics:
        if "accuracy" in epoch:
            say(f"  epoch {epoch['epoch'] + 1}: {100 * epoch['accuracy']:.1f} % right, loss {epoch['loss']:.3f}")


def accuracy_of(result: RunResult) -> float | None:
    """After the last epoch that was tested."""
    return next((epoch["accuracy"] for epoch in reversed(result.metrics) if "accuracy" in epoch), None)


def _say_figures(
    results: tuple[RunResult, RunResult], devices: tuple[str, ...], rates: dict[str, float], say: Say
) -> None:
    alone, together = results
    found = Efficiency.of(together, devices, rates)
    say("")
    say(f"{'':24}{'accuracy':>10}{'wall time':>12}{'training':>12}")
    for name, result in (("fast device alone", alone), ("three together", together)):
        accuracy = accuracy_of(result)
        right = "-" if accuracy is None else f"{100 * accuracy:.1f} %"
        say(f"{name:24}{right:>10}{result.wall_s:>10.1f} s{result.raw['training_s']:>10.1f} s")
    say("")
    say(f"{'rank':24}{'alone':>14}{'share':>9}")
    for rank, device in enumerate(devices):
        say(f"{rank} {device:22}{rates[device]:>7.1f} steps/s{100 * together.shares[rank]:>7.1f} %")
    say("")
    speed_up = alone.raw["training_s"] / together.raw["training_s"]
    best = sum(rates[device] for device in devices) / rates[devices[0]]
    say(f"E {found.e:.3f}, E_wall {found.e_wall:.3f} (start-up and tests counted), {together.rounds} rounds.")
    say(f"Training was {speed_up:.2f} times as fast as alone; {best:.2f} is all that these devices can do.")
    say(f"What each run did is in {alone.run_directory} and {together.run_directory}.")
