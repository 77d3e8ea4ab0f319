"""How fast this machine's memory is just now: the bound of everything that only moves bytes.

Memory was seen to change between two regimes within minutes, so a bound is measured beside each figure that it judges.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl import native

if TYPE_CHECKING:
    import torch

THREADS = 2
STREAMS = (1, 4)


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second. copy: past the cache; update: in place, both with what is read and what is written; read: only
    read."""

    copy: float
    update: float
    read: float

    @property
    def words(self) -> str:
        """For a row's note."""
        return f"copy {self.copy / 1e9:.1f}, in place {self.update / 1e9:.1f}, read {self.read / 1e9:.1f} GB/s"

    def seconds(self, copied: float, updated: float = 0.0, read: float = 0.0) -> float:
        """The least time for so many bytes of traffic of each kind. read: those of both kinds that are read.

        Half of a copy's traffic is writes, taken beside the reads: what mostly reads is bound by its reads.
        """
        return max(copied / self.copy + updated / self.update, read / self.read)

    def best(self, other: Bandwidth) -> Bandwidth:
        """Of two measurements, the faster of each kind."""
        return Bandwidth(max(self.copy, other.copy), max(self.update, other.update), max(self.read, other.read))


def median_of(measured: Sequence[Bandwidth]) -> Bandwidth:
    """The median of each kind. measured: one or more."""
    kinds = zip(*((each.copy, each.update, each.read) for each in measured), strict=True)
    copy, update, read = map(statistics.median, kinds)
    return Bandwidth(copy, update, read)


def measure_bandwidth(a: torch.Tensor, b: torch.Tensor, threads: int = THREADS) -> Bandwidth:
    """One pass of each kind with 1 and with 4 streams, the better of both. Overwrites a with b; a keeps b's values."""
    size = a.numel() * a.element_size()

    def best(kind: str, source: torch.Tensor | None) -> float:
        return size / min(native.stream_probe(kind, a, source, threads=threads, streams=streams) for streams in STREAMS)

    return Bandwidth(copy=2.0 * best("copy", b), update=2.0 * best("update", None), read=best("read", None))
