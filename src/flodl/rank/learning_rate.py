"""The learning rate at a position, whichever way the user wrote the schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from flodl.errors import PlanError, RunFailed
from flodl.plan.refusal import refused

ALLOWED = "position in samples -> finite factor of 0 or more, or optimizer -> torch LRScheduler"

_CYCLED = ("momentum", "betas")
"""What torch's schedulers set beside the learning rate."""


class Schedule:
    """Sets the rates of an optimizer's groups for one batch at a time, in any order of batches."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._made = [float(group["lr"]) if "lr" in group else None for group in self._groups]

    def set(self, position: int) -> float:
        """For the batch at this position, in samples. Returns the first group's factor on the rate it was made with.

        Raises PlanError for a schedule that has no rate there, RunFailed where the optimizer has other groups now.
        """
        if len(self._groups) != len(self._made):
            raise RunFailed(
                f"the optimizer has {len(self._groups)} parameter groups, and was made with {len(self._made)}\n"
                "Give it all of them in the function that makes it."
            )
        return self._set(position)

    def check(self, position: int) -> None:
        """Raises PlanError where set() would, and sets nothing."""

    def _set(self, position: int) -> float:
        return 1.0

    def _set_rate(self, group: dict[str, Any], rate: float) -> None:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def make_schedule(scheduler: Any, optimizer: Optimizer, batch_size: int, samples_per_epoch: int) -> Schedule:
    """The rates of this optimizer. Raises PlanError, also when they are set.

    A function that takes a number is asked at each position itself; every group's rate is that factor on its own. A
    torch factory is given an optimizer like the user's, with the same groups, rates and momenta and parameters of its
    own, and stepped once per batch of the run: the rates and momenta that the scheduler sets there are the user's.
    """
    if scheduler is None:
        return Schedule(optimizer)
    _refuse_driven_by_metrics(scheduler)
    if isinstance(scheduler, LRScheduler):
        raise refused("scheduler", scheduler, ALLOWED, why="it is a scheduler, not a function that makes one")
    if isinstance(scheduler, type) and issubclass(scheduler, LRScheduler):
        try:
            return _Stepped(scheduler, optimizer, batch_size, samples_per_epoch)
        except TypeError as error:
            why = f"called with an optimizer alone it raised {error!r}"
            raise refused("scheduler", scheduler, ALLOWED, why=why) from error
    try:
        first = scheduler(0)
    except Exception as as_function:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _Stepped(scheduler, optimizer, batch_size, samples_per_epoch)
        except PlanError:
            raise
        except Exception as as_factory:
            why = f"as a function of the position it raised {as_function!r}, as one of an optimizer {as_factory!r}"
            raise refused("scheduler", scheduler, ALLOWED, why=why) from as_function
    _factor(first, 0)
    return _Factors(scheduler, optimizer)


class _Factors(Schedule):
    """A function of the position."""

    def __init__(self, function: Callable[[int], Any], optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._function = function

    def check(self, position: int) -> None:
        _factor(self._function(position), position)

    def _set(self, position: int) -> float:
        factor = _factor(self._function(position), position)
        for group, made in zip(self._groups, self._made, strict=True):
            if made is not None:
                self._set_rate(group, made * factor)
        return factor


class _Stepped(Schedule):
    """A torch scheduler: what it has set so far, one entry per batch, grown as later positions are asked for."""

    def __init__(
        self, factory: Callable[[Any], Any], optimizer: Optimizer, batch_size: int, samples_per_epoch: int
    ) -> None:
        super().__init__(optimizer)
        self._batch_size = batch_size
        self._samples_per_epoch = samples_per_epoch
        self._batches_per_epoch = -(-samples_per_epoch // batch_size)
        self._shadow = _Shadow(optimizer)
        made = factory(self._shadow)
        _refuse_driven_by_metrics(made)
        if not isinstance(made, LRScheduler):
            raise refused("scheduler", factory, ALLOWED, why=f"it returned {type(made).__name__} for an optimizer")
        self._scheduler = made
        self._cycled = [{key: group[key] for key in _CYCLED if key in group} for group in self._groups]
        self._moved: set[str] = set()
        self._values = [self._look()]

    def check(self, position: int) -> None:
        self._at(position)

    def _set(self, position: int) -> float:
        found = self._at(position)
        for group, values in zip(self._groups, found, strict=True):
            self._set_rate(group, values["lr"])
            group.update({key: values[key] for key in self._moved if key in values})
        first = self._made[0]
        return float(found[0]["lr"] / first if first else found[0]["lr"])

    def _at(self, position: int) -> list[dict[str, Any]]:
        epoch, within = divmod(position, self._samples_per_epoch)
        batch = epoch * self._batches_per_epoch + within // self._batch_size
        while len(self._values) <= batch:
            self._step()
        for values in self._values[batch]:
            _factor(values["lr"], position)
        return self._values[batch]

    def _step(self) -> None:
        self._shadow.step()
        try:
            self._scheduler.step()
        except Exception as error:  # OneCycleLR, past its total_steps
            why = f"{type(self._scheduler).__name__} fails at batch {len(self._values)} of the run: {error}"
            raise refused("scheduler", self._scheduler, ALLOWED, why=why) from error
        self._values.append(self._look())

    def _look(self) -> list[dict[str, Any]]:
        """What the scheduler has set: by group, the rate and what it cycles."""
        values = []
        for group, made in zip(self._shadow.param_groups, self._cycled, strict=True):
            values.append({"lr": float(group["lr"]), **{key: group[key] for key in made}})
            self._moved.update(key for key, value in made.items() if group[key] != value)
        return values


class _Shadow(Optimizer):
    """An optimizer like another, group by group, whose steps do nothing."""

    def __init__(self, like: Optimizer) -> None:
        groups = []
        for group in like.param_groups:
            values = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in group.items()}
            groups.append({**values, "params": [torch.zeros(1, requires_grad=True)]})
        super().__init__(groups, dict(like.defaults))

    def step(self, closure: Any = None) -> Any:
        """Counted by the scheduler."""


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
