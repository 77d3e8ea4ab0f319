"""The foot of a terminal: a few lines that are drawn over and over, while what is printed goes above them."""

from __future__ import annotations

import sys
import threading
from typing import Any, TextIO, cast

from flodl.records.sink import Sink


class Foot:
    """The last lines of this terminal. Several threads may print above it.

    Ownership: the stream stays the caller's. Between begin() and end() a sys.stdout or sys.stderr that is a terminal is
    replaced by a stand-in, for what it prints would tear the foot; what C code or a child prints directly still does.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._sink = Sink(stream)
        self._drawn = ""
        self._lock = threading.RLock()
        self._stand_ins: list[tuple[str, _StandIn]] = []

    def begin(self) -> None:
        """From here on what is printed goes above the foot. Twice is once."""
        if self._stand_ins:
            return
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                stand_in = _StandIn(stream, self)
                self._stand_ins.append((name, stand_in))
                setattr(sys, name, cast(TextIO, stand_in))

    def draw(self, text: str) -> None:
        """Replaces the foot. text: whole lines, none longer than the terminal is wide, fewer than it is high."""
        with self._lock:
            self._sink.write(self._up() + text)
            self._drawn = text

    def say(self, text: str) -> None:
        """Whole lines above the foot."""
        with self._lock:
            self._sink.write(self._up() + text + self._drawn)

    def print_above(self, stream: TextIO, text: str) -> None:
        """Whole lines, on another stream of the same terminal. What that stream raises goes to the caller."""
        with self._lock:
            self._sink.write(self._up())
            try:
                stream.write(text)
                stream.flush()
            finally:
                self._sink.write(self._drawn)

    def end(self) -> None:
        """The foot stays where it is and is drawn no more; the streams are what they were. Twice is once."""
        with self._lock:
            stand_ins, self._stand_ins = self._stand_ins, []
            self._drawn = ""
            for name, stand_in in stand_ins:
                if getattr(sys, name) is stand_in:
                    setattr(sys, name, stand_in.stream)
                stand_in.end()

    def _up(self) -> str:
        """To the first line of the foot, and nothing below it."""
        lines = self._drawn.count("\n")
        return f"\x1b[{lines}A\r\x1b[J" if lines else ""


class _StandIn:
    """A stream whose whole lines go above the foot. A line without end waits for it; a carriage return starts it anew.

    Everything but writing is the stream's own.
    """

    def __init__(self, stream: TextIO, foot: Foot) -> None:
        self.stream = stream
        self._foot = foot
        self._partial = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            whole, newline, rest = (self._partial + text).rpartition("\n")
            self._partial = rest.rpartition("\r")[2]
            if newline:
                self._foot.print_above(self.stream, whole + newline)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def end(self) -> None:
        """Hands on what came without a newline; a terminal that went away gets nothing."""
        with self._lock:
            partial, self._partial = self._partial, ""
            if partial:
                Sink(self.stream).write(partial)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
