"""A terminal as far as the views use one: what a person would see after everything that was written to it."""

from __future__ import annotations

import io
import re
from typing import Any

_PIECE = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[[\d;]*m|\r|\n|[^\x1b\r\n]+")


class Screen(io.StringIO):
    """Keeps every line that was ever on it, also those that scrolled away. Colours are passed by; A and J are known."""

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.lines = [""]
        self.writes = 0
        self._row = self._column = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self.writes += bool(text)
        at = 0
        while at < len(text):
            piece = _PIECE.match(text, at)
            assert piece is not None, f"unknown sequence {text[at : at + 8]!r}"
            self._take(piece)
            at = piece.end()
        return len(text)

    def _take(self, piece: re.Match[str]) -> None:
        said, command = piece.group(), piece.group(2)
        if command == "A":
            self._row -= int(piece.group(1))
            assert self._row >= 0
        elif command == "J":
            self.lines[self._row] = self.lines[self._row][: self._column]
            del self.lines[self._row + 1 :]
        elif said == "\r":
            self._column = 0
        elif said == "\n":
            self._row, self._column = self._row + 1, 0
            if self._row == len(self.lines):
                self.lines.append("")
        elif not said.startswith("\x1b"):
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + said + line[self._column + len(said) :]
            self._column += len(said)

    def seen(self) -> list[str]:
        """Its lines, without spaces at their ends and without empty lines at the foot."""
        seen: list[Any] = [line.rstrip() for line in self.lines]
        while seen and not seen[-1]:
            seen.pop()
        return seen
