"""How a run ends: everyone is told to stop and waited for, or killed at once."""

from __future__ import annotations

from flodl.protocol.effects import Effect, EndRun, KillRank, Record, Send
from flodl.protocol.membership import Loss, Phase, Roster
from flodl.protocol.messages import Stop
from flodl.protocol.story import Story

STOP_GRACE_S = 10.0
"""A rank told to stop that still runs after so long is killed: its work is already committed."""


class Ending:
    """`reason` is empty until the end has begun; `end` is None until the run is over."""

    def __init__(self, roster: Roster, story: Story) -> None:
        self._roster = roster
        self._story = story
        self.reason = ""
        self.stop_by: float | None = None
        self.end: EndRun | None = None

    def begin(self, reason: str, now: float) -> list[Effect]:
        """Everyone who is here is told to stop; who is not here yet does not come."""
        if self.reason:
            return []
        self.reason = reason
        self.stop_by = now + STOP_GRACE_S
        effects: list[Effect] = [Record("phase", {"phase": "ending", "reason": reason})]
        for state in self._roster:
            if state.phase is Phase.WAITING:
                state.phase = Phase.GONE
            elif state.phase is Phase.STARTING:
                effects += self._roster.kill(state, reason)
            elif state.phase in (Phase.ADMITTED, Phase.ADOPTING, Phase.ACTIVE):
                state.phase, state.ending_reason, state.window = Phase.ENDING, reason, None
                effects.append(Send(state.rank, Stop(reason)))
        return effects

    def kill_overdue(self, now: float) -> list[Effect]:
        """Ranks that were told to stop and did not."""
        if self.stop_by is None or now < self.stop_by:
            return []
        self.stop_by = now + STOP_GRACE_S
        ending = [s for s in self._roster if s.phase is Phase.ENDING]
        return [KillRank(s.rank, s.generation, "told to stop and still running") for s in ending]

    def complete(self, is_round_idle: bool, is_complete: bool) -> list[Effect]:
        """The run is over once every rank is gone and no round is in flight."""
        if not is_round_idle or any(s.phase is not Phase.GONE for s in self._roster):
            return []
        return self._over(EndRun(self.reason, failed=not is_complete))

    def fail(self, reason: str, traceback: str = "") -> list[Effect]:
        """Ends at once. What is committed stands and is saved by the driver."""
        effects: list[Effect] = []
        for state in self._roster:
            if state.phase not in (Phase.WAITING, Phase.GONE, Phase.ENDING):
                effects += self._roster.kill(state, reason)
        return effects + self._over(EndRun(reason, True, traceback))

    def fail_for_loss(self, what: str, last: Loss | None) -> list[Effect]:
        """Every rank is gone for good. What they had sealed is committed by now."""
        return self.fail(f"{what}: " + "; ".join(self._roster.reasons[-3:]), last.traceback if last else "")

    def _over(self, end: EndRun) -> list[Effect]:
        self.end = end
        self._story.reasons.append(end.reason)
        return [Record("phase", {"phase": "failed" if end.failed else "done", "reason": end.reason}), end]
