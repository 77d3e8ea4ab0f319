"""The cpu plane as a rank sees it: seal what it trained, adopt what was committed.

Waiting ranks (sync, cadence) keep their parameters in the shared arena that the host reads: sealing copies nothing.
Async ranks keep them in private memory and seal a snapshot, so that they can train on while the host reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flodl import native
from flodl.averaging.arena import Arena, private_bytes, tensor_over
from flodl.averaging.layout import ModelLayout
from flodl.protocol.signatures import ITEM_BYTES

RANK_PAGE_BYTES = 4096
"""A rank's memory starts with its step counters; the arena follows."""

STREAMED_BYTES = 32 << 20
"""A model larger than this leaves the cache anyway: it is copied past it, at about twice the speed."""


@dataclass(frozen=True)
class Blend:
    """How async ranks take θ: 'delta' W ← θ + (W − snapshot), 'elastic' W ← (1−α)W + αθ, 'adopt' W ← θ."""

    rule: str = "delta"
    alpha: float = 0.5


@dataclass(frozen=True)
class HostMemories:
    """What came with Welcome: this rank's memory (writable) and the host's two buffers (read-only)."""

    rank: native.SharedMemory
    buffers: tuple[native.SharedMemory, native.SharedMemory]


class CpuPlane:
    """Seal and adopt for one model. Every call is made at a step boundary, from the training thread."""

    def __init__(self, layout: ModelLayout, memories: HostMemories, blend: Blend | None) -> None:
        """blend: None where the rank waits for each round; else parameters are private and this says how θ is taken."""
        self._spec = layout.spec
        self._sections = [
            native.Section(s.rule, s.dtype, s.offset, s.count, s.mean_offset) for s in self._spec.sections
        ]
        self._memories = memories
        self._blend = blend
        self._shared = tensor_over(memories.rank, RANK_PAGE_BYTES, self._spec.bytes)
        self._arena = Arena(layout, self._shared if blend is None else private_bytes(self._spec.bytes))
        self._layout = layout
        self._seals = 0
        self._has_snapshot = False
        if blend is not None:
            self._shared[::RANK_PAGE_BYTES].zero_()  # first touch here, so that no round pays for it
        for mapped in memories.buffers:
            mapped.prefault()

    def seal(self) -> None:
        """The rank's state stands still in memory that the host reads, until the next seal (async) or adoption.

        Raises RunFailed where what should be constant is not: looked at ever more rarely, for it may be large.
        """
        self._arena.gather_strays()
        self._seals += 1
        if self._seals.bit_count() == 1:
            self._layout.refuse_changed_constants()
        if self._blend is not None:
            self._copy(self._shared.data_ptr(), self._arena.address)
        self._has_snapshot = True

    def adopt(self, buffer: int, overwrite: bool = False) -> int:
        """W takes θ from this buffer. overwrite: exactly θ, whatever the blend. Returns the hash of θ as read.

        Buffers of the model always take θ. Without a snapshot of its own (a joiner) a rank overwrites.
        """
        self._arena.gather_strays()
        theta = self._memories.buffers[buffer].address
        blend = self._blend
        if overwrite or blend is None or blend.rule == "adopt" or not self._has_snapshot:
            taken = self._copy(self._arena.address, theta)
        else:
            taken = self._copy(0, theta)
            self._blend_from(theta, blend)
        self._has_snapshot = False
        return taken

    def read_committed(self, buffer: int, offset: int, size: int) -> bytes:
        """Bytes of θ that stands in this buffer of the host."""
        return self._memories.buffers[buffer].read(offset, size)

    @property
    def keeps_steps(self) -> bool:
        """Whether adopting keeps the steps made since the snapshot."""
        return self._blend is not None and self._blend.rule == "delta"

    @contextmanager
    def showing(self, buffer: int) -> Iterator[None]:
        """Within, the model holds θ of this buffer; afterwards everything that travels is as it was, bit for bit.

        Costs a second copy of the model for that time where W is not θ (async).
        """
        self._arena.gather_strays()
        kept = self._arena.memory.clone() if self._blend is not None else None
        if kept is not None:
            self._copy(self._arena.address, self._memories.buffers[buffer].address)
        try:
            yield
        finally:
            self._arena.gather_strays()
            if kept is None:
                self._copy(self._arena.address, self._memories.buffers[buffer].address)
            else:
                self._arena.memory.copy_(kept)

    def _copy(self, destination: int, source: int) -> int:
        """Every section from one image of the layout to another (0: nowhere). Returns the hash."""
        streams = self._spec.bytes > STREAMED_BYTES
        return native.copy_layout(destination, source, self._spec.bytes, self._sections, streams)

    def _blend_from(self, theta: int, blend: Blend) -> None:
        mine, snapshot = self._arena.address, self._shared.data_ptr()
        for section in self._spec.sections:
            at = section.offset
            if section.rule != "parameter":
                native.by_address.copy_hash(mine + at, theta + at, section.count * ITEM_BYTES[section.dtype], False)
            elif blend.rule == "delta":
                native.by_address.blend_delta(mine + at, theta + at, snapshot + at, section.dtype, section.count)
            else:
                native.by_address.blend_elastic(mine + at, theta + at, blend.alpha, section.dtype, section.count)
