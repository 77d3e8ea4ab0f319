"""schedule.jsonl and journal.jsonl: written line by line, never torn in the middle, and never the end of a run."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from flodl.errors import CheckpointError
from flodl.records.record import decode_line, encode_line

# A run whose disk stays full goes on; this much of its story waits in memory for room, and what comes after is lost.
PENDING_BYTES = 16 << 20


class ByteSink(Protocol):
    """An unbuffered file: write may take only a part, and raises OSError when the disk is full."""

    def write(self, data: memoryview, /) -> int | None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


def warn_on_stderr(text: str) -> None:
    """The default place for a warning. One that cannot be written is lost: the run that it is about goes on."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"flodl: {text}\n")
            sys.stderr.flush()


class LineWriter:
    """Appends JSON lines. A write that fails is reported once, kept in memory, and tried again at the next flush.

    What a kill leaves is a whole number of lines and at most one torn line, the last.
    """

    def __init__(self, path: Path, sink: ByteSink, warn: Callable[[str], None] = warn_on_stderr) -> None:
        self._path = path
        self._sink: ByteSink | None = sink
        self._warn = warn
        self._pending = bytearray()
        self._has_warned = False
        self.lost = 0

    @classmethod
    def open(cls, path: Path, warn: Callable[[str], None] = warn_on_stderr) -> LineWriter:
        """Appends to the file, after cutting off a torn last line. Raises OSError."""
        cut_torn_line(path)
        return cls(path, open(path, "ab", buffering=0), warn)

    @property
    def pending_bytes(self) -> int:
        """What is not with the operating system yet."""
        return len(self._pending)

    def write(self, values: dict[str, Any]) -> None:
        """Buffers one line; see flush. A line that finds PENDING_BYTES waiting is lost, and counted."""
        if len(self._pending) >= PENDING_BYTES:
            self.lost += 1
            return
        self._pending += encode_line(values)

    def flush(self, sync: bool = False) -> bool:
        """Hands everything to the operating system, and with `sync` to the disk. False if it did not take all."""
        if self._sink is None:
            return not self._pending
        try:
            self._write_pending(self._sink)
            if sync:
                os.fsync(self._sink.fileno())
        except OSError as error:
            self._complain(error)
            return False
        if self.lost and not self._pending:
            lost, self.lost = self.lost, 0
            self.write({"kind": "lost", "lines": lost})
            return self.flush(sync)
        return True

    def close(self) -> None:
        """Flushes and closes; twice is once."""
        if self._sink is None:
            return
        self.flush()
        sink, self._sink = self._sink, None
        try:
            sink.close()
        except OSError as error:
            self._complain(error)

    def _write_pending(self, sink: ByteSink) -> None:
        while self._pending:
            with memoryview(self._pending) as waiting:
                taken = sink.write(waiting) or 0
            if taken == 0:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            del self._pending[:taken]

    def _complain(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            why = error.strerror or str(error)
            self._warn(f"cannot write {self._path}: {why}. Training goes on; writing is tried again at every commit.")


def cut_torn_line(path: Path) -> int:
    """Removes what follows the last newline, the trace of a killed writer. How many bytes; 0 if there is no file."""
    try:
        with open(path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            keep = _end_of_last_line(file.read, file.seek, size)
            if keep < size:
                file.truncate(keep)
            return size - keep
    except FileNotFoundError:
        return 0


def _end_of_last_line(read: Callable[[int], bytes], seek: Callable[[int], int], size: int) -> int:
    block = 64 << 10
    end = size
    while end > 0:
        start = max(0, end - block)
        seek(start)
        at = read(end - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, in order; a torn last line is left out. Raises CheckpointError naming file and line."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decode_line(line)
            except ValueError as error:
                raise CheckpointError(
                    f"{path}, line {number} is no record: {error}\n"
                    "The file was changed after it was written; only a torn last line comes from a killed run."
                ) from error
