"""What a run begins with: a checkpoint or nothing, the folder that it saves to, and what was said on the way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flodl.checkpoint.document import CONSENSUS, Document
from flodl.checkpoint.files import probe, write_json, write_whole
from flodl.checkpoint.folder import CheckpointFolder, FolderLock
from flodl.checkpoint.resume import Checkpoint, base_of, refuse_other_training, resolve
from flodl.checkpoint.velocity import VELOCITY
from flodl.errors import CheckpointError
from flodl.plan import Plan
from flodl.plan.refusal import refused
from flodl.protocol.ledger import Ledger, epoch_sizes


@dataclass
class Start:
    """Made before anything starts; released when the run has ended. warnings: sentences, told already."""

    checkpoint: Checkpoint | None = None
    folder: CheckpointFolder | None = None
    warnings: list[str] = field(default_factory=list)
    lock: FolderLock | None = None

    def release(self) -> None:
        """Another run may use the folder from here on."""
        if self.lock is not None:
            self.lock.release()

    @property
    def resumed_from(self) -> dict[str, Any] | None:
        """For the result: the checkpoint's path and round."""
        if self.checkpoint is None:
            return None
        return {"path": str(self.checkpoint.path), "round": self.checkpoint.document.round}


def prepare(plan: Plan, run: str, dataset_length: int, warn: Callable[[str], None] | None = None) -> Start:
    """Takes the folder, finds what to go on from, and removes what dead runs left half-written in it.

    Raises PlanError or CheckpointError before anything is started; at most the folder and its lock are made then.
    """
    start = Start()
    try:
        _prepare(start, plan, run, dataset_length, warn)
    except BaseException:
        start.release()
        raise
    return start


def _prepare(start: Start, plan: Plan, run: str, dataset_length: int, warn: Callable[[str], None] | None) -> None:

    def told(words: str) -> None:
        start.warnings.append(words)
        if warn is not None:
            warn(words)

    # First of all: a run that still saves there changes and removes what would be found.
    if plan.checkpoint.directory is not None:
        start.lock = _locked(Path(plan.checkpoint.directory), plan.checkpoint.resume is True)
    start.checkpoint = resolve(plan.checkpoint, told)
    if start.checkpoint is not None:
        refuse_other_training(start.checkpoint, plan, dataset_length)
        if start.checkpoint.document.has(VELOCITY) and (plan.outer is None or plan.mode == "solo"):
            told(f"the outer optimizer's velocity in {start.checkpoint.path} is dropped: this run takes no outer step")
    if plan.checkpoint.directory is None:
        return
    directory = Path(plan.checkpoint.directory)
    try:
        probe(directory)
    except OSError as error:
        why = error.strerror or str(error)
        allowed = "a folder that can be made and written to"
        raise refused("checkpoint", str(directory), allowed, why=why) from error
    start.folder = CheckpointFolder(directory, run, plan.checkpoint.keep, base_of(plan.checkpoint, start.checkpoint))
    if start.lock is not None and start.lock.is_held:
        start.folder.remove_remains()


def _locked(directory: Path, must_exist: bool) -> FolderLock | None:
    """None, and nothing is made, for a folder that must exist and does not. Raises PlanError where it is taken."""
    if must_exist and not directory.is_dir():
        return None
    try:
        return FolderLock(directory)
    except BlockingIOError:
        allowed = "a folder that no other run is saving to"
        raise refused("checkpoint", str(directory), allowed, why="another run saves to it now") from None


def is_finished(start: Start, plan: Plan, dataset_length: int) -> bool:
    """Whether the checkpoint holds all that the plan asks for."""
    if start.checkpoint is None:
        return False
    ledger = Ledger(
        epoch_sizes(
            plan.data.batches_per_epoch(dataset_length),
            plan.data.epochs,
            plan.data.samples_per_epoch(dataset_length),
            plan.data.samples,
            plan.data.batch_size,
        )
    )
    ledger.restore(start.checkpoint.document.contributed, start.checkpoint.document.quarantined)
    return ledger.is_complete


def give_finished(start: Start, plan: Plan, run: str, run_directory: str) -> dict[str, Any]:
    """The result of a run that had nothing left to train, also in result.json, beside the checkpoint's consensus.

    Raises CheckpointError where either cannot be written.
    """
    assert start.checkpoint is not None
    path, document = start.checkpoint.path, start.checkpoint.document
    began = time.monotonic()
    result = {
        "run": run,
        "mode": plan.mode,
        "phase": "done",
        "reason": "nothing is left to train",
        "devices": list(plan.cluster.devices),
        "world_size": plan.cluster.world_size,
        "epochs": epochs_of(document),
        "samples": 0,
        "batches": 0,
        "rounds": 0,
        "shares": [0.0] * plan.cluster.world_size,
        "degraded": list(start.warnings),
        "reasons": [f"every batch is in {path} already: nothing was trained"],
        "resumed_from": start.resumed_from,
        "wall_s": time.monotonic() - began,
        "save_error": "",
    }
    directory = Path(run_directory)
    try:
        with open(path / CONSENSUS, "rb") as file:
            write_whole(directory / CONSENSUS, iter(lambda: file.read(1 << 20), b""))
        write_json(directory / "result.json", result)
    except OSError as error:
        what = f"the result cannot be written to {directory}: {error.strerror or error}\nMake room, or choose another."
        raise CheckpointError(what, path=os.fspath(directory)) from error
    return result


def epochs_of(document: Document) -> list[dict[str, Any]]:
    """As in a result: loss is the mean over the epoch's samples."""
    return [
        {
            "epoch": epoch.epoch,
            "loss": epoch.loss_sum / epoch.samples if epoch.samples and epoch.loss_sum is not None else None,
            "samples": epoch.samples,
            "round": epoch.round,
            "metrics": dict(epoch.metrics),
        }
        for epoch in document.epochs
    ]
