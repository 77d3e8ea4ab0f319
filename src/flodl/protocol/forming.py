"""How a run begins: everyone is here, one rank gives the initial state, or a checkpoint does."""

from __future__ import annotations

from flodl.protocol import signatures
from flodl.protocol.effects import Effect, Record, Send
from flodl.protocol.membership import Phase, RankState, Roster
from flodl.protocol.messages import Hello, Restore, Seed, Window
from flodl.protocol.settings import Beginning, ControllerSettings

MISFIT = "the checkpoint does not fit"
"""How the reason of a run begins that was refused for what it was to go on from."""


class Forming:
    """From the first Hello to round 0."""

    def __init__(self, settings: ControllerSettings, roster: Roster) -> None:
        self._world_size = settings.world_size
        self._beginning: Beginning | None = settings.beginning
        self._roster = roster

    @property
    def is_under_way(self) -> bool:
        """A rank was asked for the initial state and has not sealed it."""
        return any(s.phase is Phase.ADMITTED and s.window is not None for s in self._roster)

    @property
    def is_awaiting(self) -> bool:
        """Somebody is still to come, or the initial state is."""
        return self.is_under_way or any(s.phase in (Phase.WAITING, Phase.STARTING) for s in self._roster)

    def misfit(self, hello: Hello) -> str:
        """Why what the first rank has built cannot go on from the checkpoint, naming tensors and items; '' if it can.

        The others are compared with the first.
        """
        beginning = self._beginning
        if beginning is None or self._roster.signatures():
            return ""
        wrong = signatures.differences(beginning.layout, hello.layout)
        wrong += signatures.differences(beginning.data, hello.data)
        return f"{MISFIT}: {beginning.path}: " + "; ".join(wrong) if wrong else ""

    def begin(self, members: list[RankState], now: float) -> list[Effect]:
        """The lowest rank seals round 0. Optimizers are restored meanwhile; a joiner later begins with a fresh one."""
        effects: list[Effect] = []
        first = members[0]
        given_by = f"rank {first.rank} gives the initial state"
        if self._beginning is not None:
            path = self._beginning.path
            given_by = f"rank {first.rank} gives the state of {path}"
            effects += [Send(first.rank, Restore(path, consensus=True))]
            effects += [Send(state.rank, Restore(path)) for state in members]
        first.window = Window(0, 0)
        for state in members:
            state.expect(now)
        reason = f"{len(members)} of {self._world_size} ranks are here; {given_by}"
        return [Record("phase", {"phase": "forming", "reason": reason}), *effects, Send(first.rank, Seed())]
