"""The learning rate's factor at a position, whichever way the user wrote the schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from flodl.errors import PlanError
from flodl.plan.refusal import refused

ALLOWED = "position in samples -> finite factor of 0 or more, or optimizer -> torch LRScheduler"


def make_schedule(scheduler: Any, batch_size: int, samples_per_epoch: int) -> Callable[[int], float]:
    """position in samples -> the factor of every group's learning rate. Raises PlanError, also when it is called.

    A function that takes a number is asked at each position itself. A torch factory is given an optimizer of its own
    with learning rate 1 and momentum, and stepped once per batch of the run: whatever learning rate the scheduler sets
    there is the factor, so a scheduler of absolute rates (OneCycleLR's max_lr, CosineAnnealingLR's eta_min) counts them
    in units of the optimizer's own rate. What it does to the momentum is not taken over.
    """
    if scheduler is None:
        return lambda position: 1.0
    _refuse_driven_by_metrics(scheduler)
    if isinstance(scheduler, LRScheduler):
        raise refused("scheduler", scheduler, ALLOWED, why="it is a scheduler, not a function that makes one")
    if isinstance(scheduler, type) and issubclass(scheduler, LRScheduler):
        try:
            return _Stepped(scheduler, batch_size, samples_per_epoch)
        except TypeError as error:
            why = f"called with an optimizer alone it raised {error!r}"
            raise refused("scheduler", scheduler, ALLOWED, why=why) from error
    try:
        first = scheduler(0)
    except Exception as error:
        return _stepped_or_refused(scheduler, error, batch_size, samples_per_epoch)
    _factor(first, 0)
    return lambda position: _factor(scheduler(position), position)


class _Stepped:
    """A torch scheduler as a function: its rates so far, one per batch, grown as later positions are asked for."""

    def __init__(self, factory: Callable[[Any], Any], batch_size: int, samples_per_epoch: int) -> None:
        self._batch_size = batch_size
        self._samples_per_epoch = samples_per_epoch
        self._batches_per_epoch = -(-samples_per_epoch // batch_size)
        self._optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
        made = factory(self._optimizer)
        _refuse_driven_by_metrics(made)
        if not isinstance(made, LRScheduler):
            raise refused("scheduler", factory, ALLOWED, why=f"it returned {type(made).__name__} for an optimizer")
        self._scheduler = made
        self._rates = [self._rate()]

    def __call__(self, position: int) -> float:
        epoch, within = divmod(position, self._samples_per_epoch)
        batch = epoch * self._batches_per_epoch + within // self._batch_size
        while len(self._rates) <= batch:
            self._step()
        return _factor(self._rates[batch], position)

    def _step(self) -> None:
        self._optimizer.step()
        try:
            self._scheduler.step()
        except Exception as error:  # OneCycleLR, past its total_steps
            why = f"{type(self._scheduler).__name__} fails at batch {len(self._rates)} of the run: {error}"
            raise refused("scheduler", self._scheduler, ALLOWED, why=why) from error
        self._rates.append(self._rate())

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def _stepped_or_refused(
    scheduler: Callable[[Any], Any], as_function: Exception, batch_size: int, samples_per_epoch: int
) -> _Stepped:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Stepped(scheduler, batch_size, samples_per_epoch)
    except PlanError:
        raise
    except Exception as as_factory:
        why = f"as a function of the position it raised {as_function!r}, as one of an optimizer {as_factory!r}"
        raise refused("scheduler", scheduler, ALLOWED, why=why) from as_function


def _refuse_driven_by_metrics(made: object) -> None:
    kind = made if isinstance(made, type) else type(made)
    if issubclass(kind, ReduceLROnPlateau):
        why = "it is driven by a metric, which exists only after the batches that it would have to slow down"
        raise refused("scheduler", made, ALLOWED, why=why)


def _factor(value: Any, position: int) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    try:
        factor = math.nan if isinstance(value, bool | str) else float(cast(float, value))
    except (TypeError, ValueError):
        factor = math.nan
    if not math.isfinite(factor) or factor < 0.0:
        raise refused("scheduler", value, ALLOWED, why=f"that is the factor it gave at position {position}")
    return factor
