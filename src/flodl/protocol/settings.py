"""What the controller needs to know of a plan: plain values, checked by the plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flodl.protocol.messages import BatchRange, DataSpec, LayoutSpec

SHORTEST_START_S = 60.0


@dataclass(frozen=True)
class SaveSettings:
    """Where and how often this run saves. directory: absolute. first_number: added to a round's number for its name."""

    directory: str
    run: str
    every_epochs: int = 1
    first_number: int = 0


@dataclass(frozen=True)
class Beginning:
    """What a run goes on from. round: counted through all runs before this one.

    epochs: (sum of loss · samples, samples, closing round or None, metrics), in order. ms: per batch and rank, of the
    ranks that are what they were.
    """

    path: str
    round: int
    layout: LayoutSpec
    data: DataSpec
    contributed: tuple[BatchRange, ...] = ()
    quarantined: tuple[tuple[int, int], ...] = ()
    epochs: tuple[tuple[float, int, int | None, dict[str, float]], ...] = ()
    anchor: int = 10
    ms: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ControllerSettings:
    """One run on one host. Times in seconds; sizes in samples or batches as named."""

    world_size: int
    mode: str  # cpu-sync, cpu-cadence, cpu-async
    dataset_length: int
    batch_size: int
    epochs: int
    samples: int | None = None  # stop once this many samples are contributed (rounded up to whole batches)
    anchor: int = 10
    overhead_target: float = 0.02
    guard: str | None = "level"
    is_elastic: bool = False  # ranks mix the average in and keep a spread, instead of taking it over
    max_ratio: float = 64.0
    gamma: float = 1.0
    respawn: int = 3
    max_failures: int | float | None = None
    stall_s: float | None = None
    start_limit_s: float = SHORTEST_START_S  # a process silent for so long before it introduces itself is evicted
    prefetch: int = 2
    evaluates: bool = False
    eval_rank: int | None = None
    outer_min_window: int = 0  # mean batches per rank and window below which the window is stretched; 0: no outer step
    plan: dict[str, Any] = field(default_factory=dict)
    saves: SaveSettings | None = None
    beginning: Beginning | None = None

    @property
    def batches_per_epoch(self) -> int:
        """The last batch of an epoch may be short."""
        return -(-self.dataset_length // self.batch_size)

    def samples_of(self, index: int) -> int:
        """How many samples batch `index` of an epoch holds."""
        return min(self.batch_size, self.dataset_length - index * self.batch_size)
