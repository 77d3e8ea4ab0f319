"""A run that saves: python -m tests.e2e.checkpointed '{"mode": ..., "checkpoint": ...}'. With DiLoCo where async."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flodl
from flodl.plan import role
from flodl.rank.callbacks import BatchInfo
from tests.e2e import batchnorm

EPOCHS = 3
BATCHES = -(-batchnorm.SAMPLES // batchnorm.BATCH_SIZE)
ALONE = "CHECKPOINTED_DIRECTORY"
LOG = "log"
"""In the run directory: each rank notes the digest of the state that it begins with (a JSON string a line), and every
batch trained (a pair)."""


class Notes:
    """What one process writes into the log of its run."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory, LOG)
        self._has_begun = False

    def _write(self, entry: str | list[int]) -> None:
        with open(self._path, "a") as log:
            log.write(f"{json.dumps(entry)}\n")

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if not self._has_begun:
            self._has_begun = True
            self._write(digest_of(model))
        return batchnorm.loss(model, batch)

    def batch(self, batch: BatchInfo) -> None:
        self._write([batch.epoch, batch.index])


def digest_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def parts() -> dict[str, Any]:
    """The entry: Adam, so that there are moments and step counters to be saved."""
    return {
        **batchnorm.evaluated_parts(),
        "optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
        "model": lambda: nn.Sequential(batchnorm.model(), nn.Linear(5, 5)),
    }


def noted_parts() -> dict[str, Any]:
    """The same with notes. A run on one device trains in the process that calls it, which says where to write."""
    mine = role()
    notes = Notes(mine.run_directory if mine is not None else os.environ[ALONE])
    return {**parts(), "loss": notes.loss, "callbacks": (notes.batch,)}


def trainer(**settings: Any) -> flodl.Trainer:
    """Three unequal ranks unless the settings say otherwise."""
    base: dict[str, Any] = {
        "mode": "cpu-cadence",
        "devices": ["emulated:4ms", "emulated:9ms", "emulated:13ms"],
        "batch_size": batchnorm.BATCH_SIZE,
        "epochs": EPOCHS,
        "seed": 3,
        "anchor": 4,
    }
    chosen = base | settings
    if chosen["mode"] == "cpu-async":
        chosen.setdefault("outer", flodl.DiLoCo(lr=0.7, momentum=0.9, min_window=2))
    chosen.setdefault("entry", "tests.e2e.checkpointed:parts")
    return flodl.Trainer(**chosen)


if __name__ == "__main__":
    print(trainer(**json.loads(sys.argv[1])).run(quiet=True).summary())
