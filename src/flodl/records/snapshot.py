"""Where a run stands, folded from its records: no clock, no I/O, the same records give the same snapshot."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PACE_ROUNDS = 20
"""What is left is timed by the pace of the last so many rounds: a death or a new anchor is soon in it."""


@dataclass(frozen=True)
class RankSnapshot:
    """One rank. share: of the batches contributed since the run started, 0 to 1; ms_per_batch, loss (mean of its last
    window): None before its first round; window: batches in its last round.

    state: waiting, starting, joined, training, evicted, refused, lost, done.
    """

    rank: int
    device: str
    state: str
    share: float
    ms_per_batch: float | None
    window: int
    loss: float | None
    restarts: int


@dataclass(frozen=True)
class Snapshot:
    """The run at elapsed_s. epoch counts from 1; epoch_progress: 0 to 1; eta_s, drift, loss (of the last round, over
    its samples): None where not known; metrics: of the last evaluation. A run on one device has no rounds.
    """

    mode: str
    phase: str
    reason: str
    elapsed_s: float
    eta_s: float | None
    rounds: int
    anchor: int | None
    drift: float | None
    loss: float | None
    epoch: int
    epochs: int
    epoch_progress: float
    metrics: dict[str, float]
    ranks: tuple[RankSnapshot, ...]


@dataclass
class _Rank:
    device: str = ""
    state: str = "waiting"
    batches: int = 0
    window: int = 0
    ms_per_batch: float | None = None
    loss: float | None = None
    starts: int = 0


@dataclass
class _Plan:
    """Of the head. batches: of the whole run; None: the head does not say."""

    mode: str = ""
    epochs: int = 1
    batches: int | None = None
    batches_per_epoch: int | None = None


@dataclass
class _Work:
    """What is contributed. left: batches not contributed yet; pace: (time_s, left) of the last rounds."""

    rounds: int = 0
    batches: int = 0
    epoch: int = 0
    left: int | None = None
    loss: float | None = None
    pace: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PACE_ROUNDS + 1))


class Fold:
    """Takes each record once, in order; O(1) for each, and O(ranks) for a round's attempt. Unknown kinds are passed by,
    and a field that is missing leaves its figure unknown."""

    def __init__(self) -> None:
        self._plan = _Plan()
        self._ranks: list[_Rank] = []
        self._cohort: tuple[Any, list[Mapping[str, Any]]] = (None, [])
        self._work = _Work()
        self._phase = ("waiting", "")
        self._anchor: int | None = None
        self._drift: float | None = None
        self._metrics: dict[str, float] = {}
        self.last_s = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        """One line of the schedule."""
        self.last_s = max(self.last_s, record.get("time_s", 0.0))
        match record["kind"]:
            case "head":
                self._head(record)
            case "phase":
                self._phase = (record["phase"], record.get("reason", ""))
            case "attempt":
                self._cohort = (record["round"], record["cohort"])
            case "commit":
                self._commit(record)
            case "epoch":
                self._work.epoch = max(self._work.epoch, record["epoch"] + 1)
            case "evaluation":
                self._metrics = dict(record["metrics"])
            case kind if kind in _STATES:
                self._rank_record(kind, record)

    def restarts(self, rank: int) -> int:
        """How often this rank was started again."""
        return max(0, self._ranks[rank].starts - 1) if rank < len(self._ranks) else 0

    @property
    def epochs(self) -> int:
        """Of the whole run."""
        return self._plan.epochs

    def snapshot(self, elapsed_s: float) -> Snapshot:
        """The run as of the last record, at this time of the run."""
        work, plan = self._work, self._plan
        return Snapshot(
            mode=plan.mode,
            phase=self._phase[0],
            reason=self._phase[1],
            elapsed_s=elapsed_s,
            eta_s=self._eta_s(elapsed_s),
            rounds=work.rounds,
            anchor=self._anchor,
            drift=self._drift,
            loss=work.loss,
            epoch=min(work.epoch + 1, plan.epochs),
            epochs=plan.epochs,
            epoch_progress=self._epoch_progress(),
            metrics=self._metrics,
            ranks=tuple(self._rank_snapshots()),
        )

    # ---- records

    def _head(self, record: Mapping[str, Any]) -> None:
        plan = record["plan"]
        epochs = record.get("epochs", plan["data"]["epochs"])
        self._plan = _Plan(plan["mode"], epochs, record.get("batches"), record.get("batches_per_epoch"))
        self._work.left = self._plan.batches
        for rank, device in enumerate(plan["cluster"]["devices"]):
            self._of(rank).device = device

    def _rank_record(self, kind: str, record: Mapping[str, Any]) -> None:
        rank = self._of(record["rank"])
        if kind == "process_started":
            rank.starts += 1
        elif kind == "join":
            rank.device = record["device"]
        elif kind == "exit" and not record["is_death"]:
            rank.state = rank.state if rank.state == "refused" else "done"
            return
        rank.state = _STATES[kind]

    def _commit(self, record: Mapping[str, Any]) -> None:
        """What was in the round's last attempt is contributed now."""
        work = self._work
        self._anchor = record.get("anchor", self._anchor)
        work.epoch = record.get("epoch", work.epoch)
        work.left = record.get("left", work.left)
        if work.left is not None:
            work.pace.append((record.get("time_s", 0.0), work.left))
        if record["round"] == 0:
            return
        work.rounds += 1
        self._drift = record.get("drift")
        if record["round"] == self._cohort[0]:
            self._contribute(self._cohort[1])

    def _contribute(self, cohort: list[Mapping[str, Any]]) -> None:
        summed, samples = 0.0, 0
        for entry in cohort:
            rank = self._of(entry["rank"])
            rank.batches += entry["batches"]
            rank.window = entry["batches"]
            rank.ms_per_batch = entry.get("ms", rank.ms_per_batch)
            rank.loss = loss = entry.get("loss")
            self._work.batches += entry["batches"]
            if loss is not None:
                summed += loss * entry["samples"]
                samples += entry["samples"]
        if samples:
            self._work.loss = summed / samples

    def _of(self, rank: int) -> _Rank:
        while len(self._ranks) <= rank:
            self._ranks.append(_Rank())
        return self._ranks[rank]

    # ---- figures

    def _rank_snapshots(self) -> Iterator[RankSnapshot]:
        total = self._work.batches
        for number, rank in enumerate(self._ranks):
            share = rank.batches / total if total else 0.0
            restarts = self.restarts(number)
            yield RankSnapshot(
                number, rank.device, rank.state, share, rank.ms_per_batch, rank.window, rank.loss, restarts
            )

    def _epoch_progress(self) -> float:
        """The next epoch may have begun before this one is closed: what is done of both counts for this one."""
        plan, work = self._plan, self._work
        if plan.batches is None or not plan.batches_per_epoch or work.left is None:
            return 0.0
        before = min(work.epoch, plan.epochs - 1) * plan.batches_per_epoch
        size = min(plan.batches_per_epoch, plan.batches - before)
        return min(1.0, max(0.0, (plan.batches - work.left - before) / size)) if size > 0 else 1.0

    def _eta_s(self, elapsed_s: float) -> float | None:
        pace = self._work.pace
        if len(pace) < 2:
            return None
        (began_s, left_then), (at_s, left) = pace[0], pace[-1]
        if left == 0:
            return 0.0
        if left >= left_then or at_s <= began_s:
            return None
        seconds = left * (at_s - began_s) / (left_then - left)
        return max(0.0, seconds - max(0.0, elapsed_s - at_s)) if math.isfinite(seconds) else None


_STATES = {
    "process_started": "starting",
    "join": "joined",
    "adopt": "training",
    "evict": "evicted",
    "refused": "refused",
    "exit": "lost",
}
