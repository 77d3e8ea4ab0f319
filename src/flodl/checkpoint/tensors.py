"""safetensors files written in pieces, so that no copy of a model is made for them, and read without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flodl.checkpoint import files
from flodl.checkpoint.files import FileDigest
from flodl.errors import CheckpointError
from flodl.protocol.messages import LayoutSpec

# Name in the file format, and bytes per element, of each dtype of a layout.
DTYPES = {
    "f64": ("F64", 8),
    "i64": ("I64", 8),
    "f32": ("F32", 4),
    "i32": ("I32", 4),
    "bf16": ("BF16", 2),
    "f16": ("F16", 2),
    "i16": ("I16", 2),
    "i8": ("I8", 1),
    "u8": ("U8", 1),
    "boolean": ("BOOL", 1),
}
LONGEST_HEADER_BYTES = 100 << 20
"""The format's own limit."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor to be written. offset: in bytes, where it lies in an image of its layout, if it lies in one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def entries_of(layout: LayoutSpec) -> list[TensorEntry]:
    """Every tensor of a layout, where it lies in an image of it."""
    return [TensorEntry(tensor.name, tensor.dtype, tensor.shape, tensor.offset) for tensor in layout.tensors]


def write_tensors(
    path: Path,
    entries: Sequence[TensorEntry],
    metadata: Mapping[str, str],
    read: Callable[[TensorEntry, int, int], bytes],
) -> FileDigest:
    """read(entry, at, size) gives bytes [at, at + size) of an entry. Whole or not at all. Raises OSError."""
    ordered = sorted(entries, key=lambda entry: (-DTYPES[entry.dtype][1], entry.name))

    def pieces() -> Iterator[bytes]:
        yield _header(ordered, metadata)
        for entry in ordered:
            for at in range(0, entry.bytes, files.PIECE_BYTES):
                yield read(entry, at, min(files.PIECE_BYTES, entry.bytes - at))

    return files.write_whole(path, pieces())


def write_image(
    path: Path, layout: LayoutSpec, metadata: Mapping[str, str], read: Callable[[int, int], bytes]
) -> FileDigest:
    """Every tensor of a layout; read(offset, size) gives bytes of its image. Whole or not at all. Raises OSError."""
    return write_tensors(path, entries_of(layout), metadata, lambda entry, at, size: read(entry.offset + at, size))


def read_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """(dtype in the file format, shape, elements) by name. Raises CheckpointError naming the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", path=str(path)) from error
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 0 < length <= min(LONGEST_HEADER_BYTES, len(content) - 8):
        raise CheckpointError(f"{path} is cut off or no safetensors file", path=str(path))
    data = content[8 + length :]
    found = {}
    try:
        header = json.loads(content[8 : 8 + length])
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                if not 0 <= start <= end <= len(data):
                    raise ValueError(f"tensor {name} reaches past the end")
                found[name] = (str(entry["dtype"]), tuple(entry["shape"]), data[start:end])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} has no readable header: {error}", path=str(path)) from error
    return found


def _header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.bytes
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype][0],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The data begins at a multiple of 8, so that a reader may map it.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
