"""`fdl bench`: the figures behind every claim about speed."""

from __future__ import annotations

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flodl.errors import PlanError

if TYPE_CHECKING:
    from flodl.bench.efficiency import Case


@click.group()
def bench() -> None:
    """Measure flodl on this machine. Figures are ratios to what the same run measured alone or as a bound."""


@bench.command()
@click.option("--step-ms", default="10,47,47", show_default=True, help="Emulated milliseconds per step, one per rank.")
@click.option("--mode", "modes", multiple=True, default=("cpu-cadence", "cpu-async"), show_default=True)
@click.option("--seconds", default=40.0, show_default=True, help="How long each mode trains.")
@click.option("--lenet", is_flag=True, help="LeNet on real images, pads of 3 x its raw step, ratios 1 / 4.7 / 4.7.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the rows to this file.")
def efficiency(step_ms: str, modes: tuple[str, ...], seconds: float, lenet: bool, json_path: str | None) -> None:
    """E of emulated ranks of unequal speed: work done together over work possible alone."""
    from flodl.bench.efficiency import measure, solo_rates
    from flodl.bench.rows import report
    from flodl.devices.cpu import threads_per_rank

    cases = _lenet_cases(modes) if lenet else _emulated_cases(step_ms, modes)
    threads = threads_per_rank(len(cases[0].devices))
    rates = solo_rates(cases[0].devices, cases[0], threads)
    click.echo("alone: " + ", ".join(f"{d} {rate:.2f} steps/s" for d, rate in rates.items()), err=True)
    rows = []
    for case in cases:
        rows.append(measure(case, seconds, rates))
        click.echo(f"{rows[-1].case}: E {rows[-1].value:.4f} ({rows[-1].note})", err=True)
    report(rows, json_path)
    if any(row.ok is False for row in rows):
        raise SystemExit(1)


def _emulated_cases(step_ms: str, modes: tuple[str, ...]) -> list[Case]:
    from flodl.bench.efficiency import Case

    try:
        steps = [float(part) for part in step_ms.split(",")]
    except ValueError as error:
        raise PlanError(
            f"--step-ms is {step_ms!r}; milliseconds with commas between them are wanted, as in 10,47,47",
            field="step-ms",
            value=step_ms,
        ) from error
    devices = tuple(f"emulated:{step:g}ms" for step in steps)
    budget = 0.97 if sorted(steps) == [10.0, 47.0, 47.0] else 0.95
    return [Case(f"{mode} {step_ms}", mode, devices, budget=budget) for mode in modes]


def _lenet_cases(modes: tuple[str, ...]) -> list[Case]:
    from flodl.bench.efficiency import Case, solo_rates
    from flodl.bench.workloads import LENET_BATCH_SIZE, image_sets

    name, train, _ = image_sets()
    batches = -(-len(train) // LENET_BATCH_SIZE)
    probe = Case("", "solo", ("cpu",), "flodl.bench.workloads:lenet", LENET_BATCH_SIZE, batches)
    raw_ms = 1000.0 / solo_rates(("cpu",), probe, 1)["cpu"]
    pad_ms = 3.0 * raw_ms
    devices = tuple(f"emulated:{ms:.2f}ms" for ms in (pad_ms, 4.7 * pad_ms, 4.7 * pad_ms))
    click.echo(f"LeNet on {name}: raw step {raw_ms:.2f} ms, pads {', '.join(devices)}", err=True)
    return [
        Case(f"{mode} LeNet 1/4.7/4.7", mode, devices, probe.entry, LENET_BATCH_SIZE, batches, 0.95) for mode in modes
    ]
