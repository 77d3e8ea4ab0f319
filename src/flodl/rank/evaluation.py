"""The user's evaluate on the model as it stands, leaving no trace in modes or generators."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from flodl.errors import RunFailed
from flodl.rank.seeds import derive, plant, undisturbed

OWN_NAMES = ("epoch", "samples", "round")
"""What the run itself says of an epoch, beside its loss."""


@dataclass(frozen=True)
class Evaluation:
    """evaluate(model, loader) -> metrics by name. loader: data in order, batches as in training; None without data."""

    evaluate: Callable[[nn.Module, Any], Mapping[str, Any]]
    data: Any
    batch_size: int
    collate: Callable[[list[Any]], Any] | None
    seed: int
    device: torch.device

    def run(self, model: nn.Module, epoch: int) -> dict[str, float]:
        """Metrics as finite or infinite floats. Raises RunFailed where evaluate returns anything else."""
        modes = [(module, module.training) for module in model.modules()]
        with undisturbed(self.device):
            plant(derive(self.seed, "evaluate", epoch), self.device)
            model.eval()
            try:
                with torch.no_grad():
                    metrics = self.evaluate(model, self._loader())
            finally:
                for module, mode in modes:
                    module.training = mode
        return _floats(metrics)

    def _loader(self) -> DataLoader[Any] | None:
        if self.data is None:
            return None
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=False, collate_fn=self.collate)


def _floats(metrics: Any) -> dict[str, float]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise RunFailed(
            f"evaluate returned a {type(metrics).__name__}\nIt must return a dict of numbers: {{'accuracy': 0.9}}."
        )
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if name in OWN_NAMES:
            words = ", ".join(OWN_NAMES)
            raise RunFailed(f"evaluate returned {name!r}, and an epoch's {words} are the run's own\nCall it otherwise.")
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise RunFailed(f"evaluate returned {name!r} = {value!r}\nEach metric must be one number.") from None
    return found


def mean_loss(summed: float, samples: int) -> float:
    """Of an epoch; nan before its first batch."""
    return summed / samples if samples else math.nan
