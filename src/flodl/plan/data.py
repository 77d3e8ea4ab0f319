"""How the data is cut into batches, and how a process loads them."""

from __future__ import annotations

from dataclasses import dataclass, field

from flodl.plan.limits import Choice, Each, Either, Flag, Maybe, Whole
from flodl.plan.refusal import refused
from flodl.plan.section import Section, setting

MOST_EPOCHS = 1_000_000
"""Every epoch is accounted for from the start, a kilobyte each."""


@dataclass(frozen=True)
class LoaderPlan(Section):
    """The loader of each rank. Give it to the trainer as `loader=LoaderPlan(workers=2)` or `loader={"workers": 2}`."""

    prefix = "loader."

    workers: int = setting(Whole(0, 256), "Loader processes of each rank; 0 loads in the rank itself.", default=0)
    start_method: str = setting(Choice(("fork", "spawn")), "How loader processes are started.", default="fork")
    prefetch: int = setting(Whole(1, 1024), "Batches that each loader process keeps ready.", default=2)
    pin_memory: bool = setting(Flag(), "Copy batches to page-locked memory, for a GPU.", default=False)
    drop_last: bool = setting(
        Flag(), "Leave out the short batch at the end of each epoch; its samples are not trained then.", default=False
    )


@dataclass(frozen=True)
class DataPlan(Section):
    """Batches, epochs and what is compared between ranks. Counts are in samples unless named otherwise."""

    batch_size: int = setting(Whole(1), "Samples in one optimizer step, on every rank.")
    epochs: int = setting(Whole(1, MOST_EPOCHS), "How often the whole data set is trained.", default=1)
    samples: int | None = setting(
        Maybe(Whole(1), "all epochs"), "Stop after so many samples, rounded up to whole batches.", default=None
    )
    micro_batch: int | tuple[int, ...] | None = setting(
        Maybe(Either(Whole(1), Each(Whole(1), "a list with one such number per device")), "the whole batch"),
        "Samples in one forward and backward pass; gradients are accumulated up to batch_size with the same result.",
        default=None,
    )
    check: str = setting(
        Choice(("content", "structure")),
        "What of 16 seeded items must agree between ranks: their bytes, or shapes and types only.",
        default="content",
        name="data_check",
    )
    loader: LoaderPlan = field(default_factory=LoaderPlan)

    def __post_init__(self) -> None:
        super().__post_init__()
        micro = self.micro_batch if isinstance(self.micro_batch, tuple) else (self.micro_batch,)
        if any(size is not None and size > self.batch_size for size in micro):
            raise refused("micro_batch", self.micro_batch, f"at most batch_size, which is {self.batch_size}")

    def samples_per_epoch(self, length: int) -> int:
        """How many samples of a data set of this length one epoch trains."""
        return length - length % self.batch_size if self.loader.drop_last else length

    def batches_per_epoch(self, length: int) -> int:
        """The last batch is short unless it is dropped."""
        return -(-self.samples_per_epoch(length) // self.batch_size)

    def micro_batch_of(self, rank: int) -> int:
        """Samples per forward and backward pass of this rank."""
        if isinstance(self.micro_batch, tuple):
            return self.micro_batch[rank]
        return self.batch_size if self.micro_batch is None else self.micro_batch
