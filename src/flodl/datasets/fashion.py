"""The files of Fashion-MNIST: where they may lie, and how they are fetched once, known by their digests."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flodl.datasets.idx import DataError
from flodl.plan import sources

# Where Debian's package dataset-fashion-mnist puts them.
SYSTEM_DIRECTORY = Path("/usr/share/datasets/fashion-mnist")
FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class FileSpec:
    """One file as it is served, gzipped. sha256: of its `bytes` bytes, in hexadecimal digits."""

    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Source:
    """An address that serves files below it. silent_s: the longest wait for its next bytes; total_s: for all files."""

    address: str
    files: tuple[FileSpec, ...]
    silent_s: float = 5.0
    total_s: float = 120.0

    @property
    def megabytes(self) -> float:
        return sum(file.bytes for file in self.files) / 1e6


OFFICIAL = Source(
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    (
        FileSpec(
            "train-images-idx3-ubyte.gz", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", 26421880
        ),
        FileSpec(
            "train-labels-idx1-ubyte.gz", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29515
        ),
        FileSpec(
            "t10k-images-idx3-ubyte.gz", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 4422102
        ),
        FileSpec("t10k-labels-idx1-ubyte.gz", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5148),
    ),
)


class FetchError(DataError):
    """A file could not be fetched, or is not the one that was wanted. Nothing of it is left."""

    remedy = "Try again, or name a directory that holds the files of Fashion-MNIST."


def cache_directory() -> Path:
    """Where fetched files are kept, by the environment that this process was started with. It need not exist."""
    named = Path(sources.started().environment.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path("~/.cache").expanduser()) / "flodl" / "fashion-mnist"


def file_in(directory: Path, stem: str) -> Path | None:
    """The file of this name in the directory, gzipped or not."""
    return next((path for path in (directory / f"{stem}.gz", directory / stem) if path.is_file()), None)


def installed_directory() -> Path | None:
    """The first of the system's directory and the cache that has all four files. Nobody has looked inside them."""
    for directory in (SYSTEM_DIRECTORY, cache_directory()):
        if all(file_in(directory, stem) for stem in FILES.values()):
            return directory
    return None


def fetch(source: Source, directory: Path, now: Callable[[], float] = time.monotonic) -> None:
    """Brings every file that the directory lacks, each under its name only once its digest is right.

    Raises FetchError naming the first that failed; those before it stay, and are not fetched again.
    """
    deadline = now() + source.total_s
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in source.files:
            if not _is_there(directory / file.name, file):
                _fetch_file(source, file, directory, lambda: now() > deadline)
    except OSError as error:
        raise FetchError(f"{directory} cannot be written: {error.strerror or error}") from error


def _is_there(path: Path, file: FileSpec) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256


def _fetch_file(source: Source, file: FileSpec, directory: Path, is_late: Callable[[], bool]) -> None:
    url = source.address + file.name
    temporary = directory / f"{file.name}.{os.getpid()}.tmp"
    try:
        content = _download(url, file, source.silent_s, is_late)
        temporary.write_bytes(content)
        os.replace(temporary, directory / file.name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _download(url: str, file: FileSpec, silent_s: float, is_late: Callable[[], bool]) -> bytes:
    """Never holds more than one byte beyond what was promised. Raises FetchError."""
    content = bytearray()
    try:
        with urllib.request.urlopen(url, timeout=silent_s) as answer:
            while piece := answer.read(min(_PIECE_BYTES, file.bytes + 1 - len(content))):
                content += piece
                if is_late():
                    raise FetchError(f"{url} came too slowly: {len(content)} of {file.bytes} bytes in the time allowed")
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise FetchError(f"{url} cannot be fetched: {reason or type(error).__name__}") from error
    if len(content) < file.bytes:
        raise FetchError(f"{url} was cut off after {len(content)} of {file.bytes} bytes")
    if len(content) > file.bytes or hashlib.sha256(content).hexdigest() != file.sha256:
        raise FetchError(f"{url} is not the file that was wanted: its sha256 or size is another")
    return bytes(content)
