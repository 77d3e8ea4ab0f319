"""From leases to batches on the rank's device, read in this process or ahead in others."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils import pin_memory

from flodl.plan.data import LoaderPlan
from flodl.rank.items import Source
from flodl.rank.leases import Lease
from flodl.rank.loader import LoaderPool


class Fed(NamedTuple):
    """A batch, and how long the rank waited for it."""

    batch: Any
    data_ms: float


class Feed:
    """Never waits for anything but the batch it was asked for. close() ends loader processes."""

    def __init__(self, source: Source, plan: LoaderPlan, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._pins = plan.pin_memory and device.type == "cuda"
        self._pool = LoaderPool(source, plan) if plan.workers else None

    def follow(self, upcoming: Iterable[Lease]) -> None:
        """The leases held, in order: loader processes read ahead along them and drop what is no longer held."""
        if self._pool is not None:
            self._pool.follow(upcoming)

    def take(self, lease: Lease) -> Fed:
        """The batch of this lease, on the device. Raises RunFailed naming the item that could not be read."""
        started = time.perf_counter()
        if self._pool is not None:
            batch = self._pool.take(lease)
        else:
            batch = self._source.batch(lease, self._source.order.indices(lease))
        if self._device.type != "cpu":
            batch = to_device(pin_memory.pin_memory(batch) if self._pins else batch, self._device, self._pins)
        return Fed(batch, 1e3 * (time.perf_counter() - started))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def to_device(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Every tensor of the structure on the device; anything else as it is."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if isinstance(batch, Mapping):
        return {key: to_device(part, device, non_blocking) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(part, device, non_blocking) for part in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(part, device, non_blocking) for part in batch)
    return batch
