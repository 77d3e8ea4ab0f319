"""`fdl bench`: the figures behind every claim about speed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from flodl.bench.rows import Row

_TORCH_SPINS = "1000"


def _json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    where = click.Path(dir_okay=False, writable=True)
    return click.option("--json", "json_path", type=where, help="Write the rows to this file.")(function)


@click.group()
def bench() -> None:
    """Measure flodl on this machine.

    Figures are ratios to what the same run measured alone or as a bound; the note of each says what else the machine
    did meanwhile. The exit status is 1 where a budget was missed.
    """
    # torch's OpenMP threads spin against each other on few cores. Read when torch is loaded, which happens later.
    os.putenv("GOMP_SPINCOUNT", _TORCH_SPINS)


@bench.command()
@click.option("--step-ms", default="10,47,47", show_default=True, help="Emulated milliseconds per step, one per rank.")
@click.option("--mode", "modes", multiple=True, default=("cpu-cadence", "cpu-async"), show_default=True)
@click.option("--seconds", default=40.0, show_default=True, type=click.FloatRange(1.0), help="How long a mode trains.")
@click.option("--lenet", is_flag=True, help="LeNet on real images, pads of 3 x its raw step, ratios 1 / 4.7 / 4.7.")
@_json_option
def efficiency(step_ms: str, modes: tuple[str, ...], seconds: float, lenet: bool, json_path: str | None) -> None:
    """E of emulated ranks of unequal speed: work done together over work possible alone."""
    from flodl.bench.efficiency import emulated_cases, lenet_cases, measure_cases
    from flodl.devices.cpu import threads_per_rank

    cases = lenet_cases(modes, _say) if lenet else emulated_cases(step_ms, modes)
    _show(measure_cases(cases, seconds, threads_per_rank(len(cases[0].devices)), _say), json_path)


@bench.command()
@click.option("--params", default="190M", show_default=True, help="Parameters of the model, fp32.")
@click.option("--ranks", default=3, show_default=True, type=click.IntRange(2, 64))
@click.option("--repeats", default=11, show_default=True, type=click.IntRange(1, 1000))
@_json_option
def kernels(params: str, ranks: int, repeats: int, json_path: str | None) -> None:
    """The averaging kernels against the memory's own speed and against torch's best way to do the same."""
    from flodl.bench.kernels import bench_kernels
    from flodl.bench.sizes import parse_size

    _show(bench_kernels(parse_size(params), ranks, repeats), json_path)


@bench.command(name="round")
@click.option("--case", "names", multiple=True, type=click.Choice(["3x190M", "2x100M-diloco"]), help="Default: both.")
@click.option("--params", help="A size of your own instead, such as 2M.")
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(2, 64), help="With --params.")
@click.option("--outer", is_flag=True, help="With --params: with a DiLoCo step.")
@click.option(
    "--rounds", default=8, show_default=True, type=click.IntRange(2, 1000), help="At least so many, after two more."
)
@click.option("--peer/--no-peer", default=True, show_default=True, help="gloo's all_reduce of the same size.")
@click.option("--memory/--no-memory", default=True, show_default=True, help="What ranks and host hold.")
@_json_option
def round_(
    names: tuple[str, ...],
    params: str | None,
    ranks: int,
    outer: bool,
    rounds: int,
    peer: bool,
    memory: bool,
    json_path: str | None,
) -> None:
    """One averaging round on one host, in real processes: its time against its traffic, gloo, and its memory."""
    from flodl.bench.round import CASES, bench_round, custom_case
    from flodl.bench.sizes import parse_size

    cases = [CASES[name] for name in names or CASES]
    if params is not None:
        cases = [custom_case(parse_size(params), ranks, outer)]
    _show((row for case in cases for row in bench_round(case, rounds, peer, memory)), json_path)


@bench.command()
@click.option("--mode", "modes", multiple=True, default=("cpu-cadence", "cpu-async"), show_default=True)
@click.option("--seconds", default=30.0, show_default=True, type=click.FloatRange(1.0), help="How long a mode trains.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1, 100), help="Of the start of a run.")
@_json_option
def overhead(modes: tuple[str, ...], seconds: float, repeats: int, json_path: str | None) -> None:
    """What surviving faults costs where there are none, and how long a run takes to start."""
    from flodl.bench.overhead import bench_machinery, bench_start

    def rows() -> Iterable[Row]:
        yield from bench_start(repeats)
        for mode in modes:
            yield from bench_machinery(mode, seconds)

    _show(rows(), json_path)


def _say(line: str) -> None:
    click.echo(line, err=True)


def _show(rows: Iterable[Row], json_path: str | None) -> None:
    """Each row as a line when it comes, then all as a table. Ends with status 1 where a budget was missed."""
    from flodl.bench.rows import line_of, report

    known = []
    for row in rows:
        known.append(row)
        _say(line_of(row))
    report(known, json_path)
    if any(row.ok is False for row in known):
        raise SystemExit(1)
