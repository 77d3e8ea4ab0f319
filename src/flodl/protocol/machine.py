"""What the controller and a replay have in common: who is heard, and which of their methods each event reaches."""

from __future__ import annotations

from abc import ABC, abstractmethod

from flodl.protocol.effects import (
    CheckpointEnded,
    Committed,
    DriverEvent,
    Effect,
    Interrupted,
    RankExited,
    RankHeard,
    RankSilent,
    RankStopped,
    Reduced,
    StartFailed,
)
from flodl.protocol.ending import Ending
from flodl.protocol.membership import Phase, RankState, Roster
from flodl.protocol.messages import FromRank


class RunMachine(ABC):
    """`receive` and `tell` of a run. What takes `now` returns effects, in order."""

    _roster: Roster
    _ending: Ending

    @property
    def is_over(self) -> bool:
        return self._ending.end is not None

    def receive(self, rank: int, generation: int, message: FromRank, now: float) -> list[Effect]:
        """A rank's message. What a dead or ended generation says is not heard."""
        state = self._heard(rank, generation)
        if state is None:
            return []
        state.heard_at, state.warned, state.is_silent = now, False, False
        try:
            effects = self._dispatch(state, message, now)
        except ValueError as fault:
            effects = self._contradicted(state, fault)
        return effects + self._advance(now)

    def tell(self, event: DriverEvent, now: float) -> list[Effect]:
        """What the driver saw, or the end of something that it was asked to do."""
        if self.is_over:
            return []
        effects: list[Effect] = []
        match event:
            case RankExited():
                effects = self._exited(event, now)
            case StartFailed(rank, generation, error):
                effects = self._exited(RankExited(rank, generation, 127, words=error), now)
            case RankSilent(rank, generation, seconds):
                effects = self._silent(self._heard(rank, generation), seconds)
            case RankStopped(rank, generation, seconds):
                if state := self._heard(rank, generation):
                    effects = self._fell_silent(state, f"stopped by a signal for {seconds:.1f} s")
            case RankHeard(rank, generation):
                if state := self._roster.current(rank, generation):
                    state.is_silent = False
            case Reduced():
                effects = self._reduced(event, now)
            case Committed():
                effects = self._stands(event, now)
            case CheckpointEnded():
                effects = self._checkpoint_ended(event)
            case Interrupted(reason):
                effects = self._interrupted(f"interrupted: {reason}", now)
        return effects + self._advance(now)

    def _heard(self, rank: int, generation: int) -> RankState | None:
        """None for one that is gone, or that was told to end."""
        state = self._roster.current(rank, generation)
        return None if self.is_over or state is None or state.phase is Phase.ENDING else state

    def _silent(self, state: RankState | None, seconds: float) -> list[Effect]:
        if state is None:
            return []
        if state.phase is Phase.STARTING:
            state.is_silent = True  # an interpreter that imports says nothing; the start limit watches it
            return []
        return self._fell_silent(state, f"silent for {seconds:.1f} s")

    @abstractmethod
    def _dispatch(self, state: RankState, message: FromRank, now: float) -> list[Effect]:
        """Raises ValueError for a message that contradicts what is known."""

    @abstractmethod
    def _contradicted(self, state: RankState, fault: ValueError) -> list[Effect]: ...

    @abstractmethod
    def _fell_silent(self, state: RankState, how: str) -> list[Effect]: ...

    @abstractmethod
    def _exited(self, event: RankExited, now: float) -> list[Effect]: ...

    @abstractmethod
    def _reduced(self, event: Reduced, now: float) -> list[Effect]: ...

    @abstractmethod
    def _stands(self, event: Committed, now: float) -> list[Effect]: ...

    def _checkpoint_ended(self, event: CheckpointEnded) -> list[Effect]:
        """Only of a machine that asked for one."""
        return []

    @abstractmethod
    def _interrupted(self, reason: str, now: float) -> list[Effect]: ...

    @abstractmethod
    def _advance(self, now: float) -> list[Effect]:
        """Everything that the last event may have made possible."""
