"""One rank's part in a replay: what it is asked to do next, and whether what it did is what was recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from flodl.protocol.effects import Committed, StartRank
from flodl.protocol.ledger import Holder
from flodl.protocol.membership import Phase, RankState
from flodl.protocol.messages import Adopted, BatchRange, Commit, Continue, Sealed, Seed, ToRank, Window
from flodl.protocol.script import Adopt, Life, Seal, take


class Part:
    """The lives of one rank, one after the other. At most an adoption and the seal after it are asked for at a time."""

    def __init__(self, state: RankState, lives: tuple[Life, ...]) -> None:
        self.state = state
        self._lives = deque(lives)
        self._life: Life | None = None
        self._leases: deque[BatchRange] = deque()
        self._granted = 0
        self._asked = 0  # acts of this life
        self._done = 0
        self._to_evaluate: set[int] = set()
        if not lives:
            state.phase = Phase.GONE

    @property
    def holder(self) -> Holder:
        return self.state.holder

    @property
    def done(self) -> int:
        """Acts of this life that are done."""
        return self._done

    @property
    def has_more_lives(self) -> bool:
        return bool(self._lives)

    @property
    def is_played(self) -> bool:
        """Everything recorded of this life is done; nothing of it is waited for."""
        return self._life is not None and self._done == len(self._life.acts) and not self._to_evaluate

    @property
    def is_to_die(self) -> bool:
        """It is time for the death that was recorded."""
        return self._life is not None and self._life.is_killed and self.is_played

    def begin(self, now: float) -> StartRank:
        """The next life."""
        self._life = self._lives.popleft()
        self._leases = deque(self._life.batches)
        self._granted = self._asked = self._done = 0
        self._to_evaluate.clear()
        state = self.state
        state.generation = self._life.generation
        state.phase = Phase.STARTING
        state.start_at = None
        state.started_at = state.heard_at = now
        state.window = state.told = state.adopted = state.failed = state.paused = None
        state.trained = state.sealed_batches = state.sealed_step = 0
        state.warned = state.is_silent = False
        state.ending_reason = ""
        return StartRank(state.rank, state.generation, "restarted as recorded" if state.deaths else "the replay starts")

    # ---- what it is asked

    def next_message(self, standing: Mapping[int, Committed], evaluates: bool) -> ToRank | None:
        """None while it is at work, waits for a round to stand, or has nothing more to do.

        standing: the rounds whose θ can be read, the last committed and the one before.
        """
        assert self._life is not None
        acts = self._life.acts
        if self._asked > self._done or self._done == len(acts):
            return None
        act = acts[self._done]
        if isinstance(act, Seal):
            self.state.window = self._window(self._done)
            self._asked += 1
            return Seed() if act.round == 0 else Continue(self.state.window, self._grant())
        committed = standing.get(act.round)
        if committed is None:
            return None
        return self._commit(act, committed, act.evaluates if evaluates else ())

    def _commit(self, act: Adopt, committed: Committed, evaluates: tuple[int, ...]) -> Commit:
        """With the window up to the seal that follows, if one does."""
        assert self._life is not None
        self._asked += 1
        window = None
        if self._asked < len(self._life.acts) and isinstance(self._life.acts[self._asked], Seal):
            window = self._window(self._asked)
            self._asked += 1
        self.state.window, self.state.told = window, act.round
        if self.state.phase is Phase.ADMITTED:
            self.state.phase = Phase.ADOPTING
        self._to_evaluate.update(evaluates)
        return Commit(
            round=act.round,
            buffer=committed.buffer,
            hash=committed.hash,
            window=window,
            grant=self._grant(),
            excluded=act.is_excluded,
            evaluate=evaluates,
            adopt_at=act.step,
        )

    def _window(self, at: int) -> Window:
        """Up to the seal at this place, and on to the adoption that follows it."""
        assert self._life is not None
        seal = self._life.acts[at]
        assert isinstance(seal, Seal)
        after = self._life.acts[at + 1] if at + 1 < len(self._life.acts) else None
        ahead = after.step - seal.step if isinstance(after, Adopt) else 0
        return Window(seal.round, seal.count, ahead)

    def _grant(self) -> tuple[BatchRange, ...]:
        """What is asked for, and one window more for the loader to read ahead."""
        assert self._life is not None
        last = min(self._asked + 1, len(self._life.acts) - 1)
        more = self._life.acts[last].step - self._granted
        self._granted += max(0, more)
        return take(self._leases, more)

    # ---- what it did; each raises ValueError where something else was recorded

    def sealed(self, message: Sealed) -> Seal:
        act = self._next_act()
        did = (message.round, message.step, message.batches, message.samples)
        if not isinstance(act, Seal) or did != (act.round, act.step, act.count, act.samples):
            raise ValueError(
                f"sealed round {message.round} at step {message.step} with {message.batches} batches "
                f"({message.samples} samples); recorded: {_words(act)}"
            )
        self._done += 1
        self.state.window = None
        self.state.sealed_batches += message.batches
        self.state.sealed_step = message.step
        return act

    def adopted(self, message: Adopted) -> Adopt:
        act = self._next_act()
        if not isinstance(act, Adopt) or (message.round, message.step) != (act.round, act.step):
            raise ValueError(f"adopted round {message.round} at step {message.step}; recorded: {_words(act)}")
        self._done += 1
        self.state.told, self.state.adopted = None, message.round
        self.state.phase = Phase.ACTIVE
        return act

    def evaluated(self, epoch: int) -> None:
        self._to_evaluate.discard(epoch)

    def _next_act(self) -> Seal | Adopt | None:
        assert self._life is not None
        return self._life.acts[self._done] if self._done < self._asked else None


def _words(act: Seal | Adopt | None) -> str:
    if act is None:
        return "nothing more"
    if isinstance(act, Adopt):
        return f"adopted round {act.round} at step {act.step}"
    return f"sealed round {act.round} at step {act.step} with {act.count} batches ({act.samples} samples)"
