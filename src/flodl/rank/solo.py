"""The whole run in one process: the same step and feed as a rank's, over all batches in order, without rounds."""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flodl.averaging.consensus import save_consensus
from flodl.plan import Plan
from flodl.protocol.ledger import epoch_sizes
from flodl.protocol.messages import BatchRange
from flodl.rank.evaluation import mean_loss
from flodl.rank.leases import Leases
from flodl.rank.parts import Parts
from flodl.rank.tally import Trained
from flodl.rank.trainee import Trainee

CONSENSUS_FILE = "consensus.safetensors"
RESULT_FILE = "result.json"


@dataclass
class _Account:
    """What the run came to, for the result."""

    epochs: list[dict[str, Any]] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    samples: int = 0
    paused_s: float = 0.0
    first_step_ms: float = 0.0

    def add(self, trained: Trained) -> None:
        """The first step may compile: it is kept apart."""
        if self.samples:
            self.step_ms.append(trained.compute_ms + trained.data_ms)
        else:
            self.first_step_ms = trained.compute_ms + trained.data_ms
        self.samples += trained.samples
        self.paused_s += trained.pause_ms / 1e3


def run_solo(plan: Plan, parts: Parts, run_directory: str) -> dict[str, Any]:
    """Trains every epoch, evaluates after each, saves consensus.safetensors in the run directory.

    The result, plain values, also in result.json: wall_s (all of it), training_s (without evaluation and callbacks),
    epochs as [{epoch, loss, samples, metrics}], step_ms (median, without the first), first_step_ms, samples, batches,
    samples_per_s, raw_over_pad. Ctrl-C and failures save the model as it stands and go on up.
    """
    began = time.perf_counter()
    trainee = Trainee(plan, parts, rank=0)
    account = _Account()
    trained_from = time.perf_counter()
    try:
        sizes = epoch_sizes(
            trainee.order.batches_per_epoch, plan.data.epochs, trainee.order.samples_per_epoch, plan.data.samples
        )
        for epoch, batches in enumerate(sizes):
            account.epochs.append(_train_epoch(trainee, account, BatchRange(epoch, 0, batches)))
        training_s = time.perf_counter() - trained_from - account.paused_s
    finally:
        trainee.close()
        save_consensus(trainee.model, Path(run_directory) / CONSENSUS_FILE)
    result = {
        "mode": plan.mode,
        "phase": "done",
        "devices": list(plan.cluster.devices),
        "wall_s": time.perf_counter() - began,
        "training_s": training_s,
        "epochs": account.epochs,
        "step_ms": statistics.median(account.step_ms) if account.step_ms else account.first_step_ms,
        "first_step_ms": account.first_step_ms,
        "samples": account.samples,
        "batches": trainee.steps,
        "samples_per_s": account.samples / training_s if training_s > 0.0 else 0.0,
        "raw_over_pad": trainee.raw_over_pad,
        "shares": [1.0],
        "rounds": 0,
    }
    _write(result, Path(run_directory) / RESULT_FILE)
    return result


def _write(result: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def _train_epoch(trainee: Trainee, account: _Account, batches: BatchRange) -> dict[str, Any]:
    leases = Leases()
    leases.grant((batches,))
    trainee.follow(leases)
    summed, samples = 0.0, 0
    while leases:
        trained = trainee.train(leases.next(), leases)
        account.add(trained)
        summed += trained.loss * trained.samples
        samples += trained.samples
    metrics: dict[str, float] = {}
    if trainee.evaluates:
        started = time.perf_counter()
        metrics = trainee.evaluate(batches.epoch)
        account.paused_s += time.perf_counter() - started
    return {"epoch": batches.epoch, "loss": mean_loss(summed, samples), "samples": samples, "metrics": metrics}
