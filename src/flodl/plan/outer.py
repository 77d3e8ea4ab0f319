"""The outer optimizer: a step of its own on the difference between two averages."""

from __future__ import annotations

from dataclasses import dataclass

from flodl.plan.limits import Choice, Real, Whole
from flodl.plan.section import Section, setting

MIN_WINDOW = 30
"""Mean batches per rank and window below which momentum of 0.9 amplifies the noise of single batches."""


@dataclass(frozen=True)
class OuterPlan(Section):
    """Made by DiLoCo(...) or SlowMo(...). g = previous average − this one; v = momentum · v + g.

    nesterov: average' = previous − lr · (g + momentum · v); heavy_ball: previous − lr · v.
    """

    prefix = "outer."

    rule: str = setting(Choice(("nesterov", "heavy_ball")), "The formula of the step.")
    lr: float = setting(Real(above=0.0, most=100.0), "Learning rate of the outer step.")
    momentum: float = setting(Real(least=0.0, below=1.0), "Momentum of the outer step.")
    min_window: int = setting(
        Whole(0, 1_000_000),
        "Mean batches per rank and window that the outer step wants; 0 takes windows as they come.",
        default=MIN_WINDOW,
    )
    warm: str = setting(
        Choice(("stretch", "momentum", "none")),
        "Below min_window: stretch the window, or take the momentum in proportion (momentum · window / min_window), or "
        "neither.",
        default="stretch",
    )


def DiLoCo(lr: float = 0.7, momentum: float = 0.9, min_window: int = MIN_WINDOW, warm: str = "stretch") -> OuterPlan:
    """The outer optimizer of DiLoCo: Nesterov momentum on the pseudo-gradient. Raises PlanError."""
    return OuterPlan("nesterov", lr, momentum, min_window, warm)


def SlowMo(lr: float = 1.0, momentum: float = 0.5, min_window: int = MIN_WINDOW, warm: str = "stretch") -> OuterPlan:
    """Slow momentum: heavy-ball momentum on the pseudo-gradient. Raises PlanError."""
    return OuterPlan("heavy_ball", lr, momentum, min_window, warm)
