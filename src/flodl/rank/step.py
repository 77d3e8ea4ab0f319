"""One training step: seeds, learning rate, forward and backward in pieces, clipping, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flodl.rank.checks import check_loss
from flodl.rank.learning_rate import Schedule
from flodl.rank.leases import Lease
from flodl.rank.micro_batches import split
from flodl.rank.order import Order
from flodl.rank.seeds import derive, plant


@dataclass(frozen=True)
class StepSettings:
    """micro_batch in samples. schedule: of the optimizer's groups."""

    order: Order
    micro_batch: int
    clip_grad_norm: float | None
    schedule: Schedule
    device: torch.device


class Step:
    """Trains one batch. The same for a run alone and for a rank, at any place and time."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[nn.Module, Any], torch.Tensor],
        settings: StepSettings,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._settings = settings
        self.factor = 1.0  # of the learning rate, at the last batch
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def train(self, lease: Lease, batch: Any) -> float:
        """The batch's mean loss before the step. Dropout and the like follow from the seed and the batch's position.

        Gradients of pieces are weighted by their samples, so that they add up to the gradient of the batch's mean loss.
        """
        order = self._settings.order
        position = order.position(lease)
        plant(derive(order.seed, "step", position), self._settings.device)
        self.factor = self._settings.schedule.set(position)
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for piece, share in split(batch, order.samples(lease), self._settings.micro_batch):
            loss = check_loss(self._loss(self._model, piece))
            (loss if share == 1.0 else loss * share).backward()
            total += share * float(loss.detach())
        if self._settings.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._trained, self._settings.clip_grad_norm)
        self._optimizer.step()
        return total
