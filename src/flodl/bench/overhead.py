"""What a run costs beside training: the processor time of what survives faults, and the way to the first step."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flodl.bench.load import LoadMeter, cpu_s
from flodl.bench.rows import Row
from flodl.bench.workloads import FIRST_STEP
from flodl.devices.cpu import threads_per_rank
from flodl.errors import FlodlError
from flodl.plan import sources
from flodl.trainer import Trainer

DEVICES = ("emulated:cpu*1", "emulated:cpu*4.7", "emulated:cpu*4.7")
MOST_SHARE = 0.01
MOST_START_S = 1.5
MOST_IMPORT_S = 0.15
_POOL = "flodl-pool"
_TICK = os.sysconf("SC_CLK_TCK")


def bench_machinery(mode: str, seconds: float) -> Iterator[Row]:
    """One row: the share of the launcher's processor time outside the reduce in all processor time of the training."""
    view = _ProcessorTime()
    step_s = _step_s()
    samples = int(64 * seconds / step_s * (1 + 2 / 4.7))
    meter = LoadMeter()
    result = Trainer(
        entry="flodl.bench.workloads:perceptron",
        mode=mode,
        devices=list(DEVICES),
        batch_size=64,
        epochs=1000,
        samples=samples,
    ).run(view=view, quiet=True)
    load = meter.usage().words
    launcher, children = view.spent()
    outside = launcher - view.pool_s
    total = launcher + children
    note = (
        f"launcher {outside:.3f} s and {view.pool_s:.3f} s of reduce, ranks {children:.1f} s; {result.rounds} rounds, "
        f"{result.raw['batches']} batches in {result.raw['training_s']:.1f} s; {load}"
    )
    share = outside / total
    budget = f"< {MOST_SHARE:g}"
    yield Row(
        f"{mode} 1/4.7/4.7", "flodl", "machinery's CPU share", share, "", None, None, budget, share < MOST_SHARE, note
    )


@dataclass
class _ProcessorTime:
    """The view of a run that reads clocks: from when training begins to its end, without imports and saving."""

    pool_s: float = 0.0
    _pids: dict[int, int] = field(default_factory=dict)
    _launcher_from: float = 0.0
    _launcher_to: float = 0.0
    _children_from: float = 0.0
    _before: float = field(default_factory=lambda: cpu_s(resource.RUSAGE_CHILDREN))

    def record(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "process_started":
            self._pids[record["rank"]] = record["pid"]
        elif kind == "phase" and record["phase"] == "training":
            self._launcher_from = cpu_s(resource.RUSAGE_SELF)
            self._children_from = sum(_process_cpu_s(pid) for pid in self._pids.values())
        elif kind == "phase":  # ending and done: the pool is still there, and nothing has been saved yet
            self.pool_s = _thread_cpu_s(_POOL)
            self._launcher_to = cpu_s(resource.RUSAGE_SELF)

    def close(self) -> None:
        """Nothing is open."""

    def spent(self) -> tuple[float, float]:
        """CPU seconds of the launcher and of its ranks while they trained. After the run."""
        children = cpu_s(resource.RUSAGE_CHILDREN) - self._before - self._children_from
        return self._launcher_to - self._launcher_from, children


def _process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def _thread_cpu_s(name: str) -> float:
    """Of this process's threads of that name, so far."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == name:
                total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue
    return total / 1e9


def _step_s() -> float:
    """Of a real step with the threads that a rank has."""
    torch.set_num_threads(threads_per_rank(len(DEVICES)))
    result = Trainer(
        entry="flodl.bench.workloads:perceptron", mode="solo", devices=["cpu"], batch_size=64, samples=64 * 50
    ).run(quiet=True)
    return float(result.raw["step_ms"]) / 1e3


def bench_start(repeats: int) -> Iterator[Row]:
    """From run() to the first step of 2 ranks, less what two fresh interpreters need to import torch; import flodl."""
    meter = LoadMeter()
    starts, imports = [], []
    for _ in range(repeats):
        imports.append(_import_torch_s(2))
        starts.append(_first_step_s())
    beyond = [start - alone for start, alone in zip(starts, imports, strict=True)]
    value = statistics.median(beyond)
    note = (
        f"run() to the first step of the later rank {statistics.median(starts):.2f} s, "
        f"two interpreters importing torch at once {statistics.median(imports):.2f} s; "
        f"{repeats} repeats, {meter.usage().words}"
    )
    budget, case = f"<= {MOST_START_S:g}", "start of 2 ranks"
    yield Row(case, "flodl", "beyond importing torch", value, "s", None, None, budget, value <= MOST_START_S, note)
    meter = LoadMeter()
    found = [_import_flodl_s() for _ in range(2 * repeats + 1)]
    own, processor = (statistics.median(times) for times in zip(*found, strict=True))
    ok, note = own < MOST_IMPORT_S, f"{processor:.3f} s of processor time; {meter.usage().words}"
    yield Row("import flodl", "flodl", "time", own, "s", None, None, f"< {MOST_IMPORT_S:g}", ok, note)


def _first_step_s() -> float:
    trainer = Trainer(
        entry="flodl.bench.workloads:first_step", mode="cpu-cadence", devices=["cpu"] * 2, batch_size=16, samples=320
    )
    began = time.monotonic()
    result = trainer.run(quiet=True)
    times = []
    for rank in range(2):
        log = (Path(result.run_directory) / f"rank-{rank}.log").read_text()
        said = [line.partition(FIRST_STEP)[2] for line in log.splitlines() if FIRST_STEP in line]
        if not said:
            raise FlodlError(f"rank {rank} made no step\nIts log is in {result.run_directory}.")
        times.append(float(said[0]))
    return max(times) - began


def _import_torch_s(at_once: int) -> float:
    began = time.monotonic()
    running = [subprocess.Popen([sys.executable, "-c", "import torch"], env=_environment()) for _ in range(at_once)]
    for process in running:
        if process.wait():
            raise FlodlError("a fresh interpreter could not import torch")
    return time.monotonic() - began


def _import_flodl_s() -> tuple[float, float]:
    """(seconds, of the processor) inside a fresh interpreter. Raises FlodlError if torch came with it."""
    script = (
        "import sys, time\nbegan, before = time.perf_counter(), time.process_time()\nimport flodl\n"
        "print(time.perf_counter() - began, time.process_time() - before, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=True).stdout.split()
    if said[2] != "False":
        raise FlodlError("import flodl imported torch")
    return float(said[0]), float(said[1])


def _environment() -> dict[str, str]:
    return dict(sources.started().environment)
