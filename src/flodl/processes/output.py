"""What ranks print: whole lines with the rank's name on the launcher's output, raw bytes in a file, the tail kept."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from flodl.records.schedule import warn_on_stderr

# A line longer than this is shown in pieces, so that a rank that prints no newline costs bounded memory.
PIECE_BYTES = 64 << 10
TAIL_LINES = 60
# What of the tail an error message carries: enough for a long traceback.
WORDS_CHARACTERS = 32 << 10


class Console:
    """The launcher's standard output, or its stderr where a view writes to stdout what a program is to read.

    A reader that went away ends the printing, not the run.
    """

    def __init__(self, is_quiet: bool = False, is_on_stderr: bool = False) -> None:
        self._is_open = not is_quiet
        self._is_on_stderr = is_on_stderr

    def write(self, text: str) -> None:
        """Whole lines only. The stream is looked up at each call: notebooks and tests replace it."""
        stream = sys.stderr if self._is_on_stderr else sys.stdout
        if not self._is_open or stream is None:
            return
        try:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                encoding = stream.encoding or "ascii"
                stream.write(text.encode(encoding, "replace").decode(encoding))
            stream.flush()
        except (OSError, ValueError):
            self._is_open = False


class RawLog:
    """rank-<r>.log: every byte of every generation of one rank, appended. A full disk is said once."""

    def __init__(self, path: Path, warn: Callable[[str], None] = warn_on_stderr) -> None:
        self.path = path
        self._warn = warn
        self._file: BinaryIO | None = None
        self._is_broken = False

    def write(self, data: bytes) -> None:
        """Never raises: output that cannot be kept is no reason to end a run."""
        if self._is_broken:
            return
        try:
            if self._file is None:
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            self._file.write(data)
        except OSError as error:
            self._is_broken = True
            self._warn(f"cannot write {self.path}: {error.strerror}. The rank's further output is shown but not kept.")

    def close(self) -> None:
        """Closes the file; further writes open it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class RankOutput:
    """The output of one process: fed any cut of its bytes, it gives whole lines."""

    def __init__(self, rank: int, log: RawLog, console: Console) -> None:
        self._prefix = f"[rank {rank}] "
        self._log = log
        self._console = console
        self._partial = bytearray()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> None:
        """The next bytes of the pipe."""
        self._log.write(data)
        self._partial += data
        pieces: list[bytes] = []
        start = 0
        while (piece := self._next_piece(start)) is not None:
            end, next_start = piece
            pieces.append(bytes(self._partial[start:end]))
            start = next_start
        del self._partial[:start]
        self._show(pieces)

    def close(self) -> None:
        """Shows what came without a newline."""
        if self._partial:
            self._show([bytes(self._partial)])
            self._partial.clear()

    def words(self) -> str:
        """The last lines, at most TAIL_LINES and WORDS_CHARACTERS of them; an unfinished one counts."""
        lines = [*self._tail]
        if self._partial:
            lines.append(_as_seen(bytes(self._partial)))
        return "\n".join(lines)[-WORDS_CHARACTERS:]

    def _next_piece(self, start: int) -> tuple[int, int] | None:
        newline = self._partial.find(b"\n", start, start + PIECE_BYTES + 1)
        if newline >= 0:
            return newline, newline + 1
        if len(self._partial) - start > PIECE_BYTES:
            return start + PIECE_BYTES, start + PIECE_BYTES
        return None

    def _show(self, pieces: list[bytes]) -> None:
        if not pieces:
            return
        lines = [_as_seen(piece) for piece in pieces]
        self._tail.extend(lines)
        self._console.write("".join(f"{self._prefix}{line}\n" for line in lines))


def _as_seen(piece: bytes) -> str:
    """What a terminal would show of a line that a progress bar wrote over: the part after the last carriage return."""
    return piece.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
