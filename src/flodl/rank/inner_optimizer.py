"""The user's optimizer in a rank: what it remembers is taken, put back, and forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from flodl.averaging.layout import DTYPES
from flodl.rank.checks import make_optimizer
from flodl.rank.optimizer_state import SHARED, STEP, OptimizerState
from flodl.rank.parts import Parts

_RATES = ("lr", "initial_lr")
"""Set from the schedule at each step: never part of what an optimizer remembers."""


class InnerOptimizer:
    """`torch` is the optimizer itself. The user's function is called again, for the same model, to forget."""

    def __init__(self, parts: Parts, model: nn.Module) -> None:
        """Raises PlanError where there comes no optimizer that can be used."""
        self._parts = parts
        self._model = model
        # A tied parameter has the first of its names.
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.torch = make_optimizer(parts, model)
        self._made = self._groups()

    @property
    def kind(self) -> str:
        return type(self.torch).__name__

    def take(self, is_copy: bool) -> OptimizerState:
        """is_copy: what the optimizer does afterwards changes nothing in it; else it is only good until the next
        step."""
        taken = OptimizerState(self.kind, groups=self._groups(), made=self._made)
        for place, value in self._remembered():
            if isinstance(value, torch.Tensor) and value.dtype in DTYPES and value.layout == torch.strided:
                taken.tensors[place] = value.detach().clone() if is_copy else value.detach()
            elif value is None or isinstance(value, bool | int | float | str):
                taken.scalars[place] = value
            else:
                taken.left_out.append(place)
        return taken

    def put(self, state: OptimizerState) -> None:
        """Replaces what the optimizer remembers of each parameter that the state knows, and what its steps had changed
        in the groups. Hyperparameters stay those that it was made with."""
        by_name: dict[str, dict[str, Any]] = {}
        for place, value in [*state.tensors.items(), *state.scalars.items()]:
            name, _, key = place.rpartition("/")
            by_name.setdefault(name, {})[key] = value
        for group in self.torch.param_groups:
            keeps_step_here = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                values = by_name.get(self._names.get(id(parameter), ""))
                if values is None:
                    continue
                self.torch.state[parameter] = {
                    key: _placed(value, parameter, key != STEP or keeps_step_here) for key, value in values.items()
                }
        for name, values in by_name.items():
            if name.startswith(SHARED):
                self._put_shared(name.removeprefix(SHARED), values)
        if len(state.groups) == len(self.torch.param_groups):
            for group, then, made in zip(self.torch.param_groups, state.groups, state.made, strict=True):
                _put_changed(group, then, made)

    def forget(self) -> None:
        """As new, but for the learning rate: what it remembers may hold what is not finite."""
        fresh = make_optimizer(self._parts, self._model)
        self.torch.state.clear()
        self.torch.state.update(fresh.state)
        for group, new in zip(self.torch.param_groups, fresh.param_groups, strict=True):
            kept = {key: group[key] for key in ("params", *_RATES) if key in group}
            group.clear()
            group.update(new | kept)
        self.torch.zero_grad(set_to_none=True)

    def _remembered(self) -> Iterator[tuple[str, Any]]:
        """(place, value): "<parameter>/<key>", and "*<name>/<key>" of what belongs to no parameter."""
        state: dict[Any, Any] = self.torch.state
        for owner, values in state.items():
            name = f"{SHARED}{owner}" if isinstance(owner, str) else self._names.get(id(owner))
            if name is None:
                continue
            for key, value in values.items() if isinstance(values, dict) else [("", values)]:
                yield f"{name}/{key}", value

    def _put_shared(self, name: str, values: dict[str, Any]) -> None:
        values = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in values.items()}
        state: dict[Any, Any] = self.torch.state
        state[name] = values[""] if set(values) == {""} else values

    def _groups(self) -> list[dict[str, Any]]:
        groups = []
        for group in self.torch.param_groups:
            plain = {key: _plain(value) for key, value in group.items() if key != "params"}
            plain["params"] = [self._names[id(p)] for p in group["params"] if id(p) in self._names]
            groups.append(plain)
        return groups


def _put_changed(group: dict[str, Any], then: dict[str, Any], made: dict[str, Any]) -> None:
    """What the optimizer's own steps made of its group (a counter, an estimated step size). repr() of an object is
    none of it."""
    for key, value in then.items():
        if key in ("params", *_RATES) or value == made.get(key, _ABSENT):
            continue
        now = group.get(key)
        if isinstance(now, torch.Tensor) and isinstance(value, bool | int | float):
            now.fill_(value)
        elif isinstance(value, list):
            group[key] = tuple(value) if isinstance(now, tuple) else value
        elif not isinstance(value, str) or isinstance(now, str):
            group[key] = value


_ABSENT = object()


def _placed(value: Any, parameter: torch.Tensor, is_beside: bool) -> Any:
    """A copy in the memory format that the optimizer would have given it; step counters may stay on the processor."""
    if not isinstance(value, torch.Tensor):
        return value
    device = parameter.device if is_beside else torch.device("cpu")
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, device=device, requires_grad=False).copy_(value)
    return value.to(device).clone()


def _plain(value: Any) -> Any:
    """A hyperparameter as JSON can say it."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
