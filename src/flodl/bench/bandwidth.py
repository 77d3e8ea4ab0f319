"""How fast this machine's memory is just now: the bound of everything that only moves bytes.

Memory was seen to change between two regimes within minutes, so a bound is measured beside each figure that it judges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flodl import native

if TYPE_CHECKING:
    import torch

THREADS = 2
STREAMS = (1, 4)
PASSES = 2
"""Of each kind and number of streams. Whoever is compared with the best of them takes the best of as many."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second, read and written counted. copy: past the cache; update: read and written back in place."""

    copy: float
    update: float

    def seconds(self, copied: float, updated: float = 0.0) -> float:
        """The least time for so many bytes of traffic of each kind."""
        return copied / self.copy + updated / self.update

    def best(self, other: Bandwidth) -> Bandwidth:
        """Of two measurements, the faster of each kind."""
        return Bandwidth(max(self.copy, other.copy), max(self.update, other.update))


def measure_bandwidth(a: torch.Tensor, b: torch.Tensor, threads: int = THREADS, passes: int = PASSES) -> Bandwidth:
    """With 1 and 4 streams, the best of all. Overwrites a with b; a keeps b's values."""
    size = a.numel() * a.element_size()

    def best(kind: str, source: torch.Tensor | None) -> float:
        times = [
            native.stream_probe(kind, a, source, threads=threads, streams=streams)
            for _ in range(passes)
            for streams in STREAMS
        ]
        return 2.0 * size / min(times)

    return Bandwidth(copy=best("copy", b), update=best("update", None))
