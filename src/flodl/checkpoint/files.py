"""Files that appear whole or not at all, and the digests by which they are known again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from flodl.errors import CheckpointError

PIECE_BYTES = 16 << 20


class FileDigest(msgspec.Struct, frozen=True):
    """One file of a checkpoint. sha256: 64 hexadecimal digits of its content; bytes: its size."""

    name: str
    sha256: str
    bytes: int


def write_whole(path: Path, pieces: Iterable[bytes]) -> FileDigest:
    """Temporary file beside it, fsync, rename, fsync of the directory. Raises OSError, and leaves nothing then."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    digest = hashlib.sha256()
    size = 0
    try:
        with open(temporary, "wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return FileDigest(path.name, digest.hexdigest(), size)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """The same way. Raises OSError. NaN and infinities, which JSON has no word for, become null."""
    write_whole(path, [(json.dumps(finite(values), indent=1, allow_nan=False) + "\n").encode()])


def finite(values: Any) -> Any:
    """The same plain values, with None for NaN and infinities."""
    if isinstance(values, float) and not math.isfinite(values):
        return None
    if isinstance(values, dict):
        return {name: finite(value) for name, value in values.items()}
    return [finite(value) for value in values] if isinstance(values, list | tuple) else values


def probe(directory: Path) -> None:
    """Makes the folder if need be, and writes a page to it. Raises OSError where it is read-only or the disk full."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f".probe.{os.getpid()}.tmp"
    try:
        with open(path, "wb") as file:
            file.write(bytes(4096))
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def sync_directory(directory: Path) -> None:
    """Makes a rename in it last through a power cut, where the file system can."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_file(path: Path) -> FileDigest:
    """Reads the whole file. Raises OSError."""
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
    return FileDigest(path.name, digest.hexdigest(), size)


def check_file(directory: Path, expected: FileDigest) -> None:
    """Raises CheckpointError naming the file where it is missing, cut off or altered."""
    path = directory / expected.name
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            what = f"{path} has {size} bytes instead of {expected.bytes}: it was cut off"
            raise CheckpointError(what, path=str(path))
        found = digest_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", path=str(path)) from error
    if found.sha256 != expected.sha256:
        raise CheckpointError(f"{path} was altered: its sha256 is not the one that was written down", path=str(path))
