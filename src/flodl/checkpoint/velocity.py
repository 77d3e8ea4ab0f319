"""velocity.safetensors: what the outer optimizer remembers, one fp32 tensor per parameter, named like it."""

from __future__ import annotations

from pathlib import Path

from flodl.checkpoint.files import FileDigest
from flodl.checkpoint.tensors import DTYPES, TensorEntry, read_tensors, write_tensors
from flodl.errors import CheckpointError
from flodl.protocol.messages import LayoutSpec

VELOCITY = "velocity.safetensors"
_ITEM = 4


def write_velocity(path: Path, layout: LayoutSpec, velocity: bytes) -> FileDigest:
    """velocity: as the host's memory gives it, fp32 in the order of parameter sections. Raises OSError."""

    def read(entry: TensorEntry, at: int, size: int) -> bytes:
        return velocity[entry.offset + at : entry.offset + at + size]

    entries = _entries(layout)
    return write_tensors(path, entries, {}, read)


def read_velocity(path: Path, layout: LayoutSpec) -> bytes:
    """The same bytes back. Raises CheckpointError where the file is not whole or of another layout."""
    found = read_tensors(path)
    velocity = bytearray(_ITEM * _count(layout))
    for entry in _entries(layout):
        there = found.get(entry.name)
        if there is None or there[:2] != ("F32", entry.shape) or len(there[2]) != entry.bytes:
            raise CheckpointError(f"{path} has no velocity of parameter {entry.name}", path=str(path))
        velocity[entry.offset : entry.offset + entry.bytes] = there[2]
    return bytes(velocity)


def _count(layout: LayoutSpec) -> int:
    return sum(section.count for section in layout.sections if section.rule == "parameter")


def _entries(layout: LayoutSpec) -> list[TensorEntry]:
    """Where each parameter's values begin. A section's gaps count; they are zero."""
    entries: list[TensorEntry] = []
    before = 0
    for section in layout.sections:
        if section.rule != "parameter":
            continue
        item = DTYPES[section.dtype][1]
        end = section.offset + item * section.count
        for tensor in layout.tensors:
            if section.offset <= tensor.offset < end and all(tensor.shape):
                at = before + (tensor.offset - section.offset) // item
                entries.append(TensorEntry(tensor.name, "f32", tensor.shape, _ITEM * at))
        before += section.count
    return entries
