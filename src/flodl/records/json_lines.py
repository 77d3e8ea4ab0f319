"""The run as JSON lines: what is worth a line, as recorded, and now and then where the run stands."""

from __future__ import annotations

import dataclasses
from typing import Any, TextIO

from flodl.records.plain import sentence
from flodl.records.record import encode_line
from flodl.records.sink import Sink
from flodl.records.snapshot import Fold

SNAPSHOT_S = 1.0


class JsonView:
    """Writes each record that the plain view has a sentence for, and after a commit, at most once in SNAPSHOT_S of the
    run's time, {"time_s", "kind": "snapshot", and the fields of Snapshot}. Everything else is in schedule.jsonl."""

    def __init__(self, stream: TextIO) -> None:
        self._sink = Sink(stream)
        self._fold = Fold()
        self._next_s = 0.0

    def record(self, record: dict[str, Any]) -> None:
        """Writes what this line of the schedule gives."""
        self._fold.add(record)
        if sentence(record, self._fold) is not None:
            self._write(record)
        if record["kind"] == "commit" and self._fold.last_s >= self._next_s:
            self._next_s = self._fold.last_s + SNAPSHOT_S
            snapshot = dataclasses.asdict(self._fold.snapshot(self._fold.last_s))
            self._write({"time_s": self._fold.last_s, "kind": "snapshot", **snapshot})

    def close(self) -> None:
        """Nothing is open: the stream is the caller's."""

    def _write(self, values: dict[str, Any]) -> None:
        self._sink.write(encode_line(values).decode())
