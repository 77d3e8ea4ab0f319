"""The life of a rank between Welcome and Stop: listen, adopt, seal, train one batch, and again.

It knows its leases, a plane that seals and adopts, and the work of one batch; nothing of sockets, memory or torch.
Everything the controller says takes effect at a step boundary, and only there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec

from flodl.errors import WireError
from flodl.protocol.messages import (
    Adopted,
    BatchRange,
    Commit,
    Continue,
    Evaluated,
    FromRank,
    Grant,
    Leaving,
    Paused,
    Progress,
    Recall,
    Recalled,
    Restore,
    Resumed,
    Saved,
    Sealed,
    SealNow,
    Seed,
    Stop,
    ToRank,
    Window,
)
from flodl.rank.leases import Lease, Leases
from flodl.rank.tally import Tally, Trained

PROGRESS_S = 0.5
"""In a window of known length, progress is told this often; in an open one after each batch."""


class Line(Protocol):
    """The link to the controller."""

    def receive(self, wait: bool) -> list[ToRank]:
        """What has arrived, in order; with `wait`, at least one message, however long that takes."""

    def send(self, message: FromRank) -> None: ...


class Plane(Protocol):
    """The rank's parameters as others see them (averaging/cpu.py)."""

    @property
    def keeps_steps(self) -> bool: ...
    def seal(self) -> None: ...
    def adopt(self, buffer: int, overwrite: bool) -> int: ...
    def showing(self, buffer: int) -> AbstractContextManager[None]: ...


class Work(Protocol):
    """What the rank does with its leases."""

    def follow(self, upcoming: Leases) -> None:
        """The leases held changed: read ahead along them, drop what is no longer held."""

    def train(self, lease: Lease, upcoming: Leases) -> Trained: ...
    def forget(self) -> None: ...
    def evaluate(self, epoch: int) -> dict[str, float]: ...


class Saving(Protocol):
    """Checkpoints, as the loop sees them (rank/saving.py)."""

    def keep(self) -> Any:
        """What save() needs of the rank as it is now; given back to it later."""

    def save(self, commit: Commit, kept: Any) -> list[Saved]: ...
    def restore_state(self, path: str) -> None: ...
    def restore_consensus(self, path: str) -> None: ...


class RankLoop:
    """One rank's loop. `step` counts the batches of this process; `current` is the batch in work, for a failure."""

    def __init__(
        self,
        line: Line,
        plane: Plane,
        work: Work,
        clock: Callable[[], float] = time.monotonic,
        saving: Saving | None = None,
    ) -> None:
        """saving: None where the run has no checkpoints."""
        self._line = line
        self._plane = plane
        self._work = work
        self._clock = clock
        self._saving = saving
        self._kept: Any = None  # what saving kept at the last seal, until the round is adopted
        self._leases = Leases()
        self._window: Window | None = None
        self._ahead = 0  # batches that may still be trained without a window, while the round runs
        self._commit: Commit | None = None
        self._seals_round = -1  # whose window was ended by SealNow, which may come before that window is taken up
        self._is_stopping = False
        self._tally = Tally()
        self._told_at = float("-inf")
        self.step = 0
        self.current: Lease | None = None

    def run(self) -> None:
        """Until Stop. Whatever the work raises passes through."""
        while True:
            for message in self._line.receive(wait=not self._has_work()):
                self._handle(message)
            if self._is_stopping:
                break
            if self._commit is not None and self._is_due(self._commit):
                self._adopt(self._commit)
            if self._must_seal():
                self._seal()
            if self._may_train():
                self._train()
        self._line.send(Leaving(self.step))

    # ---- what to do

    def _has_work(self) -> bool:
        may_adopt = self._commit is not None and self._is_due(self._commit)
        return may_adopt or self._must_seal() or self._may_train()

    def _is_due(self, commit: Commit) -> bool:
        return self.step >= commit.adopt_at

    def _must_seal(self) -> bool:
        window = self._window
        if window is None:
            return False
        if window.batches is None:
            # Not with nothing done while there is work: it would be given the same window again, and again.
            return self._seals_round == window.round and (self._tally.batches > 0 or not self._leases)
        return self._seals_round == window.round or self._tally.batches >= window.batches

    def _may_train(self) -> bool:
        """Within the window, or ahead of the next one; only batches that are leased."""
        return bool(self._leases) and not self._must_seal() and (self._window is not None or self._ahead > 0)

    # ---- what the controller says

    def _handle(self, message: ToRank) -> None:
        match message:
            case Restore():
                self._restore(message)
            case Seed(round):
                self._plane.seal()
                self._send_sealed(round)
            case Grant(batches):
                self._grant(batches)
            case Commit():
                if self._commit is not None:
                    self._save(self._commit)
                    message = _latest(self._commit, message)
                self._commit = message
                self._grant(message.grant)
            case Continue(window, grant):
                self._window = window
                self._seals_round = -1  # what was said before concerned its earlier window in this round
                self._grant(grant)
            case SealNow(round):
                self._seals_round = round
            case Recall(keep):
                first = self._leases.recall(keep)
                self._work.follow(self._leases)
                self._line.send(Recalled() if first is None else Recalled(first.epoch, first.index))
            case Stop():
                self._is_stopping = True
            case _:
                raise WireError(f"the controller sent {type(message).__name__} to a rank that is admitted")

    def _grant(self, batches: tuple[BatchRange, ...]) -> None:
        if batches:
            self._leases.grant(batches)
            self._work.follow(self._leases)

    # ---- what the rank does

    def _adopt(self, commit: Commit) -> None:
        self._commit = None
        self._save(commit)
        ahead = self._tally.batches
        taken = self._plane.adopt(commit.buffer, commit.excluded)
        if commit.excluded:
            self._work.forget()
            self._undo()
        kept = ahead if self._plane.keeps_steps and not commit.excluded else 0
        self._window, self._ahead = commit.window, 0
        self._line.send(Adopted(commit.round, self.step, taken, kept))
        if commit.evaluate:
            self._evaluate(commit)

    def _undo(self) -> None:
        """θ took the place of what was trained since the seal: those batches are trained again, and count then."""
        undone, self._tally = self._tally, Tally(pause_ms=self._tally.pause_ms)
        self.step -= undone.batches
        self._leases.put_back(undone.leases)
        self._work.follow(self._leases)

    def _evaluate(self, commit: Commit) -> None:
        """On the committed state; afterwards the rank goes on from where it was, bit for bit."""
        began = self._clock()
        self._line.send(Paused("evaluate"))
        with self._plane.showing(commit.buffer):
            for epoch in commit.evaluate:
                started = self._clock()
                metrics = self._work.evaluate(epoch)
                self._line.send(Evaluated(epoch, commit.round, metrics, self._clock() - started))
        self._line.send(Resumed("evaluate", self._clock() - began))

    def _save(self, commit: Commit) -> None:
        """Before adopting, so that the buffer stays what it is and a waiting rank's optimizer stands as at the seal."""
        kept, self._kept = self._kept, None
        if not commit.save:
            return
        if commit.excluded:
            self._work.forget()
            kept = None
        began = self._clock()
        self._line.send(Paused("checkpoint"))
        for answer in self._checkpoints().save(commit, kept):
            self._line.send(answer)
        self._line.send(Resumed("checkpoint", self._clock() - began))

    def _restore(self, message: Restore) -> None:
        began = self._clock()
        self._line.send(Paused("restore"))
        if message.consensus:
            self._checkpoints().restore_consensus(message.path)
        else:
            self._checkpoints().restore_state(message.path)
        self._line.send(Resumed("restore", self._clock() - began))

    def _checkpoints(self) -> Saving:
        if self._saving is None:
            raise WireError("the controller spoke of checkpoints to a rank that has none")
        return self._saving

    def _seal(self) -> None:
        assert self._window is not None
        self._plane.seal()
        window, self._window = self._window, None
        self._kept = self._checkpoints().keep() if window.saves else None
        self._ahead = window.run_ahead
        self._send_sealed(window.round)

    def _send_sealed(self, round: int) -> None:
        tally, self._tally = self._tally, Tally()
        if tally.pause_ms > 0.0:
            self._line.send(Resumed("callbacks", tally.pause_ms / 1e3))
        self._line.send(
            Sealed(
                round,
                self.step,
                tally.batches,
                tally.samples,
                tally.report(),
                tally.losses(),
                tally.factor,
                tally.suspects(),
            )
        )

    def _train(self) -> None:
        """One batch. The process's first may compile: it is a declared pause, its cost is in the window's report."""
        lease = self.current = self._leases.next()
        is_first = self.step == 0
        if is_first:
            self._line.send(Paused("first batch"))
        trained = self._work.train(lease, self._leases)
        if is_first:
            self._line.send(Resumed("first batch", 0.0))
        self.current = None
        self.step += 1
        self._tally.add(lease, trained)
        if self._window is None:
            self._ahead -= 1
        self._tell_progress()

    def _tell_progress(self) -> None:
        now = self._clock()
        is_open = self._window is not None and self._window.batches is None
        if is_open or now - self._told_at >= PROGRESS_S:
            self._told_at = now
            self._line.send(Progress(self.step, self._tally.batches, self._tally.last_loss))


def _latest(earlier: Commit, later: Commit) -> Commit:
    """Two commits before one boundary: the later state counts, and whatever was asked for with the earlier."""
    return msgspec.structs.replace(
        later, excluded=earlier.excluded or later.excluded, evaluate=(*earlier.evaluate, *later.evaluate)
    )
