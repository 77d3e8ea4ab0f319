"""The averaging kernels against the machine's own streaming speed, and against what torch offers for the same work.

Every repeat measures the bound, flodl and torch in turn on the same memory, each as the best of the same number of
passes, so that a change of the machine's speed or a busy neighbour meets all three. Traffic is what the work needs at
least: reading each input once, writing each output.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from flodl import native
from flodl.bench.bandwidth import STREAMS, THREADS, Bandwidth, measure_bandwidth, median_of
from flodl.bench.load import LoadMeter
from flodl.bench.rows import Row
from flodl.bench.sizes import format_size

PIECE_ELEMENTS = 4 << 20
"""What a thread takes at a time: 16 MiB of fp32."""
TURNS = 2
"""In a repeat; in each of them two passes of the bound (one per number of streams), of flodl and of torch."""
TENSORS = 50
LR, MOMENTUM = 0.7, 0.9
MOST_TRANSIENT_MIB = 64.0


@dataclass(frozen=True)
class Work:
    """One thing to time. copied, updated: bytes of its least traffic past the cache and in place; read: those of both
    that are read."""

    name: str
    flodl: Callable[[], object]
    torch: Callable[[], object] | None
    peer: str
    copied: float
    updated: float
    read: float
    least_share: float | None

    @property
    def traffic(self) -> float:
        return self.copied + self.updated


class Arrays:
    """W inputs of N fp32 values, and what an average and an outer step need beside them. Touched once, here."""

    def __init__(self, count: int, width: int) -> None:
        self.count = count
        self.inputs = [torch.full((count,), 0.5 + k) for k in range(width)]
        self.out, self.theta_prev, self.velocity, self.gradient = (torch.full((count,), 0.25) for _ in range(4))
        raw = [1.0 + k for k in range(width)]
        self.weights = [weight / sum(raw) for weight in raw] if width > 1 else [1.0]

    @property
    def bytes(self) -> float:
        return 4.0 * self.count


def bench_kernels(count: int, width: int, repeats: int, threads: int = THREADS) -> Iterator[Row]:
    """Rows as they become known: per work, flodl's and torch's throughput against the bound, and transient memory."""
    torch.set_num_threads(threads)
    arrays = Arrays(count, width)
    size = format_size(count)
    for work in _works(arrays, threads):
        yield from _rows(work, arrays, (repeats, threads), f"{work.name} {width} x {size}")


def _works(arrays: Arrays, threads: int) -> list[Work]:
    n, width = arrays.bytes, len(arrays.inputs)
    step = _TorchStep(arrays)
    run = _Pieces(arrays.count, threads)
    streams = 4 * arrays.count > (8 << 20)
    first, out, theta_prev, velocity = arrays.inputs[0], arrays.out, arrays.theta_prev, arrays.velocity

    def weighted_sum(part: slice) -> None:
        native.weighted_sum(out[part], [x[part] for x in arrays.inputs], arrays.weights, streams=streams)

    def outer(copies: list[torch.Tensor]) -> Callable[[slice], None]:
        def piece(part: slice) -> None:
            state = (theta_prev[part], out[part], velocity[part])
            native.outer_step("nesterov", state, lr=LR, momentum=MOMENTUM, copies=[c[part] for c in copies])

        return piece

    return [
        Work(
            "weighted sum + statistics",
            lambda: run(weighted_sum),
            lambda: _torch_sum(arrays),
            "torch mul(out=) + add_(alpha)",
            (width + 1) * n,
            0.0,
            width * n,
            0.9,
        ),
        Work(
            "outer step",
            lambda: run(outer([])),
            step,
            "torch fused SGD nesterov + difference",
            n,
            4 * n,
            3 * n,
            0.85,
        ),
        Work(
            "outer step into arenas",
            lambda: run(outer(arrays.inputs)),
            lambda: step(arrays.inputs),
            "torch fused SGD nesterov + difference + copy_",
            (1 + width) * n,
            4 * n,
            3 * n,
            0.85,
        ),
        Work(
            "gather",
            lambda: run(lambda part: native.gather(out[part], first[part], streams=streams)),
            lambda: out.copy_(first),
            "torch copy_, no norm, no hash",
            2 * n,
            0.0,
            n,
            None,
        ),
        Work(
            "copy_hash",
            lambda: run(lambda part: native.copy_hash(out[part], first[part], streams=streams)),
            lambda: out.copy_(first),
            "torch copy_, no hash",
            2 * n,
            0.0,
            n,
            None,
        ),
    ]


class _Pieces:
    """Calls a kernel on pieces of an array from several threads, each taking the next piece; the GIL is released."""

    def __init__(self, count: int, threads: int) -> None:
        starts = range(0, count, PIECE_ELEMENTS)
        self._pieces = [slice(start, min(start + PIECE_ELEMENTS, count)) for start in starts]
        self._threads = threads

    def __call__(self, kernel: Callable[[slice], object]) -> None:
        taken = itertools.count()

        def serve() -> None:
            while (number := next(taken)) < len(self._pieces):
                kernel(self._pieces[number])

        others = [threading.Thread(target=serve) for _ in range(self._threads - 1)]
        for thread in others:
            thread.start()
        serve()
        for thread in others:
            thread.join()


def _torch_sum(arrays: Arrays) -> None:
    torch.mul(arrays.inputs[0], arrays.weights[0], out=arrays.out)
    for tensor, weight in zip(arrays.inputs[1:], arrays.weights[1:], strict=True):
        arrays.out.add_(tensor, alpha=weight)


class _TorchStep:
    """The same step with torch.optim: parameters, gradients and momentum in 50 tensors that are kept."""

    def __init__(self, arrays: Arrays) -> None:
        cut = -(-arrays.count // TENSORS)
        self._parameters = [torch.nn.Parameter(view) for view in arrays.theta_prev.split(cut)]
        self._gradients = arrays.gradient.split(cut)
        self._averages = arrays.out.split(cut)
        self._flat = arrays.theta_prev
        self._optimizer = torch.optim.SGD(self._parameters, lr=LR, momentum=MOMENTUM, nesterov=True, fused=True)
        for parameter, gradient, velocity in zip(
            self._parameters, self._gradients, arrays.velocity.split(cut), strict=True
        ):
            parameter.grad = gradient
            self._optimizer.state[parameter]["momentum_buffer"] = velocity

    def __call__(self, copies: list[torch.Tensor] | None = None) -> None:
        with torch.no_grad():
            for parameter, average, gradient in zip(self._parameters, self._averages, self._gradients, strict=True):
                torch.sub(parameter, average, out=gradient)
            self._optimizer.step()
            for copy in copies or []:
                copy.copy_(self._flat)


def _rows(work: Work, arrays: Arrays, settings: tuple[int, int], case: str) -> Iterator[Row]:
    repeats, threads = settings
    own: list[tuple[float, Bandwidth]] = []
    peer: list[tuple[float, Bandwidth]] = []
    work.flodl()
    if work.torch is not None:
        work.torch()
    meter = LoadMeter()
    for _ in range(repeats):
        turns = [_turn(work, arrays, threads) for _ in range(TURNS)]
        around = functools.reduce(Bandwidth.best, (turn.around for turn in turns))
        own.append((min(turn.own_s for turn in turns), around))
        if work.torch is not None:
            peer.append((min(turn.peer_s for turn in turns), around))
    load = meter.usage().words
    yield _row(work, own, (case, "flodl", work.least_share), load)
    if work.torch is not None:
        ratio = statistics.median(b for b, _ in peer) / statistics.median(a for a, _ in own)
        yield _row(work, peer, (case, work.peer, None), f"{ratio:.2f} x flodl's time; {load}")
    transient = _transient_mib(work.flodl)
    yield Row(case, "flodl", "transient", transient, "MiB", budget="<= 64", ok=transient <= MOST_TRANSIENT_MIB)
    if work.torch is not None:
        yield Row(case, work.peer, "transient", _transient_mib(work.torch), "MiB")


def _row(work: Work, timed: list[tuple[float, Bandwidth]], names: tuple[str, str, float | None], remark: str) -> Row:
    """Throughput over the least traffic. The ratio is the median of each repeat's own."""
    case, subject, least = names
    seconds = [s for s, _ in timed]
    bounds = [around.seconds(work.copied, work.updated, work.read) for _, around in timed]
    ratio = statistics.median(bound / s for s, bound in zip(seconds, bounds, strict=True))
    middle = statistics.median(seconds)
    note = (
        f"{middle:.4f} s ({min(seconds):.4f} to {max(seconds):.4f}), bound {statistics.median(bounds):.4f} s, "
        f"{median_of([around for _, around in timed]).words}; {remark}"
    )
    return Row(
        case,
        subject,
        "throughput",
        work.traffic / middle / 1e9,
        "GB/s",
        work.traffic / statistics.median(bounds) / 1e9,
        ratio,
        "" if least is None else f">= {least}",
        None if least is None else ratio >= least,
        note,
    )


@dataclass(frozen=True)
class _Turn:
    around: Bandwidth
    own_s: float
    peer_s: float


def _turn(work: Work, arrays: Arrays, threads: int) -> _Turn:
    around = measure_bandwidth(arrays.gradient, arrays.theta_prev, threads)
    own = _best_of(work.flodl)
    return _Turn(around, own, math.inf if work.torch is None else _best_of(work.torch))


def _best_of(call: Callable[[], object]) -> float:
    """Seconds of the faster of as many passes as the bound has."""
    times = []
    for _ in STREAMS:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def _transient_mib(call: Callable[[], object]) -> float:
    """How far this process's memory rose above where it was, while the call ran. 0 where the system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident_mib("VmRSS")
        call()
        return max(0.0, _resident_mib("VmHWM") - before)
    except OSError:
        return 0.0


def _resident_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return float(line.split()[1]) / 1024.0
    raise OSError(f"/proc/self/status has no {field}")
