"""The folder of a run's checkpoints: made beside the whole ones, renamed when whole, the newest kept."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from flodl.checkpoint.document import Document, write_document
from flodl.checkpoint.files import sync_directory

if os.name == "posix":
    import fcntl

LOCK = ".lock"
_WHOLE = re.compile(r"round-(\d{6,})")
_PARTIAL = re.compile(r"\.partial-[0-9A-Za-z-]+-round-\d{6,}(-replaced)?")


def whole_name(number: int) -> str:
    """Of the checkpoint of this round."""
    return f"round-{number:06d}"


def partial_name(run: str, number: int) -> str:
    """Of its folder while this run writes it."""
    return f".partial-{run}-{whole_name(number)}"


def find_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(round, folder) of all that bear the name of a checkpoint, the newest first. Nobody has looked inside."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = [(match, name) for name in names if (match := _WHOLE.fullmatch(name)) is not None]
    return sorted(((int(match[1]), directory / name) for match, name in matches), reverse=True)


def holds_anything(directory: Path) -> bool:
    """Whether the folder holds more than a run that saved nothing leaves. Raises OSError for one not to be read."""
    try:
        return any(name != LOCK and not _PARTIAL.fullmatch(name) for name in os.listdir(directory))
    except FileNotFoundError:
        return False


class FolderLock:
    """One run at a time writes to a folder. Held by a descriptor: it ends with the process, however that ends."""

    def __init__(self, directory: Path) -> None:
        """Raises BlockingIOError. A folder that cannot be locked is used without: saving may fail, and says so."""
        self._descriptor: int | None = None
        if os.name != "posix":
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise
        except OSError:  # a file system without locks
            self.release()

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def release(self) -> None:
        """Also where a child of this process was forked meanwhile and has the descriptor too."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


class CheckpointFolder:
    """Where one run saves. Owner: the launcher, or the process that trains alone.

    base: the round of the checkpoint in this folder that the run goes on from; −1 for a run that begins anew. What has
    a higher number and was not written by this run is of a line that was given up: the first checkpoint replaces it.
    """

    def __init__(self, directory: Path, run: str, keep: int, base: int = -1) -> None:
        self.directory = directory
        self.run = run
        self._keep = keep
        self._base = base
        self._own: set[int] = set()

    def remove_remains(self) -> None:
        """What dead runs left half-written. The caller holds the folder's lock."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.directory):
                if _PARTIAL.fullmatch(name):
                    shutil.rmtree(self.directory / name, ignore_errors=True)

    def remove_own(self) -> None:
        """What this run left half-written."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.directory):
                if _PARTIAL.fullmatch(name) and name.startswith(f".partial-{self.run}-"):
                    shutil.rmtree(self.directory / name, ignore_errors=True)

    def partial(self, number: int) -> Path:
        return self.directory / partial_name(self.run, number)

    def drop(self, number: int) -> None:
        """Gives up a checkpoint that is not whole."""
        shutil.rmtree(self.partial(number), ignore_errors=True)

    def finish(self, number: int, document: Document) -> Path:
        """Every other file is there: writes the document, renames, and forgets the oldest. Raises OSError."""
        partial = self.partial(number)
        write_document(partial, document)
        whole = self.directory / whole_name(number)
        replaced = partial.with_name(partial.name + "-replaced")
        if whole.exists():
            whole.rename(replaced)
        partial.rename(whole)
        sync_directory(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)
        self._own.add(number)
        self._retire()
        return whole

    def _retire(self) -> None:
        line: list[Path] = []
        others: list[Path] = []
        for number, path in find_checkpoints(self.directory):
            (line if number in self._own or number <= self._base else others).append(path)
        for path in [*line[self._keep :], *others]:
            # Under another name first: a checkpoint that is half removed must not be taken for a whole one.
            aside = self.directory / f"{partial_name(self.run, 0)}-replaced"
            shutil.rmtree(aside, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
