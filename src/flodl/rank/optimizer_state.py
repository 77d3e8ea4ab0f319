"""What an inner optimizer remembers, as named tensors and plain values: taken, written, read, averaged, put back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from flodl.averaging.layout import DTYPES
from flodl.checkpoint.files import FileDigest
from flodl.checkpoint.tensors import TensorEntry, write_tensors
from flodl.errors import CheckpointError

METADATA = "flodl"
STEP = "step"
"""The state key under which torch's optimizers count their steps."""


@dataclass
class OptimizerState:
    """tensors and scalars by "<parameter>/<state key>". kind: the optimizer's class.

    groups: the parameter groups' plain hyperparameters, for readers. left_out: what has no form in a checkpoint.
    """

    kind: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def step_count(self) -> float:
        """The largest step counter; 0 where there is none."""
        counters = [t for name, t in self.tensors.items() if name.endswith(f"/{STEP}") and t.numel() == 1]
        scalars = [v for name, v in self.scalars.items() if name.endswith(f"/{STEP}")]
        return max([float(t) for t in counters] + [float(v) for v in scalars], default=0.0)


def names_of(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, by identity; a tied one has the first of its names."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def take_state(optimizer: torch.optim.Optimizer, names: dict[int, str], is_copy: bool) -> OptimizerState:
    """is_copy: what the optimizer does afterwards changes nothing in it; else it is only good until the next step."""
    taken = OptimizerState(type(optimizer).__name__)
    for parameter, values in optimizer.state.items():
        name = names.get(id(parameter))
        for key, value in values.items() if name is not None else ():
            place = f"{name}/{key}"
            if isinstance(value, torch.Tensor) and value.dtype in DTYPES and value.layout == torch.strided:
                taken.tensors[place] = value.detach().clone() if is_copy else value.detach()
            elif value is None or isinstance(value, bool | int | float | str):
                taken.scalars[place] = value
            else:
                taken.left_out.append(place)
    for group in optimizer.param_groups:
        plain = {key: _plain(value) for key, value in group.items() if key != "params"}
        plain["params"] = [names[id(p)] for p in group["params"] if id(p) in names]
        taken.groups.append(plain)
    return taken


def write_state(path: Path, state: OptimizerState) -> FileDigest:
    """One safetensors file; what is no tensor stands in its metadata as JSON. Raises OSError."""
    values = {"kind": state.kind, "scalars": state.scalars, "groups": state.groups, "left_out": state.left_out}
    entries = [TensorEntry(name, DTYPES[t.dtype], tuple(t.shape)) for name, t in state.tensors.items()]
    flat: dict[str, torch.Tensor] = {}

    def read(entry: TensorEntry, at: int, size: int) -> bytes:
        if entry.name not in flat:
            flat.clear()
            tensor = state.tensors[entry.name].cpu().contiguous()
            flat[entry.name] = tensor.reshape(-1).view(torch.uint8)
        return flat[entry.name][at : at + size].numpy().tobytes()

    return write_tensors(path, entries, {METADATA: json.dumps(values)}, read)


def read_state(path: Path) -> OptimizerState:
    """Raises CheckpointError naming the file."""
    try:
        with safe_open(path, framework="pt") as file:
            values = json.loads((file.metadata() or {})[METADATA])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
        return OptimizerState(values["kind"], tensors, values["scalars"], values["groups"], values["left_out"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} holds no optimizer's state: {error}", path=str(path)) from error


def mean_state(parts: Sequence[tuple[float, OptimizerState]], shapes: Mapping[str, tuple[int, ...]]) -> OptimizerState:
    """What a rank that was not there begins with. parts: (weight, state), at least one; all of one kind.

    Moments (floating tensors of more than one element or of their parameter's shape, as `shapes` gives it) are the
    weighted mean over the parts that have them; step counters and integers the largest; everything else as in the part
    that has made the most steps.
    """
    leader = max((state for _, state in parts), key=OptimizerState.step_count)
    mean = OptimizerState(leader.kind, groups=leader.groups, left_out=leader.left_out)
    for name in _names(state.tensors for _, state in parts):
        there = [(w, state.tensors[name]) for w, state in parts if name in state.tensors]
        parameter, _, key = name.rpartition("/")
        first = there[0][1]
        if any((t.shape, t.dtype) != (first.shape, first.dtype) for _, t in there):
            mean.tensors[name] = leader.tensors.get(name, first)
        elif key == STEP or not first.is_floating_point():
            mean.tensors[name] = torch.stack([t for _, t in there]).amax(dim=0)
        elif first.numel() > 1 or tuple(first.shape) == shapes.get(parameter):
            mean.tensors[name] = _weighted_mean(there)
        else:
            mean.tensors[name] = leader.tensors.get(name, first)
    for name in _names(state.scalars for _, state in parts):
        values = [state.scalars[name] for _, state in parts if name in state.scalars]
        is_counted = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
        mean.scalars[name] = max(values) if is_counted else leader.scalars.get(name, values[0])
    return mean


def put_state(optimizer: torch.optim.Optimizer, names: dict[int, str], state: OptimizerState) -> None:
    """Replaces what the optimizer remembers. Its groups keep the hyperparameters that it was made with."""
    optimizer.state.clear()
    by_name: dict[str, dict[str, Any]] = {}
    for place, value in [*state.tensors.items(), *state.scalars.items()]:
        name, _, key = place.rpartition("/")
        by_name.setdefault(name, {})[key] = value
    for group in optimizer.param_groups:
        keeps_step_here = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            for key, value in by_name.get(names.get(id(parameter), ""), {}).items():
                if isinstance(value, torch.Tensor):
                    value = _placed(value, parameter, key != STEP or keeps_step_here)
                optimizer.state[parameter][key] = value


def _placed(value: torch.Tensor, parameter: torch.Tensor, is_beside: bool) -> torch.Tensor:
    """A copy in the memory format that the optimizer would have given it; step counters may stay on the processor."""
    device = parameter.device if is_beside else torch.device("cpu")
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, device=device, requires_grad=False).copy_(value)
    return value.to(device).clone()


def _weighted_mean(there: Sequence[tuple[float, torch.Tensor]]) -> torch.Tensor:
    """Summed in fp64, in order. Equal weights where those that have it weigh nothing."""
    total = sum(weight for weight, _ in there)
    summed = torch.zeros_like(there[0][1], dtype=torch.float64)
    for weight, tensor in there:
        summed.add_(tensor.double(), alpha=weight / total if total > 0.0 else 1.0 / len(there))
    return summed.to(there[0][1].dtype)


def _names(maps: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for values in maps for name in values))


def _plain(value: Any) -> Any:
    """A hyperparameter as JSON can say it."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
