"""Record, and the journal line of a commit: what the run leaves to read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flodl.processes.clock import RunClock
from flodl.protocol.effects import CommitRound
from flodl.records.record import RecordLine
from flodl.records.schedule import LineWriter
from flodl.records.views import GuardedView, View

SCHEDULE = "schedule.jsonl"
JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class RecordFiles:
    """The two files of a run directory, open for appending."""

    schedule: LineWriter
    journal: LineWriter

    @classmethod
    def open(cls, directory: Path) -> RecordFiles:
        """Raises OSError."""
        schedule = LineWriter.open(directory / SCHEDULE)
        try:
            return cls(schedule, LineWriter.open(directory / JOURNAL))
        except BaseException:
            schedule.close()
            raise


class RecordPerformer:
    """Writes records and shows them. syncs_journal: where other hosts hold what the journal speaks of."""

    def __init__(self, files: RecordFiles, clock: RunClock, view: View | None, syncs_journal: bool = False) -> None:
        self._files = files
        self._clock = clock
        self._view = None if view is None else GuardedView(view)
        self._syncs_journal = syncs_journal

    def record(self, kind: str, fields: dict[str, Any]) -> None:
        """Buffered until the next commit; shown at once."""
        line = RecordLine(self._clock.now(), kind, fields).as_dict()
        self._files.schedule.write(line)
        if self._view is not None:
            self._view.record(line)

    def tick(self) -> None:
        """Time passed: a view with a clock may draw."""
        if self._view is not None:
            self._view.tick()

    def journal(self, effect: CommitRound) -> None:
        """Before the round is swapped in. A full disk delays the line, not the round."""
        line = RecordLine(
            self._clock.now(),
            "commit",
            {
                "round": effect.round,
                "attempt": effect.attempt,
                "is_seed": effect.is_seed,
                "contributed": effect.contributed,
                "state": effect.state,
            },
        )
        self._files.journal.write(line.as_dict())
        self._files.journal.flush(self._syncs_journal)
        self._files.schedule.flush()

    def close(self) -> None:
        """Writes what is left; the view is closed even where it fails to draw."""
        self._files.schedule.close()
        self._files.journal.close()
        if self._view is not None:
            self._view.close()
