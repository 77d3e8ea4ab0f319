"""The demo's checkpoints: the folder that a demo may write to, the proof that they resume, and what goes on from them.

demo.json beside the checkpoints holds the Setting. It also marks the folder as one that the next demo may replace.
"""

from __future__ import annotations

import os
import secrets
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import TensorDataset

from flodl.bench.demo_setting import Saving, Setting, accuracy_of
from flodl.bench.workloads import LENET_BATCH_SIZE, accuracy
from flodl.checkpoint.folder import find_checkpoints, holds_anything
from flodl.checkpoint.resume import Checkpoint, resolve
from flodl.errors import CheckpointError
from flodl.plan import CheckpointPlan
from flodl.plan.refusal import refused
from flodl.rank.evaluation import Evaluation
from flodl.records.schedule import warn_on_stderr
from flodl.result import RunResult
from flodl.trainer import RUNS

MARK = "demo.json"
FOLDER = "checkpoint"
FURTHER_BATCHES = 20
"""How far the proof goes on: enough for every rank to train, little to wait for."""


@dataclass(frozen=True)
class Folders:
    """home: new, of this demo alone. checkpoint: in it, or where the caller wants it."""

    home: Path
    checkpoint: Path

    @classmethod
    def beside(cls, directory: Path, checkpoint: str | None) -> Folders:
        """Under runs/ in this directory."""
        home = directory / RUNS / f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        return cls(home, home / FOLDER if checkpoint is None else Path(checkpoint).expanduser().absolute())

    def run(self, name: str) -> str:
        """The run directory of one of the demo's runs."""
        return str(self.home / name)


def is_replaced(folder: Path) -> bool:
    """Whether it holds an earlier demo's checkpoints. Raises PlanError where it holds anything else."""
    try:
        if not holds_anything(folder):
            return False
    except OSError as error:
        raise refused("checkpoint", str(folder), "a folder's path", why=error.strerror or str(error)) from error
    if not (folder / MARK).is_file():
        allowed = "an empty or new folder, or one that a demo made"
        raise refused("checkpoint", str(folder), allowed, why="a demo must not replace what it holds")
    return True


def mark_folder(folder: Path, setting: Setting) -> None:
    """What goes on from its checkpoints will find the setting. Raises PlanError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).write_bytes(msgspec.json.format(msgspec.json.encode(setting), indent=1) + b"\n")
    except OSError as error:
        why = error.strerror or str(error)
        raise refused("checkpoint", str(folder), "a folder that can be written", why=why) from error


def newest_folder(directory: Path) -> Path:
    """Of the demos run in this directory that saved anything. Raises CheckpointError where there is none."""
    marks = sorted((directory / RUNS).glob(f"demo-*/{FOLDER}/{MARK}"), reverse=True)
    found = next((mark.parent for mark in marks if find_checkpoints(mark.parent)), None)
    if found is None:
        raise CheckpointError(
            f"no demo has left a checkpoint in {directory / RUNS}\nRun `fdl demo`, or name the checkpoint's folder.",
            path=str(directory / RUNS),
        )
    return found


def read_setting(folder: Path) -> Setting:
    """Raises CheckpointError where the folder is no demo's."""
    path = folder / MARK
    try:
        return msgspec.json.decode(path.read_bytes(), type=Setting)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{folder} is no folder of a demo's checkpoints: {path}: {reason}\nName one that `fdl demo` printed.",
            path=str(path),
        ) from error


def find_start(folder: Path) -> Checkpoint:
    """The newest whole one; others are warned of and passed over. Raises CheckpointError where there is none."""
    found = resolve(CheckpointPlan(directory=str(folder), resume=True), warn_on_stderr)
    assert found is not None
    return found


def with_more_epochs(setting: Setting, start: Checkpoint, epochs: int) -> Setting:
    """To the end of the epoch that the checkpoint is in, and epochs - 1 more."""
    whole = settled_batches(start) // setting.batches_per_epoch
    return msgspec.structs.replace(setting, batches=(whole + epochs) * setting.batches_per_epoch)


def settled_batches(start: Checkpoint) -> int:
    """That are not trained again."""
    document = start.document
    return sum(batches.count for batches in document.contributed) + len(document.quarantined)


def near(path: Path) -> str:
    """As seen from here, where it lies below."""
    shown = os.path.relpath(path)
    return str(path) if shown.startswith(os.pardir) else shown


def command_of(folder: Path) -> str:
    """What goes on from this folder, to be typed where the demo was called."""
    return f"{'./fdl' if Path('fdl').is_file() else 'fdl'} demo --resume {shlex.quote(near(folder))}"


@dataclass(frozen=True)
class Proof:
    """What the checkpoint turned out to hold, read back from disk. accuracy: of its parameters, tested once more.

    further_batches: trained by the three ranks from there on; nothing of that was saved.
    """

    path: str
    round: int
    accuracy: float
    further_batches: int
    further_s: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def prove(setting: Setting, folders: Folders, run: RunResult, test: TensorDataset) -> Proof:
    """Goes on from the newest checkpoint twice: with nothing left to train, and with a few batches more.

    Raises CheckpointError where it does not give the run's parameters and accuracy back, bit for bit.
    """
    folder = str(folders.checkpoint)
    restored = setting.train_together(Saving(folders.run("restored"), folder, resume=True))
    start = restored.resumed_from
    if start is None or restored.raw["batches"]:
        raise CheckpointError(f"{folder} does not hold all that the run trained", path=folder)
    path = str(start["path"])
    right = _test(restored, test)
    refuse_difference(path, run, restored, right)
    longer = msgspec.structs.replace(setting, batches=setting.batches + FURTHER_BATCHES)
    further = longer.train_together(Saving(folders.run("further"), resume=path), is_tested=False)
    if further.resumed_from != start or further.raw["batches"] != FURTHER_BATCHES:
        raise CheckpointError(f"training did not go on from {path}", path=path)
    return Proof(path, start["round"], right, FURTHER_BATCHES, further.raw["training_s"])


def refuse_difference(path: str, run: RunResult, restored: RunResult, right: float) -> None:
    """right: how much of the test set the restored model gets right. Raises CheckpointError where anything differs."""
    ended, found = run.model.state_dict(), restored.model.state_dict()
    differing = [name for name, value in ended.items() if name not in found or not torch.equal(value, found[name])]
    if differing:
        raise CheckpointError(
            f"{path} holds other parameters than the run ended with: {', '.join(differing)}", path=path
        )
    if right != accuracy_of(run):
        raise CheckpointError(f"{path} gets {right} of the test right, and the run got {accuracy_of(run)}", path=path)


def _test(result: RunResult, test: TensorDataset) -> float:
    """As a rank tests after an epoch."""
    evaluation = Evaluation(accuracy, test, LENET_BATCH_SIZE, None, 0, torch.device("cpu"))
    return evaluation.run(result.model, epoch=0)["accuracy"]
