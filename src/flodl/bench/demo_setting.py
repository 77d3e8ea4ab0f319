"""What a demo trains and on which devices: enough to go on with it in another process."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from flodl.bench.workloads import LENET_BATCH_SIZE, lenet_entry
from flodl.datasets.images import FASHION
from flodl.devices.cpu import threads_per_rank
from flodl.plan import DiLoCo
from flodl.records.views import View
from flodl.result import RunResult
from flodl.trainer import Trainer

SAVED_TIMES = 2
"""Checkpoints of a run, about: with many short epochs, one after each would cost more than it is worth."""


@dataclass(frozen=True)
class Recipe:
    """How a data set is trained, alone and together. Chosen by benchmarks/demo_sweep.py."""

    epochs: int
    lr: float
    has_outer: bool = False


RECIPES = {FASHION: Recipe(epochs=2, lr=0.05)}
SMALL_SET = Recipe(epochs=20, lr=0.05)


@dataclass(frozen=True)
class Saving:
    """Where a run writes what it did, and its checkpoints. resume: the newest there, or the named one; None: anew."""

    run_directory: str | None = None
    checkpoint: str | None = None
    resume: bool | str = False


def batches_of(images: int) -> int:
    """In an epoch."""
    return -(-images // LENET_BATCH_SIZE)


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Three emulated devices, the first of them fast. data: the set's name; directory: where it lies, None: built in.

    images: of an epoch. batches: how many a run trains, of LENET_BATCH_SIZE images; the last of an epoch may be short.
    """

    data: str
    directory: str | None
    lr: float
    has_outer: bool
    mode: str
    devices: tuple[str, ...]
    images: int
    batches: int

    @property
    def batches_per_epoch(self) -> int:
        return batches_of(self.images)

    @property
    def samples(self) -> int:
        whole, rest = divmod(self.batches, self.batches_per_epoch)
        return whole * self.images + rest * LENET_BATCH_SIZE

    def train_alone(self, saving: Saving) -> RunResult:
        """The fast device, with the threads that it has beside the others."""
        return self._train("solo", self.devices[:1], saving, None)

    def train_together(self, saving: Saving, view: View | None = None, is_tested: bool = True) -> RunResult:
        """All three."""
        return self._train(self.mode, self.devices, saving, view, is_tested)

    def _train(
        self, mode: str, devices: tuple[str, ...], saving: Saving, view: View | None, is_tested: bool = True
    ) -> RunResult:
        torch.set_num_threads(threads_per_rank(len(self.devices)))
        epochs = -(-self.batches // self.batches_per_epoch)
        return Trainer(
            entry=lenet_entry(self.lr, self.directory, is_tested),
            mode=mode,
            devices=list(devices),
            batch_size=LENET_BATCH_SIZE,
            epochs=epochs,
            samples=self.samples,
            outer=DiLoCo() if self.has_outer and mode != "solo" else None,
            seed=0,
            run_directory=saving.run_directory,
            checkpoint=saving.checkpoint,
            resume=saving.resume,
            overwrite=saving.checkpoint is not None and saving.resume is False,
            checkpoint_every_epochs=max(1, epochs // SAVED_TIMES),
        ).run(view=view, quiet=True)


def accuracy_of(result: RunResult) -> float | None:
    """After the last epoch that was tested."""
    return next((epoch["accuracy"] for epoch in reversed(result.metrics) if "accuracy" in epoch), None)
