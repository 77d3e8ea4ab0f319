"""result.json: what a run did, in plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flodl.devices.emulated import outlasted
from flodl.plan import Plan
from flodl.protocol.effects import Committed

RESULT = "result.json"
IN_RUN = "in-run rates: batch_size over the robust mean of each rank's last windows, not a solo measurement"


@dataclass(frozen=True)
class RunFacts:
    """What the controller's summary does not know. wall_s: from launch to the last exit."""

    plan: Plan
    run: str
    wall_s: float
    committed: Committed | None
    interrupted: str = ""


def result_of(summary: dict[str, Any], facts: RunFacts) -> dict[str, Any]:
    """The summary, and beside it names, times and efficiency. consensus_hash: 16 hexadecimal digits, or None.

    E = S / Σ r_i (T − pause_i), E_wall = S / Σ r_i · wall_s; None where a rank's rate was never measured.
    """
    rate, capacity = _capacity(summary, facts.plan.data.batch_size)
    devices = facts.plan.cluster.devices
    slow = (outlasted(devices[r["rank"]], r["raw_over_pad"], r["batches"]) for r in summary["ranks"])
    committed = facts.committed
    return {
        **summary,
        "degraded": [*summary["degraded"], *filter(None, slow)],
        "run": facts.run,
        "mode": facts.plan.mode,
        "devices": list(devices),
        "world_size": facts.plan.cluster.world_size,
        "wall_s": facts.wall_s,
        "interrupted": facts.interrupted,
        "committed_round": None if committed is None else committed.round,
        "consensus_hash": None if committed is None else f"{committed.hash:016x}",
        "E": summary["samples"] / capacity if capacity else None,
        "E_wall": summary["samples"] / (rate * facts.wall_s) if rate and facts.wall_s > 0 else None,
        "E_basis": IN_RUN if capacity else None,
    }


def _capacity(summary: dict[str, Any], batch_size: int) -> tuple[float, float]:
    """(Σ r_i in samples per second, Σ r_i (T − pause_i) in samples); zeros where a rate is unknown."""
    rate = capacity = 0.0
    for rank in summary["ranks"]:
        ms = rank["ms_per_batch"]
        if not ms:
            return 0.0, 0.0
        own = batch_size * 1000.0 / ms
        rate += own
        capacity += own * max(0.0, summary["training_s"] - sum(rank["pauses_s"].values()))
    return rate, capacity
