"""Checkpoints as the controller makes them: when one is due, who writes which part, and when it is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flodl.protocol.cadence import Cadence
from flodl.protocol.effects import (
    CheckpointEnded,
    DropCheckpoint,
    Effect,
    FinishCheckpoint,
    Record,
    SavedFile,
    SaveVelocity,
)
from flodl.protocol.ledger import Holder, Ledger
from flodl.protocol.membership import Phase, RankState, Roster
from flodl.protocol.messages import Saved
from flodl.protocol.settings import ControllerSettings, SaveSettings
from flodl.protocol.story import Story

CONSENSUS = "consensus.safetensors"


@dataclass(frozen=True)
class Order:
    """What one rank writes at a commit. directory '': nothing."""

    directory: str = ""
    saves_consensus: bool = False


NO_ORDER = Order()


@dataclass
class _Save:
    """One checkpoint in the making. state: as of its round; awaited: (holder, file) still to come."""

    round: int
    number: int
    directory: str
    state: dict[str, Any]
    epochs: tuple[int, ...]
    awaited: set[tuple[Holder, str]]
    files: list[SavedFile] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    has_velocity: bool = False
    is_finishing: bool = False


class Saves:
    """At most one checkpoint is in the making. Without settings.saves nothing is ever due."""

    def __init__(
        self, settings: ControllerSettings, ledger: Ledger, roster: Roster, cadence: Cadence, story: Story
    ) -> None:
        self._settings: SaveSettings | None = settings.saves
        self._is_async = settings.mode.endswith("-async")
        self._ledger = ledger
        self._roster = roster
        self._cadence = cadence
        self._story = story
        self._is_due = False
        self._announced = -1
        self._whole = -1
        self._save: _Save | None = None

    @property
    def is_due(self) -> bool:
        return self._is_due

    def demand(self) -> bool:
        """The run is to end before its time: a checkpoint is due at the next commit. False if none are made."""
        self._is_due = self._settings is not None
        return self._is_due

    @property
    def is_under_way(self) -> bool:
        return self._save is not None

    def closed(self, epochs: Iterable[int]) -> None:
        """These epochs are closed by the round that is about to be committed."""
        if self._settings is None:
            return
        every = self._settings.every_epochs
        self._is_due |= self._ledger.is_complete or any((epoch + 1) % every == 0 for epoch in epochs)

    def announces(self, round_: int, opens: bool) -> bool:
        """async: whether the windows of this round say that it may be saved.

        opens: asked as the round opens, which decides for every window of it; a rank that keeps no copy at its seal has
        nothing to save once it has trained on.
        """
        if not self._is_async or self._settings is None:
            return False
        if opens and self._may_come():
            self._announced = round_
        return self._announced == round_

    def _may_come(self) -> bool:
        if self._is_due or self._ledger.is_complete:
            return True
        epoch, every = self._ledger.current_epoch, self._settings.every_epochs if self._settings else 1
        is_last = self._ledger.unsettled() == self._ledger.unsettled_in(epoch)
        return self._ledger.is_dealt_out(epoch) and (is_last or (epoch + 1) % every == 0)

    def begin(self, round_: int, members: list[RankState]) -> dict[int, Order]:
        """At the commit of a round: who writes what. Empty also where nobody is here: the host writes what it has."""
        settings = self._settings
        if round_ == self._whole:
            # Only batches given up as not finite came since: a resume finds them once more.
            self._is_due = False
        if settings is None or not self._is_due or self._save is not None or round_ == 0:
            return {}
        # At the end nobody trains on after the seal, so that every optimizer stands as it did then.
        if self._is_async and self._announced != round_ and not self._ledger.is_complete:
            return {}
        # One that has yet to adopt did not seal this round. At the end nobody trained on since, so that it counts.
        writers = [s for s in members if s.phase is Phase.ACTIVE and (s.told is None or self._ledger.is_complete)]
        number = settings.first_number + round_
        directory = f"{settings.directory}/.partial-{settings.run}-round-{number:06d}"
        awaited = {(state.holder, _part_of(state.rank)) for state in writers}
        awaited |= {(state.holder, CONSENSUS) for state in writers[:1]}
        state = self._snapshot()
        epochs = tuple(range(self._ledger.current_epoch))
        self._save = _Save(round_, number, directory, state, epochs, awaited)
        self._is_due = False
        return {writer.rank: Order(directory, writer is writers[0]) for writer in writers}

    def velocity(self) -> list[Effect]:
        """Once per checkpoint: after the ranks were told, and before anything else can be committed."""
        if self._save is None or self._save.has_velocity:
            return []
        self._save.has_velocity = True
        return [SaveVelocity(self._save.round, self._save.directory)]

    def saved(self, holder: Holder, message: Saved) -> list[Effect]:
        """Raises ValueError for a part that was not asked for."""
        save = self._save
        if save is None or message.round != save.round or (holder, message.path) not in save.awaited:
            raise ValueError(f"saved {message.path} of round {message.round}, which nobody asked for")
        save.awaited.remove((holder, message.path))
        if message.error:
            save.faults.append(f"rank {holder[0]}: {message.error}")
        else:
            save.files.append(SavedFile(message.path, message.digest, message.size))
        return [Record("saved", {"rank": holder[0], "round": save.round, "path": message.path, "error": message.error})]

    def lost(self, holder: Holder, is_ending: bool) -> None:
        """The checkpoint is made whole without what this rank had not written, unless the run's end is the reason."""
        if self._save is None:
            return
        left = {part for part in self._save.awaited if part[0] != holder}
        if is_ending and left != self._save.awaited:
            self._save.faults.append(f"the run ended before rank {holder[0]} had written its part")
        self._save.awaited = left

    def advance(self, awaits_metrics: Callable[[Iterable[int]], bool]) -> list[Effect]:
        """Every part has come, and the metrics of the epochs in it: it is made whole, or given up."""
        save = self._save
        if save is None or save.is_finishing or save.awaited:
            return []
        if save.faults:
            return [DropCheckpoint(save.number), *self._give_up(save, "; ".join(save.faults))]
        if awaits_metrics(save.epochs):
            return []
        save.is_finishing = True
        for epoch in save.epochs:
            save.state["epochs"][epoch]["metrics"] = dict(self._story.epochs[epoch].metrics)
        has_consensus = any(file.name == CONSENSUS for file in save.files)
        files = tuple(sorted(save.files, key=lambda file: file.name))
        return [FinishCheckpoint(save.round, save.number, save.directory, files, save.state, not has_consensus)]

    def ended(self, event: CheckpointEnded) -> list[Effect]:
        """The driver made it whole, or could not."""
        save = self._save
        if save is None or save.round != event.round:
            return []
        if event.error:
            return self._give_up(save, event.error)
        self._save, self._whole = None, save.round
        fields = {"round": event.round, "number": save.number, "path": event.path, "seconds": event.seconds}
        return [Record("checkpoint", fields)]

    def _snapshot(self) -> dict[str, Any]:
        """How far the run has come, as of the commit that stands now."""
        return {
            **self._roster.signatures(),
            "contributed": self._ledger.contributed_ranges(),
            "quarantined": tuple(self._ledger.quarantined()),
            "epochs": [
                {
                    "epoch": number,
                    "loss_sum": story.loss_sum,
                    "samples": story.samples,
                    "round": story.closed_in_round,
                    "metrics": {},
                }
                for number, story in enumerate(self._story.epochs)
            ],
            "anchor": self._cadence.anchor,
            "ranks": [
                {
                    "rank": state.rank,
                    "device": state.device,
                    "batches": self._story.batches_of(state.rank),
                    "ms_per_batch": self._cadence.ms(state.rank),
                }
                for state in self._roster
            ],
        }

    def _give_up(self, save: _Save, why: str) -> list[Effect]:
        """Training goes on; the next one is made as if nothing had happened."""
        self._save = None
        reason = f"no checkpoint of round {save.round}: {why}"
        self._story.degrade(reason)
        return [Record("warning", {"round": save.round, "reason": reason})]


def _part_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"
