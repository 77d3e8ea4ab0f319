"""E: how much of what the ranks could do alone they do together (DESIGN: E = S / sum r_i (T - pause_i))."""

from __future__ import annotations

from dataclasses import dataclass

from flodl.bench.rows import Row
from flodl.bench.workloads import BATCH_SIZE, BATCHES_PER_EPOCH
from flodl.result import RunResult
from flodl.trainer import Trainer

SOLO_STEPS = 200
ACCOUNTING_FAULT = 1.005
MOST_RAW_OVER_PAD = 0.01


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


def solo_rates(devices: tuple[str, ...], case: Case, threads: int, steps: int = SOLO_STEPS) -> dict[str, float]:
    """Batches per second of each distinct device alone, after its first batch, with the threads that a rank has."""
    import torch

    torch.set_num_threads(threads)
    rates = {}
    for device in dict.fromkeys(devices):
        result = Trainer(
            entry=case.entry,
            mode="solo",
            devices=[device],
            batch_size=case.batch_size,
            epochs=-(-(steps + 1) // case.batches_per_epoch),
            samples=(steps + 1) * case.batch_size,
        ).run()
        rates[device] = 1000.0 / float(result.raw["step_ms"])
    return rates


def measure(case: Case, seconds: float, rates: dict[str, float]) -> Row:
    """Runs the case for about this long and reports E against the rates of its devices alone."""
    per_second = sum(rates[device] for device in case.devices)
    batches = int(per_second * seconds)
    result = Trainer(
        entry=case.entry,
        mode=case.mode,
        devices=list(case.devices),
        batch_size=case.batch_size,
        epochs=-(-batches // case.batches_per_epoch),
        samples=batches * case.batch_size,
    ).run()
    return _row(case, result, rates)


def _row(case: Case, result: RunResult, rates: dict[str, float]) -> Row:
    raw = result.raw
    training_s = float(raw["training_s"])
    possible = sum(
        rates[device] * (training_s - sum(rank["pauses_s"].values()))
        for device, rank in zip(case.devices, raw["ranks"], strict=True)
    )
    efficiency = raw["batches"] / possible
    over = sum(rank["raw_over_pad"] for rank in raw["ranks"]) / max(1, raw["batches"])
    shares = "/".join(f"{100 * share:.1f}" for share in result.shares)
    e_wall = raw["batches"] / (sum(rates[d] for d in case.devices) * result.wall_s)
    note = f"{raw['batches']} batches in {training_s:.1f} s, {result.rounds} rounds, shares {shares} %, E_wall {e_wall:.3f}"
    ok: bool | None = efficiency >= case.budget
    if over > MOST_RAW_OVER_PAD:
        ok, note = None, f"void: {100 * over:.1f} % of the raw steps were longer than their pad; {note}"
    elif efficiency > ACCOUNTING_FAULT:
        ok, note = False, f"accounting fault: E is over 1; {note}"
    return Row(case.name, "flodl", "E", efficiency, "", 1.0, efficiency, f">= {case.budget}", ok, note)
