"""What the benchmarks train: entries for Trainer(entry=...), the same in every process."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

BATCH_SIZE = 16
BATCHES_PER_EPOCH = 2000
LENET_BATCH_SIZE = 64
LENET_LR = 0.05
FIRST_STEP = "first step at "
"""What first_step prints before the time, on the clock that all processes share."""


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def _cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def mlp() -> dict[str, Any]:
    """A perceptron of 9,610 parameters on random data: a real step of well under a millisecond."""
    generator = torch.Generator().manual_seed(0)
    count = BATCH_SIZE * BATCHES_PER_EPOCH
    inputs = torch.randn(count, 64, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return {"model": _mlp, "optimizer": _sgd, "loss": _cross_entropy, "data": TensorDataset(inputs, labels)}


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


class _Repeated(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """128,000 samples, of which 2,000 are different: epochs as long as real ones, in little memory."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(2000, 784, generator=generator)
        self._labels = torch.randint(0, 10, (2000,), generator=generator)

    def __len__(self) -> int:
        return 64 * len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[index % 2000], self._labels[index % 2000]


def perceptron() -> dict[str, Any]:
    """669,706 parameters on random data of the size of small images: a real step of some milliseconds."""
    return {"model": _perceptron, "optimizer": _sgd, "loss": _cross_entropy, "data": _Repeated()}


def first_step() -> dict[str, Any]:
    """The small perceptron; each process prints when its first batch begins."""
    told: list[float] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if not told:
            told.append(time.monotonic())
            print(f"{FIRST_STEP}{told[0]:.6f}", flush=True)
        return _cross_entropy(model, batch)

    return {**mlp(), "loss": loss}


class LeNet(nn.Module):
    """LeNet-5 for 28 x 28 images and 10 classes: 61,706 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images N x 1 x 28 x 28, float; returns N x 10 logits."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits


def accuracy(model: nn.Module, loader: Any) -> dict[str, float]:
    """Share of right answers over a loader of (images, labels)."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((model(images).argmax(1) == labels).sum())
            total += len(labels)
    return {"accuracy": right / max(1, total)}


def image_sets(directory: str | None = None) -> tuple[str, TensorDataset, TensorDataset]:
    """(name, training set, test set), images as N x 1 x 28 x 28 floats of mean about 0."""
    from flodl.datasets.images import find_images

    found = find_images(directory)

    def tensors(images: Any, labels: Any) -> TensorDataset:
        scaled = (torch.from_numpy(images.copy()).float().unsqueeze(1) / 255.0 - 0.28) / 0.35
        return TensorDataset(scaled, torch.from_numpy(labels.astype("int64")))

    train = tensors(found.train_images, found.train_labels)
    return found.name, train, tensors(found.test_images, found.test_labels)


def lenet(lr: float = LENET_LR, directory: str | None = None) -> dict[str, Any]:
    """LeNet on real images, tested on others after each epoch. Raises DataError where there are none."""
    _, train, test = image_sets(directory)
    return {
        "model": LeNet,
        "optimizer": functools.partial(torch.optim.SGD, lr=lr, momentum=0.9),
        "loss": _cross_entropy,
        "data": train,
        "evaluate": accuracy,
        "eval_data": test,
    }


def untested_lenet(lr: float = LENET_LR, directory: str | None = None) -> dict[str, Any]:
    """The same, never evaluated: for figures of speed."""
    return {name: part for name, part in lenet(lr, directory).items() if name not in ("evaluate", "eval_data")}


def lenet_entry(lr: float = LENET_LR, directory: str | None = None, is_tested: bool = True) -> str:
    """The entry of `lenet` with these arguments, carried to the ranks by its name: lr in millionths, folder in hex."""
    folder = "" if directory is None else f"_{os.path.abspath(directory).encode().hex()}"
    return f"flodl.bench.workloads:{'' if is_tested else 'untested_'}lenet_{round(1e6 * lr)}{folder}"


def __getattr__(name: str) -> Callable[[], dict[str, Any]]:
    match = re.fullmatch(r"(untested_)?lenet_(\d+)(?:_([0-9a-f]+))?", name)
    if match is None:
        raise AttributeError(name)
    directory = None if match[3] is None else bytes.fromhex(match[3]).decode()
    return functools.partial(untested_lenet if match[1] else lenet, int(match[2]) / 1e6, directory)
