"""The whole run in one process: the same step and feed as a rank's, over all batches in order, without rounds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from flodl.averaging.consensus import save_consensus
from flodl.checkpoint.document import EpochRecord
from flodl.checkpoint.files import write_json
from flodl.checkpoint.start import Start
from flodl.devices.emulated import outlasted
from flodl.errors import CheckpointError, RunFailed
from flodl.plan import Plan, plan_to_dict
from flodl.protocol.messages import BatchRange
from flodl.rank.evaluation import mean_loss
from flodl.rank.interruption import Interruption
from flodl.rank.leases import Lease, Leases
from flodl.rank.parts import Parts
from flodl.rank.solo_progress import SoloProgress
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
    _is_finite: bool = True
    _news: list[str] = field(default_factory=list)

    def add(self, lease: Lease, trained: Trained) -> None:
        """The first step may compile: it is kept apart."""
        if self._is_finite and not math.isfinite(trained.loss):
            self._is_finite = False
            self._news.append(f"the loss of batch {lease.index} of epoch {lease.epoch} is {trained.loss}")
        if self.samples:
            self.step_ms.append(trained.compute_ms + trained.data_ms)
        else:
            self.first_step_ms = trained.compute_ms + trained.data_ms
        self.samples += trained.samples
        self.paused_s += trained.pause_ms / 1e3

    def news(self) -> list[str]:
        """What the user is to hear of, given once."""
        news, self._news = self._news, []
        return news


Tell = Callable[[str, dict[str, Any]], None]
"""Hears of the run's records: kind and fields."""


def run_solo(
    plan: Plan, parts: Parts, run_directory: str, tell: Tell | None = None, start: Start | None = None
) -> dict[str, Any]:
    """Trains every epoch, evaluates after each, saves consensus.safetensors in the run directory.

    start: what it goes on from and where it saves. The result, plain values, also in result.json: wall_s (all of it),
    training_s (without evaluation, callbacks and checkpoints), epochs as [{epoch, loss, samples, metrics}], step_ms
    (median, without the first), first_step_ms, samples, batches, samples_per_s, raw_over_pad, degraded, resumed_from.
    Ctrl-C and failures save the model as it stands and go on up. Raises CheckpointError before the first step, and
    RunFailed after the last one if the result cannot be saved.
    """
    start = start or Start()
    began = time.perf_counter()
    trainee = Trainee(plan, parts, rank=0)
    account = _Account()
    try:
        progress = SoloProgress(plan, parts, trainee, start)
        account.epochs = [_told(record) for record in progress.epochs[: progress.epoch]]
        trained_from = time.perf_counter()
        if tell is not None:
            _tell_head(tell, plan, parts, progress)
        with Interruption(is_deferred=start.folder is not None) as interruption:
            _train(trainee, account, progress, interruption, tell)
        training_s = time.perf_counter() - trained_from - account.paused_s
    except BaseException as error:
        _save_after(error, trainee.model, run_directory)
        raise
    finally:
        trainee.close()
    result = {
        "mode": plan.mode,
        "phase": "done",
        "devices": list(plan.cluster.devices),
        "wall_s": time.perf_counter() - began,
        "training_s": training_s,
        **_figures(account, trainee, training_s),
        "degraded": progress.degraded + _too_slow(plan.cluster.devices[0], trainee),
        "resumed_from": start.resumed_from,
    }
    _save(result, trainee.model, Path(run_directory))
    if interruption.is_asked:
        interruption.raise_it("the run had come to its end")
    return result


def _train(
    trainee: Trainee, account: _Account, progress: SoloProgress, interruption: Interruption, tell: Tell | None
) -> None:
    """Every epoch that is left. Where the user interrupts, what the signal would have raised, once all is saved."""
    while not progress.is_over:
        epoch = _Epoch(progress.lease(), progress.epochs[progress.epoch])
        record = _train_epoch(trainee, account, epoch, interruption)
        for words in account.news():
            progress.degrade(words)
        if not epoch.is_whole:
            interruption.raise_it(progress.stop(record, epoch.trained))
        account.epochs.append(_told(record))
        account.paused_s += progress.close(record)
        if tell is not None:
            _tell_epoch(tell, account.epochs[-1])


def _figures(account: _Account, trainee: Trainee, training_s: float) -> dict[str, Any]:
    return {
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


def _too_slow(device: str, trainee: Trainee) -> list[str]:
    words = outlasted(device, trainee.raw_over_pad, trainee.steps)
    return [words] if words else []


def _tell_head(tell: Tell, plan: Plan, parts: Parts, progress: SoloProgress) -> None:
    size = {"batches_per_epoch": progress.batches_per_epoch, "batches": progress.size, "epochs": len(progress.epochs)}
    tell("head", {"plan": plan_to_dict(plan), "dataset_length": len(parts.data), **size})
    tell("phase", {"phase": "training", "reason": "one device needs no rounds"})


def _save(result: dict[str, Any], model: nn.Module, directory: Path) -> None:
    """Raises RunFailed where the disk is full or read-only by now."""
    try:
        save_consensus(model, directory / CONSENSUS_FILE)
        write_json(directory / RESULT_FILE, result)
    except (CheckpointError, OSError) as error:
        what = str(error).partition("\n")[0]
        raise RunFailed(
            f"the run trained to its end, but its result could not be saved: {what}\n"
            f"Make room or give write access in {directory}, and run again or resume from a checkpoint.",
            reason=what,
            log_path=str(directory),
        ) from error


def _save_after(failure: BaseException, model: nn.Module, run_directory: str) -> None:
    """The model as it stands. Where that cannot be saved either, the first failure says so and stays the one raised."""
    try:
        save_consensus(model, Path(run_directory) / CONSENSUS_FILE)
    except CheckpointError as error:
        failure.add_note(f"flodl: the model as it stood is lost: {str(error).partition(chr(10))[0]}")


def _tell_epoch(tell: Tell, epoch: dict[str, Any]) -> None:
    tell("epoch", {name: epoch[name] for name in ("epoch", "loss", "samples")})
    if epoch["metrics"]:
        tell("evaluation", {"rank": 0, "epoch": epoch["epoch"], "metrics": epoch["metrics"]})


def _told(record: EpochRecord) -> dict[str, Any]:
    loss = mean_loss(math.nan if record.loss_sum is None else record.loss_sum, record.samples)
    return {"epoch": record.epoch, "loss": loss, "samples": record.samples, "metrics": dict(record.metrics)}


@dataclass
class _Epoch:
    """before: what an earlier run had trained of it; trained: batches in this one."""

    batches: tuple[BatchRange, ...]
    before: EpochRecord
    trained: int = 0

    @property
    def is_whole(self) -> bool:
        return self.trained == sum(batches.count for batches in self.batches)


def _train_epoch(trainee: Trainee, account: _Account, epoch: _Epoch, interruption: Interruption) -> EpochRecord:
    """What is left of it, and the evaluation; no further than to the end of the batch in which the user interrupts."""
    before = epoch.before
    leases = Leases()
    leases.grant(epoch.batches)
    trainee.follow(leases)
    summed, samples = math.nan if before.loss_sum is None else before.loss_sum, before.samples
    while leases and not interruption.is_asked:
        lease = leases.next()
        trained = trainee.train(lease, leases)
        epoch.trained += 1
        account.add(lease, trained)
        summed += trained.loss * trained.samples
        samples += trained.samples
    metrics: dict[str, float] = {}
    if trainee.evaluates and epoch.is_whole:
        started = time.perf_counter()
        metrics = trainee.evaluate(before.epoch)
        account.paused_s += time.perf_counter() - started
    return EpochRecord(before.epoch, summed, samples, None, dict(metrics))
