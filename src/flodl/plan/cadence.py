"""How long a window is, and what shortens it."""

from __future__ import annotations

from dataclasses import dataclass

from flodl.plan.limits import Choice, Maybe, Real, Whole
from flodl.plan.section import Section, setting


@dataclass(frozen=True)
class CadencePlan(Section):
    """The slowest rank's window in batches, and the limits within which it is tuned."""

    anchor: int = setting(
        Whole(1, 1_000_000),
        "Batches of the slowest rank between two averages, to begin with; at most what leaves an epoch 20 averages.",
        default=10,
    )
    overhead_target: float = setting(
        Real(above=0.0, below=1.0),
        "The anchor grows while averaging takes a larger share of the time than this.",
        default=0.02,
    )
    guard: str | None = setting(
        Maybe(Choice(("level",)), "no guard"),
        "level: while the ranks drift apart over 0.05 of the average's norm (0.3 with the elastic blend), rising three "
        "rounds running, the anchor does not grow; where the drift rises exponentially it is halved.",
        default="level",
    )
    max_ratio: float = setting(
        Real(least=1.0, most=4096.0),
        "How many times the slowest rank's batches a rank may get per window.",
        default=64.0,
    )
