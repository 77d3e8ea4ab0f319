"""A run that saves: python -m tests.e2e.checkpointed '{"mode": ..., "checkpoint": ...}'. With DiLoCo where async."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import nn

import flodl
from flodl.rank.callbacks import BatchInfo
from tests.e2e import batchnorm

EPOCHS = 3
BATCHES = -(-batchnorm.SAMPLES // batchnorm.BATCH_SIZE)
LOG = "CHECKPOINTED_LOG"
"""The variable that names a file in which every batch trained is noted, one JSON pair a line."""


def note(batch: BatchInfo) -> None:
    with open(os.environ[LOG], "a") as log:
        log.write(f"{json.dumps([batch.epoch, batch.index])}\n")


def parts() -> dict[str, Any]:
    """The entry: Adam, so that there are moments and step counters to be saved."""
    given = {
        **batchnorm.evaluated_parts(),
        "optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
        "model": lambda: nn.Sequential(batchnorm.model(), nn.Linear(5, 5)),
    }
    return {**given, "callbacks": (note,)} if LOG in os.environ else given


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
    return flodl.Trainer(entry="tests.e2e.checkpointed:parts", **chosen)


if __name__ == "__main__":
    print(trainer(**json.loads(sys.argv[1])).run(quiet=True).summary())
