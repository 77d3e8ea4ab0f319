"""One round of the cpu plane on one host: from the last seal to the last adoption, in real processes.

The bound is the traffic of a two-phase round over the bandwidth measured on the same kind of memory just after that
round, while the ranks pause: W reads and one write to average, W reads and W writes to adopt; an outer step reads
θ_prev and reads and writes v.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flodl.bench.bandwidth import Bandwidth, measure_bandwidth, median_of
from flodl.bench.bulk import entry_of
from flodl.bench.load import LoadMeter
from flodl.bench.memory import Sample, held_by
from flodl.bench.peer_gloo import measure_gloo
from flodl.bench.rows import Row
from flodl.bench.sizes import format_size
from flodl.errors import FlodlError
from flodl.plan import DiLoCo
from flodl.result import RunResult
from flodl.trainer import Trainer

WARM_UP = 2
STEP = "emulated:100ms"
"""The real step is far shorter: padded, so that every window but the first is one batch and all seal together."""
TIMED_STEP = "emulated:500ms"
"""Long enough to measure the memory between two rounds."""
MOST_OF_BOUND = 1.4
SLACK_BYTES = 64 << 20
MIB = float(1 << 20)


@dataclass(frozen=True)
class RoundCase:
    """count: parameters. least_gain: how many times faster than gloo; None where no budget is set."""

    name: str
    count: int
    ranks: int
    has_outer: bool = False
    least_gain: float | None = None

    @property
    def streams(self) -> tuple[int, int]:
        """Of N x 4 bytes each: those that go from one memory to another, and those updated in place."""
        return (3 * self.ranks + 2, 2) if self.has_outer else (3 * self.ranks + 1, 0)


CASES = {
    "3x190M": RoundCase("3 x 190M", 190_000_000, 3, False, 4.0),
    "2x100M-diloco": RoundCase("2 x 100M DiLoCo", 100_000_000, 2, True),
}


@dataclass
class Schedule:
    """The view of a run that keeps its records. samples_memory: looks at the processes when all have sealed. measure:
    called when all have adopted, while the ranks are in their padded step; what it returns is kept by round."""

    samples_memory: bool = False
    measure: Callable[[], Bandwidth] | None = None
    around: dict[int, Bandwidth] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    _pids: dict[int, int] = field(default_factory=dict)
    _sealed: set[int] = field(default_factory=set)
    _adopted: set[int] = field(default_factory=set)

    def record(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        self.records.append(record)
        if kind == "process_started":
            self._pids[record["rank"]] = record["pid"]
        elif kind == "seal" and record["round"] > 0:
            self._sealed.add(record["rank"])
            if self.samples_memory and len(self._sealed) == len(self._pids):
                self.samples.append(Sample.take(self._pids.values()))
        elif kind == "commit":
            self._sealed.clear()
            self._adopted.clear()
        elif kind == "adopt" and self.measure is not None:
            self._adopted.add(record["rank"])
            if len(self._adopted) == len(self._pids):
                self.around[record["round"]] = self.measure()

    def close(self) -> None:
        """Nothing is open."""

    def times(self, kind: str) -> dict[int, float]:
        """By round, the time of the last record of this kind."""
        return {record["round"]: record["time_s"] for record in self.records if record["kind"] == kind}

    def rounds(self) -> dict[int, dict[str, float]]:
        """Of each round but the first: total, reduce (seal to commit, with what is between), commit, adopt; seconds."""
        seals, commits, adopts = self.times("seal"), self.times("commit"), self.times("adopt")
        alone = {record["round"]: record["seconds"] for record in self.records if record["kind"] == "commit"}
        return {
            number: {
                "total": adopts[number] - seals[number],
                "reduce": commits[number] - seals[number] - alone[number],
                "commit": alone[number],
                "adopt": adopts[number] - commits[number],
            }
            for number in sorted(commits)
            if number > 0 and number in seals and number in adopts
        }


def bench_round(case: RoundCase, rounds: int, has_peer: bool = True, has_memory: bool = True) -> Iterator[Row]:
    """Rows as they become known: the round, gloo's all-reduce of the same size, memory in units of the model.

    Raises FlodlError where the run had too few rounds to tell.
    """
    measure = shared_memory_meter(case.count)
    meter = LoadMeter()
    schedule = Schedule(measure=measure)
    _train(case, WARM_UP + rounds, entry_of(case.count), schedule, TIMED_STEP)
    load = meter.usage().words
    del measure, schedule.measure
    timed = [(parts, schedule.around[number]) for number, parts in schedule.rounds().items()][WARM_UP:]
    if len(timed) < 2:
        raise FlodlError(f"{case.name}: the run had {len(timed)} rounds after the warm-up\nAsk for more with --rounds.")
    row = _round_row(case, timed, load)
    yield row
    if has_peer:
        yield from _gloo_rows(case, rounds, row.value)
    if has_memory:
        yield from _memory_rows(case)


def shared_memory_meter(count: int) -> Callable[[], Bandwidth]:
    """Measures the bandwidth of two segments of shared memory of this many fp32 values, touched here; keeps them."""
    from flodl import native
    from flodl.averaging.arena import tensor_over

    size = 4 * count // 64 * 64
    segments = [native.SharedMemory.create(size) for _ in range(2)]
    for segment in segments:
        segment.prefault()
    first, second = (tensor_over(segment, 0, size) for segment in segments)
    return lambda: measure_bandwidth(first, second)


def _train(case: RoundCase, rounds: int, entry: str, schedule: Schedule, step: str = STEP) -> RunResult:
    trainer = Trainer(
        entry=entry,
        mode="cpu-cadence",
        devices=[step] * case.ranks,
        batch_size=1,
        samples=3 * case.ranks * rounds,  # the first window is open: others train on until the slowest has begun
        anchor=1,
        overhead_target=0.999,  # the window is not to grow, however long a round takes
        guard=None,
        outer=DiLoCo(min_window=0) if case.has_outer else None,
    )
    return trainer.run(view=schedule, quiet=True)


def _round_row(case: RoundCase, timed: list[tuple[dict[str, float], Bandwidth]], load: str) -> Row:
    """timed: the parts of each round, and the memory just after it. The ratio is the median of each round's own."""
    totals = [parts["total"] for parts, _ in timed]
    copied, updated = (4.0 * case.count * streams for streams in case.streams)
    bounds = [around.seconds(copied, updated) for _, around in timed]
    ratio = statistics.median(total / bound for total, bound in zip(totals, bounds, strict=True))
    medians = ", ".join(
        f"{name} {statistics.median(parts[name] for parts, _ in timed):.3f}" for name in ("reduce", "commit", "adopt")
    )
    note = (
        f"{medians} s; {len(totals)} rounds, {min(totals):.3f} to {max(totals):.3f} s; "
        f"{median_of([around for _, around in timed]).words}; {load}"
    )
    seconds, bound = statistics.median(totals), statistics.median(bounds)
    return Row(
        case.name, "flodl", "round", seconds, "s", bound, ratio, f"<= {MOST_OF_BOUND}", ratio <= MOST_OF_BOUND, note
    )


def _gloo_rows(case: RoundCase, rounds: int, own_s: float) -> Iterator[Row]:
    meter = LoadMeter()
    times = measure_gloo(case.count, case.ranks, rounds)
    seconds = statistics.median(times)
    gain = seconds / own_s
    what = "scaling and all_reduce, no outer step" if case.has_outer else "scaling and all_reduce"
    note = f"{what}; {min(times):.3f} to {max(times):.3f} s; {meter.usage().words}"
    yield Row(case.name, "gloo", "round", seconds, "s", note=note)
    least = case.least_gain
    budget, ok = ("", None) if least is None else (f">= {least:g}", gain >= least)
    yield Row(case.name, "flodl", "times faster than gloo", gain, "x", budget=budget, ok=ok)


def _memory_rows(case: RoundCase) -> Iterator[Row]:
    """A run with gradients of everything, and one with a model of next to nothing for what a process holds anyway."""
    model = 4 * case.count
    small = Schedule(samples_memory=True)
    _train(RoundCase("", 1000, case.ranks, case.has_outer), 2, entry_of(1000, has_gradients=True), small)
    launcher = held_by().own
    large = Schedule(samples_memory=True)
    _train(case, 3, entry_of(case.count, has_gradients=True), large)
    base = max(max(sample.rank_bytes()) for sample in small.samples)
    rank = max(max(sample.rank_bytes()) for sample in large.samples) - base
    host = max(sample.host_bytes() for sample in large.samples) - launcher
    for name, held, units in (("rank", rank, 2), ("host", host, 3 if case.has_outer else 2)):
        note = f"{held / MIB:.0f} MiB beyond what the process holds without a model; M is {model / MIB:.0f} MiB"
        yield Row(
            f"{case.name} memory",
            "flodl",
            "memory of a rank" if name == "rank" else "memory of the host",
            held / model,
            "M",
            float(units),
            held / model / units,
            f"<= {units} M + 64 MiB",
            held <= units * model + SLACK_BYTES,
            note,
        )


def custom_case(count: int, ranks: int, has_outer: bool) -> RoundCase:
    """A size of one's own, without a budget against gloo."""
    return RoundCase(f"{ranks} x {format_size(count)}{' DiLoCo' if has_outer else ''}", count, ranks, has_outer)
