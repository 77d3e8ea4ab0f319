"""consensus.safetensors of a run directory: the committed θ as a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flodl.checkpoint.document import CONSENSUS
from flodl.checkpoint.files import FileDigest
from flodl.checkpoint.tensors import write_image
from flodl.protocol.effects import Committed
from flodl.protocol.messages import LayoutSpec

__all__ = ["CONSENSUS", "write_consensus"]


def write_consensus(
    path: Path, layout: LayoutSpec, committed: Committed, read: Callable[[int, int], bytes]
) -> FileDigest:
    """Writes every tensor of the layout; read(offset, size) gives bytes of the committed θ.

    The file appears whole or not at all: temporary file, fsync, rename. Raises OSError. Header metadata: round, hash.
    """
    metadata = {"round": str(committed.round), "hash": f"{committed.hash:016x}"}
    return write_image(path, layout, metadata, read)
