"""Who is in the run: each rank's life from start to exit, admission, restarts, and when losses end the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from flodl.protocol.admission import differences
from flodl.protocol.effects import Admit, Effect, KillRank, OpenHost, RankExited, Record, Send, StartRank
from flodl.protocol.ledger import Holder
from flodl.protocol.messages import Failed, Hello, Refused, Window
from flodl.protocol.settings import ControllerSettings

DIFFERENCES_SAID = 3
"""Of a refusal, in one sentence; the record and the refused rank have all that were found."""
WAITS_REMEMBERED = 5
BACK_OFF_S = 0.5
LONGEST_BACK_OFF_S = 30.0


class Phase(Enum):
    """A rank's place in its life."""

    WAITING = "waiting"  # for its (re)start
    STARTING = "starting"  # the process runs, Hello has not come
    ADMITTED = "admitted"  # has its memory; the run is not formed yet
    ADOPTING = "adopting"  # copies the committed state; nobody waits for it unless it has a window
    ACTIVE = "active"
    ENDING = "ending"  # told to stop, refused or killed; its exit is on the way
    GONE = "gone"


PRESENT = (Phase.ADMITTED, Phase.ADOPTING, Phase.ACTIVE)


@dataclass
class RankState:
    """One rank as the controller knows it. Times are the driver's monotonic seconds."""

    rank: int
    generation: int = -1
    phase: Phase = Phase.WAITING
    start_at: float | None = 0.0
    started_at: float = 0.0
    heard_at: float = 0.0  # last sign of progress
    paused: str | None = None
    is_silent: bool = False
    deaths: int = 0
    device: str = ""
    window: Window | None = None
    told: int | None = None  # the oldest commit that it was told and has not adopted: it may be reading that buffer
    adopted: int | None = None
    trained: int = 0  # batches since its last seal, as last heard
    sealed_batches: int = 0  # in this life
    sealed_step: int = 0  # its step count then
    sealed_at: float = 0.0
    waits_ms: deque[float] = field(
        default_factory=lambda: deque(maxlen=WAITS_REMEMBERED)
    )  # from its seal to the commit
    exclusions: int = 0  # rounds running
    evaluation_ms: float = 0.0
    is_recalling: bool = False  # asked to give leases back, and has not answered: what it holds is not known
    failed: Failed | None = None
    ending_reason: str = ""
    warned: bool = False
    absent_since: float | None = None
    pauses: dict[str, float] = field(default_factory=dict)

    @property
    def holder(self) -> Holder:
        return (self.rank, self.generation)

    def expect(self, now: float) -> None:
        """It was given something to do: its progress is watched from here on."""
        self.heard_at, self.warned = now, False

    @property
    def is_evicted(self) -> bool:
        """Killed for what it did; its exit counts as a death, and it may be restarted."""
        return self.phase is Phase.ENDING and self.ending_reason.startswith("evicted")

    def add_pause(self, kind: str, seconds: float) -> None:
        self.pauses[kind] = self.pauses.get(kind, 0.0) + seconds


@dataclass(frozen=True)
class Loss:
    """How a rank ended. is_death: not asked for. ends_run: why the run cannot go on, or ''."""

    is_death: bool
    reason: str
    ends_run: str = ""
    traceback: str = ""


class Roster:
    """All ranks of the run, by number, across restarts."""

    def __init__(self, settings: ControllerSettings) -> None:
        self._settings = settings
        self._ranks = [RankState(rank) for rank in range(settings.world_size)]
        self._generation = 0
        self._first: Hello | None = None
        self._failures: dict[tuple[int, int] | str, int] = {}  # by batch; by what was said where there was none
        self.deaths = 0
        self.reasons: list[str] = []

    def __iter__(self) -> Iterator[RankState]:
        return iter(self._ranks)

    def __getitem__(self, rank: int) -> RankState:
        return self._ranks[rank]

    @property
    def layout_tensors(self) -> tuple[tuple[int, str], ...]:
        """(offset, name) of every tensor, ascending; empty before the first Hello."""
        return tuple((t.offset, t.name) for t in self._first.layout.tensors) if self._first else ()

    def signatures(self) -> dict[str, Any]:
        """The model's and the data's, as every rank has agreed on; empty before the first Hello."""
        return {"layout": self._first.layout, "data": self._first.data} if self._first else {}

    def present(self) -> list[RankState]:
        return [state for state in self._ranks if state.phase in PRESENT]

    def is_lost(self) -> bool:
        """Nobody is here and nobody is coming."""
        return all(s.phase in (Phase.GONE, Phase.ENDING) and not s.is_evicted for s in self._ranks)

    def awaits_somebody(self) -> bool:
        """Somebody who is not here yet is on the way."""
        coming = (Phase.WAITING, Phase.STARTING, Phase.ADMITTED, Phase.ADOPTING)
        return any(state.phase in coming or state.is_evicted for state in self._ranks)

    def current(self, rank: int, generation: int) -> RankState | None:
        """The state that a message of this generation speaks for; None if it speaks for nobody any more."""
        state = self._ranks[rank] if 0 <= rank < len(self._ranks) else None
        if state is None or state.generation != generation or state.phase in (Phase.WAITING, Phase.GONE):
            return None
        return state

    # ---- starting

    def start_due(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for state in self._ranks:
            if state.phase is Phase.WAITING and state.start_at is not None and state.start_at <= now:
                again = f"restart {state.deaths} of {self._settings.respawn}"
                reason = again if state.deaths else "the run starts"
                self._begin_life(state, now)
                effects.append(StartRank(state.rank, state.generation, reason))
        return effects

    def _begin_life(self, state: RankState, now: float) -> None:
        state.generation = self._generation
        self._generation += 1
        state.phase = Phase.STARTING
        state.start_at = None
        state.started_at = state.heard_at = now
        state.window = state.told = state.adopted = state.failed = state.paused = None
        state.trained = state.sealed_batches = state.sealed_step = state.exclusions = 0
        state.warned = state.is_silent = state.is_recalling = False
        state.ending_reason = ""

    def admit(self, state: RankState, hello: Hello) -> list[Effect]:
        """Admission or refusal. The first rank sets what the others must agree with."""
        state.device = hello.device
        wrong = differences(self._settings.plan, hello, self._first)
        if wrong:
            state.phase = Phase.ENDING
            more = f"; and {len(wrong) - DIFFERENCES_SAID} more" if len(wrong) > DIFFERENCES_SAID else ""
            state.ending_reason = f"rank {state.rank} was refused: {'; '.join(wrong[:DIFFERENCES_SAID])}{more}"
            self.reasons.append(state.ending_reason)
            return [
                Send(state.rank, Refused(tuple(wrong))),
                Record("refused", {"rank": state.rank, "generation": state.generation, "differences": wrong}),
            ]
        effects: list[Effect] = []
        if self._first is None:
            self._first = hello
            effects.append(OpenHost(hello.layout))
        state.phase = Phase.ADMITTED
        effects.append(Admit(state.rank, state.generation))
        fields = {"rank": state.rank, "generation": state.generation, "device": hello.device, "pid": hello.pid}
        return [*effects, Record("join", fields)]

    # ---- absence

    def begin_accounts(self, now: float) -> None:
        """The training begins: pauses before it took nothing from it."""
        for state in self._ranks:
            state.pauses.clear()
            state.absent_since = None if state.absent_since is None else now

    def account_absence(self, state: RankState, until: float) -> None:
        """From its death to `until` a rank could do nothing: a pause of the run's making."""
        if state.absent_since is not None and until > state.absent_since:
            state.add_pause("absent", until - state.absent_since)
            state.absent_since = None

    def account_absences(self, until: float) -> None:
        """Of the ranks that are still away at the end of the training."""
        for state in self._ranks:
            self.account_absence(state, until)

    # ---- ending

    def kill(self, state: RankState, reason: str) -> list[Effect]:
        """Ends a rank's process; what it says from now on is not heard."""
        state.phase = Phase.ENDING
        state.ending_reason = reason
        state.window = None
        return [KillRank(state.rank, state.generation, reason)]

    def lose(self, state: RankState, event: RankExited, round_: int | None, now: float) -> Loss:
        """A rank's process ended. Decides whether it comes back, and whether the run can go on.

        round_: the last committed; None: the run has not formed.
        """
        if state.phase is Phase.ENDING and not state.is_evicted:
            state.phase = Phase.GONE
            return Loss(False, state.ending_reason)
        reason = self._how_it_ended(state, event)
        traceback = state.failed.traceback if state.failed else event.words
        was_starting = state.phase is Phase.STARTING
        self.deaths += 1
        state.deaths += 1
        state.absent_since = now
        self.reasons.append(reason)
        ends_run = self._ends_run(state, event, round_, was_starting)
        if not ends_run and state.deaths <= self._settings.respawn:
            state.phase = Phase.WAITING
            state.start_at = now + min(BACK_OFF_S * 2 ** (state.deaths - 1), LONGEST_BACK_OFF_S)
        else:
            state.phase = Phase.GONE
        state.window = state.told = None
        return Loss(True, reason, ends_run, traceback)

    def _how_it_ended(self, state: RankState, event: RankExited) -> str:
        who = f"rank {state.rank}"
        if state.is_evicted:
            return f"{who} was {state.ending_reason}"
        if state.failed:
            return f"{who} failed: {state.failed.error}"
        if event.code < 0:
            return f"{who} was killed by signal {-event.code}"
        if event.code == 0 and state.phase is Phase.STARTING:
            return f"{who}'s script ended without reaching its run()"
        return f"{who} exited with code {event.code}"

    def _ends_run(self, state: RankState, event: RankExited, round_: int | None, was_starting: bool) -> str:
        if was_starting and event.code >= 0 and round_ is None:
            return "a rank failed before training began"
        if state.failed and not round_:
            return "a rank failed before the first round was committed"
        if state.failed:
            what = state.failed.batch or state.failed.error
            self._failures[what] = self._failures.get(what, 0) + 1
            if self._failures[what] > 1:
                batch = state.failed.batch
                return f"batch {batch[1]} of epoch {batch[0]} failed twice" if batch else "a rank failed twice alike"
        most = self._settings.max_failures
        if most is not None:
            limit = most if isinstance(most, int) else most * self._settings.world_size
            if self.deaths > limit:
                return f"{self.deaths} deaths are over max_failures={most}"
        return ""
