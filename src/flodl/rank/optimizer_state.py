"""What an inner optimizer remembers, as named tensors and plain values: written, read, averaged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from flodl.averaging.layout import DTYPES
from flodl.checkpoint.files import FileDigest
from flodl.checkpoint.tensors import TensorEntry, write_tensors
from flodl.errors import CheckpointError

METADATA = "flodl"
STEP = "step"
"""The state key under which torch's optimizers count their steps."""
SHARED = "*"
"""Begins the names of state that belongs to no parameter."""
_PLAIN = ("kind", "scalars", "groups", "made", "left_out")


@dataclass
class OptimizerState:
    """tensors and scalars by "<parameter>/<state key>". kind: the optimizer's class.

    groups: the parameter groups' plain values; made: those that the optimizer was made with. What its steps changed is
    the difference. left_out: what has no form in a checkpoint.
    """

    kind: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    made: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def step_count(self) -> float:
        """The largest step counter; 0 where there is none."""
        counters = [t for name, t in self.tensors.items() if name.endswith(f"/{STEP}") and t.numel() == 1]
        scalars = [v for name, v in self.scalars.items() if name.endswith(f"/{STEP}")]
        return max([float(t) for t in counters] + [float(v) for v in scalars], default=0.0)


def write_state(path: Path, state: OptimizerState) -> FileDigest:
    """One safetensors file; what is no tensor stands in its metadata as JSON. Raises OSError."""
    values = {name: getattr(state, name) for name in _PLAIN}
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
        return OptimizerState(tensors=tensors, **{name: values[name] for name in _PLAIN})
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} holds no optimizer's state: {error}", path=str(path)) from error


def mean_state(parts: Sequence[tuple[float, OptimizerState]], shapes: Mapping[str, tuple[int, ...]]) -> OptimizerState:
    """What a rank that was not there begins with. parts: (weight, state), at least one; all of one kind.

    Moments (floating tensors of more than one element or of their parameter's shape, as `shapes` gives it) are the
    weighted mean over the parts that have them; step counters and integers the largest; everything else as in the part
    that has made the most steps.
    """
    leader = max((state for _, state in parts), key=OptimizerState.step_count)
    mean = OptimizerState(leader.kind, groups=leader.groups, made=leader.made, left_out=leader.left_out)
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


def _weighted_mean(there: Sequence[tuple[float, torch.Tensor]]) -> torch.Tensor:
    """Summed in fp64, in order. Equal weights where those that have it weigh nothing."""
    total = sum(weight for weight, _ in there)
    summed = torch.zeros_like(there[0][1], dtype=torch.float64)
    for weight, tensor in there:
        summed.add_(tensor.double(), alpha=weight / total if total > 0.0 else 1.0 / len(there))
    return summed.to(there[0][1].dtype)


def _names(maps: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for values in maps for name in values))
