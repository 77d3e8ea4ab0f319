"""Which checkpoint a run goes on from, and whether it is one of the same training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flodl.checkpoint.document import DOCUMENT, Document, read_whole
from flodl.checkpoint.folder import find_checkpoints, holds_anything
from flodl.errors import CheckpointError
from flodl.plan import CheckpointPlan, Plan
from flodl.plan.refusal import refused
from flodl.protocol.ledger import epoch_sizes

_SAME = ("batch_size", "seed", "drop_last")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: every file was compared with its digest."""

    path: Path
    document: Document


def resolve(plan: CheckpointPlan, warn: Callable[[str], None]) -> Checkpoint | None:
    """What the plan says to go on from; None: begin anew.

    A checkpoint that is not whole is passed over with a warning for an older one, unless it was itself named. Raises
    CheckpointError where there must be one, PlanError for a folder that holds something and was not meant to.
    """
    if isinstance(plan.resume, str) and plan.resume != "auto":
        named = Path(plan.resume)
        found = _open(named) if (named / DOCUMENT).exists() else _newest(named, warn, is_needed=True)
        _refuse_mixture(plan, found)
        return found
    if plan.directory is None:
        return None
    directory = Path(plan.directory)
    if plan.resume is not False:
        return _newest(directory, warn, is_needed=plan.resume is True)
    if not plan.overwrite and _holds_anything(directory):
        raise refused(
            "checkpoint",
            plan.directory,
            'an empty or new folder, or this one with resume="auto" (go on) or overwrite=True (start anew)',
            why="the folder is not empty",
        )
    return None


def base_of(plan: CheckpointPlan, start: Checkpoint | None) -> int:
    """The round from which this run's folder counts (folder.py)."""
    if start is None or plan.directory is None or start.path.parent.resolve() != Path(plan.directory).resolve():
        return -1
    return start.document.round


def refuse_other_training(start: Checkpoint, plan: Plan, dataset_length: int) -> None:
    """What defines which samples a batch holds must be as it was. Raises PlanError naming the field."""
    then = start.document.plan
    data = then.get("data", {})
    was = {
        "batch_size": data.get("batch_size"),
        "seed": then.get("seed"),
        "drop_last": data.get("loader", {}).get("drop_last"),
    }
    now: dict[str, Any] = {
        "batch_size": plan.data.batch_size,
        "seed": plan.seed,
        "drop_last": plan.data.loader.drop_last,
    }
    for name in _SAME:
        if was[name] != now[name]:
            why = f"{start.path} was made with {was[name]!r}, and it defines which samples a batch holds"
            field = "loader.drop_last" if name == "drop_last" else name
            raise refused(field, now[name], repr(was[name]), why=why)
    if start.document.data.length != dataset_length:
        length = start.document.data.length
        why = f"{start.path} was made on {length} samples"
        raise refused("data", f"{dataset_length} samples", f"the data set of {length} samples", why=why)
    _refuse_less(start, plan, dataset_length)


def _refuse_less(start: Checkpoint, plan: Plan, dataset_length: int) -> None:
    """A run that would hold less than is contributed already cannot be gone on with."""
    sizes = epoch_sizes(
        plan.data.batches_per_epoch(dataset_length),
        plan.data.epochs,
        plan.data.samples_per_epoch(dataset_length),
        plan.data.samples,
        plan.data.batch_size,
    )
    for batches in start.document.contributed:
        if batches.epoch >= len(sizes) or batches.first + batches.count > sizes[batches.epoch]:
            field, value = "epochs", plan.data.epochs
            if plan.data.samples is not None:
                field, value = "samples", plan.data.samples
            reached = f"{start.path} holds batch {batches.first + batches.count - 1} of epoch {batches.epoch}"
            trained = max(b.epoch for b in start.document.contributed) + 1
            least = f", so {trained} or more" if field == "epochs" else ""
            raise refused(field, value, f"as many as the checkpoint has already trained, or more{least}", why=reached)


def _refuse_mixture(plan: CheckpointPlan, found: Checkpoint | None) -> None:
    """Checkpoints of another run than the one that is gone on with would be taken for its own."""
    if plan.directory is None or base_of(plan, found) >= 0 or not _holds_anything(Path(plan.directory)):
        return
    allowed = f"an empty or new folder, or the one that {plan.resume} lies in"
    raise refused("checkpoint", plan.directory, allowed, why="the folder holds other checkpoints or files")


def _holds_anything(directory: Path) -> bool:
    try:
        return holds_anything(directory)
    except OSError as error:
        raise refused("checkpoint", str(directory), "a folder's path", why=error.strerror or str(error)) from error


def _open(path: Path) -> Checkpoint:
    return Checkpoint(path, read_whole(path))


def _newest(directory: Path, warn: Callable[[str], None], is_needed: bool) -> Checkpoint | None:
    last: CheckpointError | None = None
    for _, path in find_checkpoints(directory):
        try:
            found = _open(path)
        except CheckpointError as error:
            warn(f"a checkpoint is passed over: {str(error).partition(chr(10))[0]}")
            last = last or error
        else:
            return found
    if last is not None:
        raise CheckpointError(
            f"no checkpoint in {directory} is whole; the newest: {str(last).partition(chr(10))[0]}\n"
            "Restore one from a copy, or begin anew with overwrite=True.",
            path=last.path,
        )
    if is_needed:
        raise CheckpointError(
            f'there is no checkpoint in {directory}\nGive the folder of a checkpoint, or resume="auto" to begin anew '
            "where there is none.",
            path=str(directory),
        )
    return None
