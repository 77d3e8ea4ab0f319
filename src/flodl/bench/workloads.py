"""What the benchmarks train: entries for Trainer(entry=...), the same in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH_SIZE = 16
BATCHES_PER_EPOCH = 2000
LENET_BATCH_SIZE = 64


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


def lenet() -> dict[str, Any]:
    """LeNet on real images."""
    _, train, test = image_sets()
    return {
        "model": LeNet,
        "optimizer": _sgd,
        "loss": _cross_entropy,
        "data": train,
        "evaluate": accuracy,
        "eval_data": test,
    }
