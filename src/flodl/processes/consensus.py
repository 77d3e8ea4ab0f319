"""consensus.safetensors: the committed θ as a file, written in pieces, so that no copy of the model is made for it."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from flodl.protocol.effects import Committed
from flodl.protocol.messages import LayoutSpec, TensorSpec

CONSENSUS = "consensus.safetensors"
PIECE_BYTES = 16 << 20

# Name in the file format, and bytes per element.
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


def write_consensus(path: Path, layout: LayoutSpec, committed: Committed, read: Callable[[int, int], bytes]) -> None:
    """Writes every tensor of the layout; read(offset, size) gives bytes of the committed θ.

    The file appears whole or not at all: temporary file, fsync, rename. Raises OSError. Header metadata: round, hash.
    """
    tensors = sorted(layout.tensors, key=lambda t: (-DTYPES[t.dtype][1], t.name))
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(_header(tensors, committed))
            for tensor in tensors:
                for offset, size in _pieces(tensor):
                    file.write(read(offset, size))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: Path, values: dict[str, object]) -> None:
    """The same way: whole or not at all. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync_directory(directory: Path) -> None:
    """Makes a rename in it last through a power cut, where the file system can."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(tensors: list[TensorSpec], committed: Committed) -> bytes:
    entries: dict[str, object] = {
        "__metadata__": {"format": "pt", "round": str(committed.round), "hash": f"{committed.hash:016x}"}
    }
    end = 0
    for tensor in tensors:
        start, end = end, end + _bytes_of(tensor)
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype][0],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # The data begins at a multiple of 8, so that a reader may map it.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: TensorSpec) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype][1]


def _pieces(tensor: TensorSpec) -> Iterator[tuple[int, int]]:
    end = tensor.offset + _bytes_of(tensor)
    for offset in range(tensor.offset, end, PIECE_BYTES):
        yield offset, min(PIECE_BYTES, end - offset)
