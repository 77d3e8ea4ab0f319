"""From a batch's place in the run to its contents: read each item, collate, and name the item that cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from flodl.errors import RunFailed
from flodl.rank.leases import Lease
from flodl.rank.order import Order
from flodl.rank.seeds import derive, plant


@dataclass(frozen=True)
class Source:
    """The user's data with what it takes to make a batch of it. Goes to loader processes as a whole."""

    data: Any  # map-style: len() and [k]; __getitems__(list) is used where there is one
    order: Order
    collate: Callable[[list[Any]], Any] | None = None
    worker_init: Callable[[int], None] | None = None

    def batch(self, lease: Lease, indices: list[int]) -> Any:
        """Draws inside (augmentation) follow from the run's seed and the batch's position only.

        Raises RunFailed naming the item, with the user's exception as its cause.
        """
        plant(derive(self.order.seed, "data", self.order.position(lease)))
        items = self._items(indices)
        try:
            return (self.collate or default_collate)(items)
        except Exception as error:
            raise RunFailed(
                f"batch {lease.index} of epoch {lease.epoch} could not be collated: {_words(error)}\n"
                "Give `collate` a function that turns a list of your items into a batch."
            ) from error

    def _items(self, indices: list[int]) -> list[Any]:
        together = getattr(self.data, "__getitems__", None)
        if together is not None:
            try:
                return list(together(indices))
            except Exception as error:
                raise RunFailed(f"data.__getitems__({indices}) raised {_words(error)}\nSee its traceback.") from error
        return [self._item(index) for index in indices]

    def _item(self, index: int) -> Any:
        try:
            return self.data[index]
        except Exception as error:
            raise RunFailed(
                f"data[{index}] raised {_words(error)}\nEvery item from 0 to len(data) - 1 must be readable."
            ) from error


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
