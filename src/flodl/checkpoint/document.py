"""checkpoint.json: what a checkpoint is of, how far the run had come, and the digest of every other file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from flodl.checkpoint.files import FileDigest, check_file, write_whole
from flodl.errors import CheckpointError
from flodl.protocol.messages import BatchRange, DataSpec, LayoutSpec

DOCUMENT = "checkpoint.json"
CONSENSUS = "consensus.safetensors"
FORMAT = 1


class EpochRecord(msgspec.Struct, frozen=True):
    """One epoch so far. loss_sum: of loss · samples (null: not finite); round: that closed it."""

    epoch: int
    loss_sum: float | None
    samples: int
    round: int | None = None
    metrics: dict[str, float | None] = {}


class RankRecord(msgspec.Struct, frozen=True):
    """One rank when the checkpoint was made. batches: contributed by it; ms_per_batch: null where not measured."""

    rank: int
    device: str
    batches: int
    ms_per_batch: float | None = None


class Document(msgspec.Struct, frozen=True):
    """round: counted through all runs that continue each other. digest: of this document with an empty digest."""

    format: int
    run: str
    round: int
    plan: dict[str, Any]
    layout: LayoutSpec
    data: DataSpec
    world_size: int
    contributed: tuple[BatchRange, ...]
    quarantined: tuple[tuple[int, int], ...]
    epochs: tuple[EpochRecord, ...]
    anchor: int
    ranks: tuple[RankRecord, ...]
    files: tuple[FileDigest, ...]
    digest: str = ""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this file."""
        return any(file.name == name for file in self.files)


def optimizer_file(rank: int) -> str:
    """The name of a rank's part."""
    return f"rank-{rank}.safetensors"


def write_document(directory: Path, document: Document) -> None:
    """The last file of a checkpoint. Raises OSError."""
    sealed = msgspec.structs.replace(document, digest=_digest(document))
    write_whole(directory / DOCUMENT, [_encode(sealed)])


def read_document(directory: Path) -> Document:
    """Checks the document alone. Raises CheckpointError naming the file."""
    path = directory / DOCUMENT
    try:
        content = path.read_bytes()
        version = msgspec.json.decode(content, type=_Version).format
        if version != FORMAT:
            raise CheckpointError(
                f"{path} has format {version}, and this version of flodl reads format {FORMAT}\n"
                "Resume with the version of flodl that wrote it.",
                path=str(path),
            )
        document = msgspec.json.decode(content, type=Document)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", path=str(path)) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is cut off or altered: {error}", path=str(path)) from error
    if document.digest != _digest(document) or content != _encode(document):
        raise CheckpointError(f"{path} was altered: its digest is not that of its content", path=str(path))
    return document


def read_whole(directory: Path) -> Document:
    """The document, after every file was compared with its digest. Raises CheckpointError naming the bad file."""
    document = read_document(directory)
    for file in document.files:
        if Path(file.name).name != file.name:
            raise CheckpointError(f"{directory / DOCUMENT} names a file elsewhere: {file.name!r}", path=str(directory))
        check_file(directory, file)
    if not document.has(CONSENSUS):
        raise CheckpointError(f"{directory} holds no {CONSENSUS}", path=str(directory))
    return document


class _Version(msgspec.Struct):
    format: int


def _digest(document: Document) -> str:
    return hashlib.sha256(_encode(msgspec.structs.replace(document, digest=""))).hexdigest()


def _encode(document: Document) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
