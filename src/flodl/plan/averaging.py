"""How the ranks' parameters become one set, and how a rank takes it over."""

from __future__ import annotations

from dataclasses import dataclass

from flodl.plan.limits import Choice, Real
from flodl.plan.section import Section, setting


@dataclass(frozen=True)
class AveragingPlan(Section):
    """Weights, the format on links, and the blend of the asynchronous mode."""

    gamma: float = setting(
        Real(least=0.0, most=8.0),
        "A rank weighs (its batches)^gamma: 1 counts every sample once, 0 counts every rank once.",
        default=1.0,
    )
    wire_dtype: str = setting(
        Choice(("fp32", "bf16")),
        "Number format between hosts; inside one host nothing is rounded, whatever is set.",
        default="fp32",
    )
    blend: str = setting(
        Choice(("delta", "elastic", "adopt")),
        "cpu-async: keep the steps made meanwhile (delta), mix by alpha (elastic), or drop them (adopt).",
        default="delta",
    )
    alpha: float = setting(Real(above=0.0, most=1.0), "The average's share in the elastic blend.", default=0.5)
