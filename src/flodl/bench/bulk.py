"""A model that is nothing but parameters: what a round costs, without a training step that hides it.

Entries for Trainer(entry=...) by name: `bulk_190000000` has that many parameters in 50 tensors and a loss that touches
sixteen more; `bulk_with_gradients_190000000` has gradients of all of them, as a real model does.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

TENSORS = 50
ITEMS = 4096
_TOUCHED = 16
_M_MMAP_THRESHOLD = -3


class Bulk(nn.Module):
    """count fp32 parameters in 50 tensors, all trained, beside a head of sixteen."""

    def __init__(self, count: int) -> None:
        super().__init__()
        cut = -(-count // TENSORS)
        sizes = [min(cut, count - start) for start in range(0, count, cut)]
        self.body = nn.ParameterList(nn.Parameter(torch.full((size,), 0.01)) for size in sizes)
        self.head = nn.Parameter(torch.full((_TOUCHED,), 0.01))


def _touch_head(model: nn.Module, batch: Any) -> torch.Tensor:
    assert isinstance(model, Bulk)
    return (model.head * batch[0].mean()).sum()


def _touch_all(model: nn.Module, batch: Any) -> torch.Tensor:
    assert isinstance(model, Bulk)
    return _touch_head(model, batch) + 1e-9 * torch.stack([tensor.sum() for tensor in model.body]).sum()


def _return_freed_memory() -> None:
    """Tells the C library to give back what large tensors leave, so that a process is seen to hold what it uses."""
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _build(loss: Callable[[nn.Module, Any], torch.Tensor], count: int) -> dict[str, Any]:
    """One sample is one batch; the optimizer keeps no state."""
    _return_freed_memory()
    return {
        "model": functools.partial(Bulk, count),
        "optimizer": functools.partial(torch.optim.SGD, lr=1e-4),
        "loss": loss,
        "data": TensorDataset(torch.ones(ITEMS, 1)),
    }


def entry_of(count: int, has_gradients: bool = False) -> str:
    """The entry with so many parameters."""
    return f"flodl.bench.bulk:bulk_{'with_gradients_' if has_gradients else ''}{count}"


def __getattr__(name: str) -> Callable[[], dict[str, Any]]:
    for prefix, loss in (("bulk_with_gradients_", _touch_all), ("bulk_", _touch_head)):
        number = name.removeprefix(prefix)
        if number != name and number.isdecimal():
            return functools.partial(_build, loss, int(number))
    raise AttributeError(name)
