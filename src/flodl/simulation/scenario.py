"""What is simulated: a run's settings, its ranks' speeds, and the faults that befall them."""

from __future__ import annotations

from dataclasses import dataclass, field

from flodl.protocol.effects import EndRun, FinishCheckpoint
from flodl.protocol.settings import ControllerSettings

Batch = tuple[int, int]
Holder = tuple[int, int]

KINDS = ("kill", "stop", "thaw", "quit", "raise", "slow", "partition", "flip", "start_failure", "interrupt")
PHASES = ("boot", "seed", "train", "seal", "save", "adopt", "evaluate", "reduce", "commit")


class Violation(AssertionError):
    """Something that must always hold did not. The message carries the seed and the last records."""


@dataclass(frozen=True)
class Fault:
    """At `at_ms`, or in the first phase `when` of the rank after that. rank None: whichever enters that phase.

    kill (signal 9), stop (SIGSTOP), thaw (SIGCONT), quit (exit 0 without having been told to), raise (an exception in
    the next batch), slow (steps take `factor` times as long), partition (no message passes for `factor` seconds), flip
    (the next θ is read wrong), start_failure (the next start fails), interrupt (Ctrl-C; concerns no rank).
    """

    at_ms: float
    rank: int | None
    kind: str
    factor: float = 1.0
    when: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS or (self.when and self.when not in PHASES):
            raise ValueError(f"no such fault: {self}")


@dataclass(frozen=True)
class Scenario:
    """A run to simulate. step_ms: per rank.

    nan_batches make the parameters of whoever trains them not finite; failing_batches end whoever starts them with an
    exception. plans, layouts: ranks that come with another plan or model than the rest. failing_saves: ranks whose disk
    is full. jitter: each step takes up to so much of its time more or less. *_ms pairs are bounds of uniform draws.
    """

    settings: ControllerSettings
    step_ms: tuple[float, ...]
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    nan_batches: frozenset[Batch] = frozenset()
    failing_batches: frozenset[Batch] = frozenset()
    plans: dict[int, dict[str, object]] = field(default_factory=dict)
    layouts: frozenset[int] = frozenset()
    failing_saves: frozenset[int] = frozenset()
    jitter: float = 0.0
    evaluation_ms: float = 50.0
    message_ms: tuple[float, float] = (0.05, 2.0)
    copy_ms: tuple[float, float] = (0.1, 5.0)
    reduce_ms: tuple[float, float] = (1.0, 40.0)
    start_ms: tuple[float, float] = (500.0, 4000.0)
    limit_ms: float = 3_600_000.0


@dataclass
class Outcome:
    """How it ended, and what the world saw. befell: faults that took effect. idle_ms: longest wait per rank."""

    end: EndRun
    records: list[dict[str, object]] = field(default_factory=list)
    contributed: list[Batch] = field(default_factory=list)
    befell: list[Fault] = field(default_factory=list)
    summary: dict[str, object] = field(default_factory=dict)
    checkpoints: list[FinishCheckpoint] = field(default_factory=list)
    virtual_s: float = 0.0

    def of(self, kind: str) -> list[dict[str, object]]:
        """The records of one kind, in order."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def deaths(self) -> int:
        return sum(bool(record["is_death"]) for record in self.of("exit"))

    @property
    def late_joins(self) -> int:
        """Ranks that came in after training began."""
        began = next((i for i, r in enumerate(self.records) if r.get("phase") == "training"), len(self.records))
        return sum(record["kind"] == "join" for record in self.records[began:])
