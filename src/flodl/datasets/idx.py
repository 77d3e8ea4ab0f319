"""IDX files (the format of MNIST and Fashion-MNIST): a big-endian header of type and shape, then the values."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flodl.errors import FlodlError

UNSIGNED_BYTE = 0x08
LARGEST_BYTES = 1 << 31
MOST_DIMENSIONS = 8


class DataError(FlodlError):
    """A data file or directory holds something else than was asked for."""

    code = "FDL-DATA"
    remedy = "Check the file, or name the directory that holds the right one."


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array of an IDX file of unsigned bytes, gzipped or not. Raises DataError: what was found and expected."""
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != UNSIGNED_BYTE:
        raise DataError(f"{path} begins with {data[:4].hex()}; an IDX file of bytes begins with 000008")
    dimensions = data[3]
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise DataError(f"{path} has {dimensions} dimensions; 1 to {MOST_DIMENSIONS} are expected")
    start = 4 + 4 * dimensions
    if len(data) < start:
        raise DataError(f"{path} ends within its header, after {len(data)} bytes")
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    size = math.prod(shape)
    if size > LARGEST_BYTES or len(data) - start != size:
        raise DataError(f"{path} holds {len(data) - start} values; its header promises {size} ({shape})")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)
