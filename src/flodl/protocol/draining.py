"""An end before all is done: what was trained is committed and saved first, so that a resume lacks nothing of it."""

from __future__ import annotations

from flodl.protocol.cadence import Cadence
from flodl.protocol.commits import Commits
from flodl.protocol.effects import Effect, Record
from flodl.protocol.membership import Roster
from flodl.protocol.windows import Duties, Windows

DRAIN_S = 10.0
DRAIN_BATCHES = 3
"""An interrupted run is given so long, and so many batches of its slowest rank, to commit and save what it trained."""


class Draining:
    """`reason` is empty until it has begun; `ends_by`: then the run ends, whatever is saved by then."""

    def __init__(self, roster: Roster, cadence: Cadence, commits: Commits, windows: Windows, duties: Duties) -> None:
        self._roster = roster
        self._cadence = cadence
        self._commits = commits
        self._windows = windows
        self._saves = duties.saves
        self._has_saved_last = False
        self.reason = ""
        self.ends_by: float | None = None

    @property
    def is_done(self) -> bool:
        """It has begun, and the checkpoint is whole or given up."""
        return bool(self.reason) and not self._saves.is_due and not self._saves.is_under_way

    def begin(self, reason: str, now: float) -> list[Effect]:
        """Nothing where no checkpoints are made or nobody is here."""
        if not self._roster.present() or not self._saves.demand():
            return []
        slowest = max((self._cadence.ms(s.rank) or 0.0 for s in self._roster.present()), default=0.0) / 1000.0
        self.reason, self.ends_by = reason, now + DRAIN_S + DRAIN_BATCHES * slowest
        self._windows.hurry(now)
        return [Record("phase", {"phase": "saving", "reason": f"{reason}; a checkpoint is made first"})]

    def is_overdue(self, now: float) -> bool:
        return self.ends_by is not None and now >= self.ends_by

    def save_without_ranks(self, now: float) -> list[Effect]:
        """Once: nobody is left to write, and the host writes what it has."""
        if self._has_saved_last or not self._saves.demand():
            return []
        self._has_saved_last = True
        return self._commits.save_last(now)
