"""What is done to the gradients of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from flodl.plan.limits import Maybe, Real
from flodl.plan.section import Section, setting


@dataclass(frozen=True)
class TrainingPlan(Section):
    """One optimizer step."""

    clip_grad_norm: float | None = setting(
        Maybe(Real(above=0.0), "no clipping"),
        "Gradients of a batch are scaled down to this norm (over all parameters) before the step.",
        default=None,
    )
