"""Which samples a batch holds: an epoch is one seeded permutation cut into batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flodl.rank.leases import Lease
from flodl.rank.seeds import derive

EPOCHS_KEPT = 2


@dataclass
class Order:
    """length: of the data set. samples_per_epoch: fewer than length where the short last batch is dropped."""

    seed: int
    length: int
    batch_size: int
    samples_per_epoch: int
    _kept: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.samples_per_epoch // self.batch_size)

    def position(self, lease: Lease) -> int:
        """Samples that come before this batch in the run: it belongs to the batch whoever trains it, and whenever."""
        return lease.epoch * self.samples_per_epoch + lease.index * self.batch_size

    def samples(self, lease: Lease) -> int:
        """How many samples this batch holds; the last of an epoch may be short."""
        return min(self.batch_size, self.samples_per_epoch - lease.index * self.batch_size)

    def indices(self, lease: Lease) -> list[int]:
        """Items of the data set, in the order in which they are collated."""
        start = lease.index * self.batch_size
        return self._permutation(lease.epoch)[start : start + self.samples(lease)].tolist()

    def _permutation(self, epoch: int) -> torch.Tensor:
        found = self._kept.get(epoch)
        if found is None:
            generator = torch.Generator().manual_seed(derive(self.seed, "order", epoch))
            found = torch.randperm(self.length, generator=generator)
            self._kept[epoch] = found
            while len(self._kept) > EPOCHS_KEPT:
                self._kept.pop(min(self._kept))
        return found
