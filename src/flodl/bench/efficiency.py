"""E: how much of what the ranks could do alone they do together.

E = S / sum of r_i (T - pause_i): S contributed batches, T from the first lease to the last commit, pause_i what rank i
declared as pauses, r_i its rate alone, measured in the same invocation with the threads that a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flodl.bench.load import LoadMeter, Usage
from flodl.bench.rows import Row
from flodl.bench.workloads import BATCH_SIZE, BATCHES_PER_EPOCH
from flodl.errors import PlanError
from flodl.result import RunResult
from flodl.trainer import Trainer

SOLO_STEPS = 200
ACCOUNTING_FAULT = 1.005
MOST_RAW_OVER_PAD = 0.01
MOST_BUSIER = 0.25
"""Cores: beyond this, rates alone and together were not measured on the same machine."""
PAD_TO_RAW = 3.0
SLOW_RATIO = 4.7
FIRST_CASE = (10.0, 47.0, 47.0)


@dataclass(frozen=True)
class Case:
    """One row: a mode on a list of devices. budget: the least E."""

    name: str
    mode: str
    devices: tuple[str, ...]
    entry: str = "flodl.bench.workloads:mlp"
    batch_size: int = BATCH_SIZE
    batches_per_epoch: int = BATCHES_PER_EPOCH
    budget: float = 0.95


@dataclass(frozen=True)
class Alone:
    """One device by itself. rate: batches per second after the first one, all time counted."""

    rate: float
    raw_ms: float
    raw_over_pad: float
    load: Usage


def emulated_cases(step_ms: str, modes: tuple[str, ...]) -> list[Case]:
    """One case per mode for milliseconds with commas between them. Raises PlanError naming --step-ms."""
    try:
        steps = [float(part) for part in step_ms.split(",")]
    except ValueError as error:
        raise PlanError(
            f"--step-ms is {step_ms!r}; milliseconds with commas between them are wanted, as in 10,47,47",
            field="step-ms",
            value=step_ms,
        ) from error
    devices = tuple(f"emulated:{step:g}ms" for step in steps)
    budget = 0.97 if tuple(sorted(steps)) == FIRST_CASE else 0.95
    named = ",".join(f"{step:g}" for step in steps)
    return [Case(f"{mode} {named}", mode, devices, budget=budget) for mode in modes]


def lenet_cases(modes: tuple[str, ...], say: Callable[[str], None]) -> list[Case]:
    """LeNet on real images: pads of 3 times its raw step, in ratios 1 / 4.7 / 4.7. Raises DataError without images."""
    from flodl.bench.workloads import LENET_BATCH_SIZE, image_sets

    name, train, _ = image_sets()
    batches = -(-len(train) // LENET_BATCH_SIZE)
    probe = Case("", "solo", ("cpu",), "flodl.bench.workloads:untested_lenet", LENET_BATCH_SIZE, batches)
    raw_ms = measure_alone(probe, "cpu", 1).raw_ms
    pads = [PAD_TO_RAW * raw_ms * ratio for ratio in (1.0, SLOW_RATIO, SLOW_RATIO)]
    devices = tuple(f"emulated:{pad:.2f}ms" for pad in pads)
    say(f"LeNet on {name}: raw step {raw_ms:.2f} ms, pads {', '.join(devices)}")
    return [
        Case(f"{mode} LeNet 1/4.7/4.7", mode, devices, probe.entry, LENET_BATCH_SIZE, batches, 0.95) for mode in modes
    ]


def measure_alone(case: Case, device: str, threads: int, steps: int = SOLO_STEPS) -> Alone:
    """Trains the case's model on this device for so many steps after the first. Sets torch's threads."""
    import torch

    torch.set_num_threads(threads)
    meter = LoadMeter()
    result = Trainer(
        entry=case.entry,
        mode="solo",
        devices=[device],
        batch_size=case.batch_size,
        epochs=-(-(steps + 1) // case.batches_per_epoch),
        samples=(steps + 1) * case.batch_size,
    ).run(quiet=True)
    raw = result.raw
    seconds = float(raw["training_s"]) - float(raw["first_step_ms"]) / 1e3
    over = float(raw["raw_over_pad"]) / max(1, raw["batches"])
    return Alone((raw["batches"] - 1) / seconds, float(raw["step_ms"]), over, meter.usage())


def measure_cases(cases: list[Case], seconds: float, threads: int, say: Callable[[str], None]) -> Iterator[Row]:
    """A row per case, all of the same devices. Each is measured alone before and after: the faster rate counts."""
    before = _all_alone(cases[0], threads, say)
    for case in cases:
        result, load = _train(case, seconds, before)
        after = _all_alone(case, threads, say)
        faster = {d: max(before[d], after[d], key=lambda alone: alone.rate) for d in before}
        yield row_of(case, result, faster, load)
        before = after


def _all_alone(case: Case, threads: int, say: Callable[[str], None]) -> dict[str, Alone]:
    found = {}
    for device in dict.fromkeys(case.devices):
        one = found[device] = measure_alone(case, device, threads)
        say(f"alone: {device} {one.rate:.2f} steps/s ({one.load.words})")
    return found


def _train(case: Case, seconds: float, alone: dict[str, Alone]) -> tuple[RunResult, Usage]:
    """For about this long by what the devices do alone."""
    per_second = sum(alone[device].rate for device in case.devices)
    batches = max(len(case.devices), int(per_second * seconds))
    meter = LoadMeter()
    result = Trainer(
        entry=case.entry,
        mode=case.mode,
        devices=list(case.devices),
        batch_size=case.batch_size,
        epochs=-(-batches // case.batches_per_epoch),
        samples=batches * case.batch_size,
    ).run(quiet=True)
    return result, meter.usage()


@dataclass(frozen=True)
class Efficiency:
    """E, and E_wall: the same with start-up, pauses and the end counted."""

    e: float
    e_wall: float

    @classmethod
    def of(cls, result: RunResult, devices: tuple[str, ...], rates: dict[str, float]) -> Efficiency:
        raw = result.raw
        possible = sum(
            rates[device] * (float(raw["training_s"]) - sum(rank["pauses_s"].values()))
            for device, rank in zip(devices, raw["ranks"], strict=True)
        )
        return cls(raw["batches"] / possible, raw["batches"] / (sum(rates[d] for d in devices) * result.wall_s))


def row_of(case: Case, result: RunResult, alone: dict[str, Alone], load: Usage) -> Row:
    """E over 1.005 is a fault of accounting, unless the machine was busier while the devices were alone.

    Void (ok is None) where that was so, or where too many steps took longer than they should have lasted.
    """
    raw: dict[str, Any] = result.raw
    found = Efficiency.of(result, case.devices, {device: one.rate for device, one in alone.items()})
    over = sum(rank["raw_over_pad"] for rank in raw["ranks"]) / max(1, raw["batches"])
    over = max(over, *(alone[device].raw_over_pad for device in case.devices))
    shares = "/".join(f"{100 * share:.1f}" for share in result.shares)
    solo = ", ".join(f"{one.rate:.2f}" for one in alone.values())
    foreign = [one.load.foreign for one in alone.values() if one.load.foreign is not None]
    busier = max(foreign, default=0.0) - (load.foreign or 0.0)
    note = (
        f"{raw['batches']} batches in {raw['training_s']:.1f} s, {result.rounds} rounds, shares {shares} %, "
        f"E_wall {found.e_wall:.3f}, alone {solo} steps/s; {load.words}"
    )
    if foreign:
        note += f" ({sum(foreign) / len(foreign):.2f} while alone)"
    ok: bool | None = found.e >= case.budget
    if over > MOST_RAW_OVER_PAD:
        ok, note = None, f"void: {100 * over:.1f} % of the raw steps were longer than their pad; {note}"
    elif found.e > ACCOUNTING_FAULT and busier > MOST_BUSIER:
        ok, note = None, f"void: other work took {busier:.2f} cores more while the devices were alone; {note}"
    elif found.e > ACCOUNTING_FAULT:
        ok, note = False, f"accounting fault: E is over {ACCOUNTING_FAULT}; {note}"
    return Row(case.name, "flodl", "E", found.e, "", 1.0, found.e, f">= {case.budget}", ok, note)
