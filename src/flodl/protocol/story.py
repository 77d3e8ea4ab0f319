"""What a run did, as plain values: epochs, shares, losses of ranks, and why it was degraded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flodl.protocol.cadence import Cadence
from flodl.protocol.effects import EndRun
from flodl.protocol.ledger import Contributed, Ledger
from flodl.protocol.membership import Roster
from flodl.protocol.messages import Evaluated, Sealed
from flodl.protocol.round import Round

MOST_NAMED = 10


@dataclass
class EpochStory:
    """loss: mean over the epoch's contributed samples of the loss before each step."""

    loss_sum: float = 0.0
    samples: int = 0
    closed_in_round: int | None = None
    evaluated_round: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def as_dict(self, epoch: int) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "loss": self.loss_sum / self.samples if self.samples else None,
            "samples": self.samples,
            "round": self.closed_in_round,
            "metrics": self.metrics,
        }


class Story:
    """Tallies. Losses are counted at the commit that contributes them, so that nothing is counted twice."""

    def __init__(self, epochs: int, world_size: int) -> None:
        self.epochs = [EpochStory() for _ in range(epochs)]
        self.reasons: list[str] = []
        self.degraded: list[str] = []
        self.drift = 0.0
        self.first_round = 0  # of the runs before this one that it goes on from
        self._rounds = 0
        self._batches = [0] * world_size
        self._samples = [0] * world_size
        self._raw_over_pad = [0] * world_size
        self._recomputed = 0
        self.discarded_steps = 0  # made since a snapshot, and overwritten by what a blend other than delta takes
        self._exclusions = 0
        self._quarantined: list[tuple[int, int]] = []

    def restore(self, epochs: Iterable[EpochStory], quarantined: Iterable[tuple[int, int]]) -> None:
        """Of the run that this one goes on from; epochs in order."""
        self._quarantined = list(quarantined)
        for number, story in zip(range(len(self.epochs)), epochs, strict=False):
            self.epochs[number] = story

    def batches_of(self, rank: int) -> int:
        """Contributed by this rank in this run."""
        return self._batches[rank]

    def sealed(self, rank: int, message: Sealed) -> None:
        self._raw_over_pad[rank] += message.report.raw_over_pad

    def committed(self, round_: Round, settled: Contributed) -> None:
        if round_.is_seed:
            return
        self._rounds += 1
        for (rank, _), message in round_.sealed.items():
            self._batches[rank] += message.batches
            self._samples[rank] += message.samples
            for epoch, loss_sum, samples in message.losses:
                self.epochs[epoch].loss_sum += loss_sum
                self.epochs[epoch].samples += samples
        self.closed(settled.closed_epochs, round_.number)

    def closed(self, epochs: Iterable[int], round_: int) -> None:
        for epoch in epochs:
            self.epochs[epoch].closed_in_round = self.first_round + round_

    def evaluated(self, message: Evaluated) -> None:
        self.epochs[message.epoch].metrics = message.metrics
        self.epochs[message.epoch].evaluated_round = message.round

    def lost(self, recomputed: int, reason: str) -> None:
        self._recomputed += recomputed
        self.degrade(reason)

    def excluded(self, rank: int, round_: int, quarantined: list[tuple[int, int]], first: str) -> None:
        self._exclusions += 1
        self._quarantined += quarantined
        self.degrade(f"rank {rank} was left out of round {round_}: not finite ({first})")
        if quarantined:
            named = ", ".join(f"{index} of epoch {epoch}" for epoch, index in quarantined[:MOST_NAMED])
            more = f" and {len(quarantined) - MOST_NAMED} more" if len(quarantined) > MOST_NAMED else ""
            self.degrade(f"given up, for they were not finite twice: batch {named}{more}")

    def degrade(self, reason: str) -> None:
        self.degraded.append(reason)

    def summary(
        self, roster: Roster, cadence: Cadence, ledger: Ledger, phase: str, end: EndRun | None
    ) -> dict[str, Any]:
        total = sum(self._batches)
        return {
            "phase": phase,
            "reason": end.reason if end else "",
            "rounds": self._rounds,
            "samples": sum(self._samples),
            "batches": total,
            "recomputed": self._recomputed,
            "discarded_steps": self.discarded_steps,
            "deaths": roster.deaths,
            "exclusions": self._exclusions,
            "quarantined": self._quarantined,
            "degraded": self.degraded,
            "reasons": self.reasons,
            "anchor": cadence.anchor,
            "round_ms": cadence.round_ms,
            "drift": self.drift,
            "epochs": [story.as_dict(number) for number, story in enumerate(self.epochs)],
            "open_epoch": ledger.current_epoch,
            "ranks": [
                {
                    "rank": state.rank,
                    "device": state.device,
                    "batches": self._batches[state.rank],
                    "samples": self._samples[state.rank],
                    "share": self._batches[state.rank] / total if total else 0.0,
                    "ms_per_batch": cadence.ms(state.rank),
                    "deaths": state.deaths,
                    "pauses_s": dict(state.pauses),
                    "raw_over_pad": self._raw_over_pad[state.rank],
                }
                for state in roster
            ],
        }
