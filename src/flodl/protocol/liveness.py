"""Progress limits: which rank has been expected to move for too long. Silence of a link is seen elsewhere (C++)."""

from __future__ import annotations

from flodl.protocol.cadence import Cadence
from flodl.protocol.membership import PRESENT, Phase, RankState
from flodl.protocol.settings import ControllerSettings

SHORTEST_STALL_S = 60.0
STALL_BATCHES = 20


class Progress:
    """How long each rank may go without a sign of progress while it is expected to work."""

    def __init__(self, settings: ControllerSettings, cadence: Cadence) -> None:
        self._settings = settings
        self._cadence = cadence

    def limit_s(self, state: RankState) -> float:
        if self._settings.stall_s is not None:
            return self._settings.stall_s
        return max(SHORTEST_STALL_S, STALL_BATCHES * (self._cadence.ms(state.rank) or 0.0) / 1000.0)

    def is_expected_to_move(self, state: RankState) -> bool:
        if state.paused is not None:
            return False
        if state.phase is Phase.STARTING:
            return state.is_silent
        has_work = state.window is not None or state.told is not None or state.is_recalling
        return state.phase in (Phase.ADMITTED, Phase.ADOPTING, Phase.ACTIVE) and has_work

    def deadline(self, state: RankState) -> float | None:
        """When something is to be said or done about this rank."""
        if state.paused is not None:
            return None if state.warned or state.phase not in PRESENT else state.heard_at + self.limit_s(state)
        if not self.is_expected_to_move(state):
            return None
        if state.phase is Phase.STARTING:
            return state.started_at + self._settings.start_limit_s
        limit = self.limit_s(state)
        return state.heard_at + (limit if state.warned else limit / 2)

    def verdict(self, state: RankState, now: float) -> tuple[str, str]:
        """('', ''), ('warn', why) or ('evict', why)."""
        due = self.deadline(state)
        if due is None or now < due:
            return "", ""
        if state.paused is not None:
            lasts = f"rank {state.rank} has been in {state.paused!r} for {now - state.heard_at:.0f} s"
            return "warn", f"{lasts}; it is waited for"
        if state.phase is Phase.STARTING:
            waited = f"evicted: it has not reached run() {self._settings.start_limit_s:.0f} s after its start"
            return "evict", f"{waited}; load data later (in model() or the data set's items), or raise stall_s"
        idle = now - state.heard_at
        limit = self.limit_s(state)
        if state.warned or now >= state.heard_at + limit:
            return "evict", f"evicted: no progress for {idle:.1f} s (stall_s {limit:.0f})"
        so_far = f"rank {state.rank} has made no progress for {idle:.1f} s"
        return "warn", f"{so_far}; at {limit:.0f} s it is evicted (stall_s)"
