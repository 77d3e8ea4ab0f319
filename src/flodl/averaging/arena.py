"""One flat memory in which the tensors of a model live, and how they are kept there."""

from __future__ import annotations

import mmap
import warnings

import torch

from flodl import native
from flodl.averaging.layout import ModelLayout, Place, Slot
from flodl.errors import RunFailed


def tensor_over(memory: native.SharedMemory, offset: int, size: int) -> torch.Tensor:
    """Bytes [offset, offset + size) of shared memory as a uint8 tensor with a mapping of its own.

    It stays valid after `memory` is gone, and torch knows it as shared, so that share_memory() does not move it away.
    """
    whole = torch.from_file(f"/proc/self/fd/{memory.descriptor}", shared=True, size=memory.size, dtype=torch.uint8)
    return whole[offset : offset + size]


def private_bytes(size: int) -> torch.Tensor:
    """Page-aligned zeros that only this process sees."""
    page = mmap.PAGESIZE
    raw = torch.zeros(size + page, dtype=torch.uint8)
    start = -raw.data_ptr() % page
    return raw[start : start + size]


class Arena:
    """Every slot of a layout as a view of one memory. Ownership: the arena keeps the memory; the model keeps views.

    Writes to the arena from outside torch do not bump version counters: they are made only between an optimizer step
    and the next forward pass, when no graph is alive.
    """

    def __init__(self, layout: ModelLayout, memory: torch.Tensor) -> None:
        """memory: uint8, layout.spec.bytes long, 64-byte aligned. Moves every tensor of the layout into it."""
        self._layout = layout
        self.memory = memory
        self._views = [self._view(slot) for slot in layout.slots]
        self._homes = [[slot.tensor for _ in slot.places] for slot in layout.slots]
        self._warned: set[str] = set()
        for index, slot in enumerate(layout.slots):
            self._homes[index] = [_present(place) for place in slot.places]
            self._views[index].copy_(slot.tensor.detach())
            for home in self._homes[index]:
                home.data = self._views[index]

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def gather_strays(self) -> None:
        """Brings back what left: rebound buffers silently, parameters with one warning each.

        A parameter object that was replaced (load_state_dict(assign=True)) gets its old object back with the new
        value, because the optimizer holds the old one. Raises RunFailed naming a tensor that changed shape or dtype.
        """
        for slot, view, homes in zip(self._layout.slots, self._views, self._homes, strict=True):
            for place, home in zip(slot.places, homes, strict=True):
                found = place.tensor()
                if found is not home or found.data_ptr() != view.data_ptr() or found.stride() != view.stride():
                    self._bring_back(place, home, view)

    def _view(self, slot: Slot) -> torch.Tensor:
        return self.memory[slot.offset : slot.offset + slot.bytes].view(slot.tensor.dtype).view(slot.tensor.shape)

    def _bring_back(self, place: Place, home: torch.Tensor, view: torch.Tensor) -> None:
        found = place.tensor()
        if found is None:
            raise RunFailed(
                f"{place.path} was removed from the model while it was trained\nKeep what travels in place."
            )
        if found.shape != view.shape or found.dtype != view.dtype or found.device != view.device:
            raise RunFailed(
                f"{place.path} changed from {view.dtype} {list(view.shape)} on {view.device} to {found.dtype} "
                f"{list(found.shape)} on {found.device} while it was trained\n"
                "Change shapes, dtypes and devices in the function that builds the model."
            )
        if found.data_ptr() != view.data_ptr():
            view.copy_(found.detach())
        table = place.module._parameters if place.is_parameter else place.module._buffers
        home.data = view
        table[place.name] = home  # type: ignore[assignment]
        if place.is_parameter and place.path not in self._warned:
            self._warned.add(place.path)
            warnings.warn(
                f"{place.path} left its shared memory (load_state_dict(assign=True) or .data = ...); "
                "it was copied back, which costs a copy each time",
                RuntimeWarning,
                stacklevel=2,
            )


def _present(place: Place) -> torch.Tensor:
    tensor = place.tensor()
    assert tensor is not None
    return tensor
