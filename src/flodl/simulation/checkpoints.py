"""An independent account of the checkpoints of a simulated run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flodl.protocol.effects import CheckpointEnded, DropCheckpoint, FinishCheckpoint, SaveVelocity
from flodl.simulation.scenario import Batch, Outcome, Scenario

Complain = Callable[[str], Exception]


class Checkpoints:
    """Each names exactly what was contributed when its round was committed. `standing`: the committed round."""

    def __init__(self, scenario: Scenario, outcome: Outcome, complain: Complain) -> None:
        self._scenario = scenario
        self._outcome = outcome
        self._complain = complain
        self._contributed: dict[int, frozenset[Batch]] = {}
        self._begun: set[int] = set()

    def committed(self, round_: int, contributed: set[Batch]) -> None:
        if self._scenario.settings.saves is not None:
            self._contributed[round_] = frozenset(contributed)

    def velocity(self, effect: SaveVelocity, standing: int) -> None:
        if effect.round != standing or effect.round in self._begun:
            raise self._complain(f"the velocity of round {effect.round} is wanted when round {standing} stands")
        self._begun.add(effect.round)

    def finish(self, effect: FinishCheckpoint, standing: int) -> CheckpointEnded:
        """What the driver would answer. Raises for a checkpoint that does not hold what its round did."""
        named: Any = effect.state["contributed"]
        held = frozenset((b.epoch, index) for b in named for index in range(b.first, b.first + b.count))
        if effect.round not in self._begun:
            raise self._complain(f"a checkpoint of round {effect.round} has no velocity")
        if held != self._contributed[effect.round]:
            raise self._complain(f"the checkpoint of round {effect.round} names other batches than were contributed")
        names = [file.name for file in effect.files]
        if len(set(names)) != len(names) or ("consensus.safetensors" in names) == effect.writes_consensus:
            raise self._complain(f"the checkpoint of round {effect.round} holds {names}")
        if effect.writes_consensus and effect.round != standing:
            return CheckpointEnded(effect.round, error="the consensus was lost with the rank that was to write it")
        self._outcome.checkpoints.append(effect)
        return CheckpointEnded(effect.round, f"round-{effect.number:06d}", "", 0.01)

    def dropped(self, effect: DropCheckpoint) -> None:
        if not self._scenario.failing_saves and not self._scenario.faults:
            raise self._complain(f"checkpoint {effect.number} is given up, and nothing went wrong")
        settings = self._scenario.settings.saves
        self._begun.discard(effect.number - (settings.first_number if settings else 0))
