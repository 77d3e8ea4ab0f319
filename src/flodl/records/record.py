"""One line of a run's story, as an object and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

_RESERVED = ("time_s", "kind")


@dataclass(frozen=True)
class RecordLine:
    """Something that happened. time_s: seconds since the run began, time in which the launcher was stopped left out."""

    time_s: float
    kind: str
    fields: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The JSON object: time_s and kind first, then the fields. A field of one of these names gets an underscore."""
        fields = {f"{name}_" if name in _RESERVED else name: value for name, value in self.fields.items()}
        return {"time_s": round(self.time_s, 6), "kind": self.kind, **fields}


def encode_line(values: dict[str, Any]) -> bytes:
    """One line, with its newline. Structs, dataclasses and tuples become JSON; NaN and infinities become null."""
    return msgspec.json.encode(values) + b"\n"


def decode_line(line: bytes) -> dict[str, Any]:
    """Raises ValueError for anything but one JSON object."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
