"""What users give by mistake or for good reasons: entries for runs of two ranks, one per case."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import TensorDataset, get_worker_info

from flodl.plan import role

SAMPLES = 48
BATCH_SIZE = 4
BATCHES = SAMPLES // BATCH_SIZE
LAST = SAMPLES - 1
COUNTED = ("float16", "bfloat16", "float32", "float64", "int8", "int64")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)


def points() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, 3, generator=draw), torch.randn(SAMPLES, 2, generator=draw))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def parts(**changes: Any) -> dict[str, Any]:
    base = {"model": Net, "optimizer": lambda p: torch.optim.SGD(p, lr=0.01), "loss": loss, "data": points()}
    return base | changes


class Odd(Net):
    """Tied, 0-dim, empty, strided and lazy parameters of every floating type; buffers that every forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(3, 2)
        self.tied.weight = self.line.weight
        self.lazy = nn.LazyLinear(2)
        self.lazy(torch.zeros(1, 3))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.strided = nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16).t())
        self.half_offset = nn.Parameter(torch.zeros(2, dtype=torch.float16))
        self.whole = nn.Parameter(torch.arange(3), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        for name in COUNTED:
            self.register_buffer(f"{name}_count", torch.zeros(2, dtype=getattr(torch, name)))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("limit", torch.full((2,), -math.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in [f"{name}_count" for name in COUNTED]:
            setattr(self, name, getattr(self, name) + 1)
        self.seen = ~self.seen | True
        rest = self.strided.float().mean() + self.empty.sum() + self.half_offset.float()
        return (self.line(x) + self.tied(x) + self.lazy(x)) * self.scale.float() + rest


def odd() -> dict[str, Any]:
    return parts(model=Odd)


def _wrapped() -> nn.Module:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(Net())


def wrapped() -> dict[str, Any]:
    return parts(model=_wrapped)


class NotFinite:
    """The loss of rank 1 is NaN: always, or in its second batch."""

    def __init__(self, is_always: bool) -> None:
        self._is_always = is_always
        self._batches = 0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self._batches += 1
        mine = role()
        is_hit = mine is not None and mine.rank == 1 and (self._is_always or self._batches == 2)
        return loss(model, batch) * (math.nan if is_hit else 1.0)


def always_nan() -> dict[str, Any]:
    return parts(loss=NotFinite(is_always=True))


def once_nan() -> dict[str, Any]:
    return parts(loss=NotFinite(is_always=False))


class Torn:
    """Item LAST cannot be read by a loader process."""

    def flodl_signature(self) -> str:
        """The comparison of data between ranks, which reads items in the rank itself, shall not be what fails."""
        return "torn"

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == LAST and get_worker_info() is not None:
            self.fail()
        return torch.full((3,), index / SAMPLES), torch.ones(2)

    def fail(self) -> None:
        raise ValueError("torn")


class Fatal(Torn):
    """Reading item LAST kills the loader process that does it, once in the run."""

    def __init__(self) -> None:
        mine = role()  # of the rank: a loader process has none
        self._mark = None if mine is None else Path(mine.run_directory, "killed")

    def fail(self) -> None:
        assert self._mark is not None
        if not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def torn() -> dict[str, Any]:
    return parts(data=Torn())


def fatal() -> dict[str, Any]:
    return parts(data=Fatal())
