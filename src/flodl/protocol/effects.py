"""What the controller asks its driver to do. Frozen; performed in order; each decision names its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flodl.protocol.messages import BatchRange, LayoutSpec, ToRank


@dataclass(frozen=True)
class Send:
    """A message to a rank's link. A link that is gone swallows it: its death is on the way."""

    rank: int
    message: ToRank


@dataclass(frozen=True)
class StartRank:
    """Start a process for this rank."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True)
class KillRank:
    """End the process of this rank and generation, with everything that it started. Its exit is reported as usual."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True)
class OpenHost:
    """Reserve the host's two buffers for this layout. Done before the next effect."""

    layout: LayoutSpec


@dataclass(frozen=True)
class Admit:
    """Reserve this rank's memory and send Welcome with its descriptors."""

    rank: int
    generation: int


@dataclass(frozen=True)
class ReleaseMemory:
    """Nobody will read this generation's contribution any more."""

    rank: int
    generation: int


@dataclass(frozen=True)
class Contribution:
    """What one sealed rank puts into a round. weight: p_k, buffer_weight: q_k; both fp32, summing to 1."""

    rank: int
    generation: int
    batches: int
    samples: int
    weight: float
    buffer_weight: float


@dataclass(frozen=True)
class Reduce:
    """Sum these contributions, in this order, into the pending buffer. Ends as Reduced(attempt)."""

    round: int
    attempt: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class CommitRound:
    """Journal first, then the outer step (not for a seed) and the swap. Ends as Committed(round)."""

    round: int
    attempt: int
    is_seed: bool
    contributed: tuple[BatchRange, ...]
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveVelocity:
    """Before any other round is committed: write what the outer step remembers, if there is one, into this folder."""

    round: int
    directory: str


@dataclass(frozen=True)
class SavedFile:
    """One file of a checkpoint that is on disk. size in bytes."""

    name: str
    digest: str
    size: int


@dataclass(frozen=True)
class FinishCheckpoint:
    """Every rank's part is in `directory`: make it whole under the number. Ends as CheckpointEnded(round).

    state: ledger, epochs, cadence and ranks as of that round (protocol/saves.py), plain values.
    writes_consensus: the rank that was to write the committed θ is lost, so that the host does, if θ still stands.
    """

    round: int
    number: int
    directory: str
    files: tuple[SavedFile, ...]
    state: dict[str, Any]
    writes_consensus: bool = False


@dataclass(frozen=True)
class DropCheckpoint:
    """A checkpoint that cannot be made whole: remove what there is of it."""

    number: int


@dataclass(frozen=True)
class Record:
    """One line for schedule.jsonl, the log and the live view. `time_s` is added by the driver."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class EndRun:
    """The run is over. failed: it ends as RunFailed with this reason."""

    reason: str
    failed: bool
    traceback: str = ""


Effect = (
    Send
    | StartRank
    | KillRank
    | OpenHost
    | Admit
    | ReleaseMemory
    | Reduce
    | CommitRound
    | SaveVelocity
    | FinishCheckpoint
    | DropCheckpoint
    | Record
    | EndRun
)


# ---- what the driver tells the controller, beside the ranks' messages ---------------------------------------------


@dataclass(frozen=True)
class RankExited:
    """A process of a rank ended. code: exit code, or −signal. steps_started: batches begun; words: its last output."""

    rank: int
    generation: int
    code: int
    steps_started: int = 0
    words: str = ""


@dataclass(frozen=True)
class RankSilent:
    """Nothing was heard from a rank's endpoint for this long: stopped, or its host is gone."""

    rank: int
    generation: int
    seconds: float


@dataclass(frozen=True)
class RankStopped:
    """A rank's process has stood stopped by a signal for this long; told also of one that has not said Hello yet."""

    rank: int
    generation: int
    seconds: float


@dataclass(frozen=True)
class RankHeard:
    """A rank that was reported silent is heard again."""

    rank: int
    generation: int


@dataclass(frozen=True)
class StartFailed:
    """A rank's process could not be started."""

    rank: int
    generation: int
    error: str


@dataclass(frozen=True)
class Reduced:
    """The attempt's sum stands in the pending buffer. is_finite and distance in the order of its contributions."""

    attempt: int
    is_finite: tuple[bool, ...]
    distance: tuple[float, ...]  # ‖θ_k − consensus‖
    norm: float  # ‖consensus‖
    hash: int
    seconds: float
    first_nonfinite: str = ""


@dataclass(frozen=True)
class Committed:
    """The round is journalled, swapped in, and stands."""

    round: int
    buffer: int
    hash: int
    seconds: float


@dataclass(frozen=True)
class CheckpointEnded:
    """A checkpoint is whole, in this folder; or error says why it is not."""

    round: int
    path: str = ""
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Interrupted:
    """The user asked to end (Ctrl-C, SIGTERM)."""

    reason: str


DriverEvent = (
    RankExited
    | RankSilent
    | RankStopped
    | RankHeard
    | StartFailed
    | Reduced
    | Committed
    | CheckpointEnded
    | Interrupted
)
