"""Where a view writes: a text stream that may go away, or know few characters, without any harm to the run."""

from __future__ import annotations

from typing import TextIO


class Sink:
    """Ownership: the stream stays the caller's. Once a write fails nothing more is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_open = True

    def write(self, text: str) -> None:
        """At once and whole. Characters that the stream's encoding lacks become "?". Never raises."""
        if not self.is_open:
            return
        try:
            self._stream.write(as_encodable(text, self._stream.encoding))
            self._stream.flush()
        except (OSError, ValueError):
            self.is_open = False


def as_encodable(text: str, encoding: str | None) -> str:
    """The same text where this encoding has all its characters. None is UTF-8's equal: io.StringIO."""
    if encoding is None or text.isascii():
        return text
    return text.encode(encoding, "replace").decode(encoding)
