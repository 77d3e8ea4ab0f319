"""A small convolutional model with BatchNorm and dropout: buffers, shared statistics, random numbers in every step."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from flodl.plan import role
from flodl.rank.callbacks import BatchInfo

SAMPLES = 490
BATCH_SIZE = 8
MORTAL = 1
"""The rank that is killed. The others wait for its next life some steps later, so that it comes back before the end."""
KILLED = "killed"
"""In the run directory from the kill on."""

STEPS_WITHOUT = 10
LONGEST_WAIT_S = 50.0


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(144, 5)
    )


def loss(network: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(network(batch[0]), batch[1])


def parts() -> dict[str, Any]:
    """The entry of the tests that compare a run with the reference."""
    draw = torch.Generator().manual_seed(5)
    images = torch.randn(SAMPLES, 1, 8, 8, generator=draw) * 2.0 + 1.0
    labels = torch.randint(0, 5, (SAMPLES,), generator=draw)
    return {
        "model": model,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "loss": loss,
        "data": TensorDataset(images, labels),
        "scheduler": lambda position: 1.0 / (1.0 + position / 400.0),
    }


def evaluate(network: nn.Module, loader: Any) -> dict[str, float]:
    """Draws and adds up, so that it would disturb a run that let it."""
    hits = sum((network(images).argmax(1) == labels).sum().item() for images, labels in loader)
    return {"accuracy": hits / SAMPLES, "draw": float(torch.rand(()))}


def evaluated_parts() -> dict[str, Any]:
    """The same with an evaluation."""
    chosen = parts()
    return {**chosen, "evaluate": evaluate, "eval_data": chosen["data"]}


def mortal_parts() -> dict[str, Any]:
    """With an evaluation, for a run in which one rank is killed by the test."""
    mine = role()
    if mine is None:
        return evaluated_parts()
    chosen, lives, killed = evaluated_parts(), Path(mine.run_directory, "lives"), Path(mine.run_directory, KILLED)
    without = itertools.count(1)

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The last of the slow things that a rank does before it joins."""
        made = chosen["optimizer"](parameters)
        if mine.rank == MORTAL:
            with open(lives, "ab") as file:
                file.write(b".")
        return made

    def wait(batch: BatchInfo) -> None:
        if batch.rank == MORTAL or not killed.exists() or next(without) != STEPS_WITHOUT:
            return
        ends = time.monotonic() + LONGEST_WAIT_S
        while len(lives.read_bytes()) < 2:
            if time.monotonic() > ends:
                raise TimeoutError("the rank that was killed did not come back")
            time.sleep(0.005)

    return {**chosen, "optimizer": optimizer, "callbacks": (wait,)}
