"""Everything a run was asked to do, as plain values: what a launcher and its ranks compare."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from flodl.plan.averaging import AveragingPlan
from flodl.plan.cadence import CadencePlan
from flodl.plan.checkpoint import CheckpointPlan
from flodl.plan.cluster import ClusterPlan
from flodl.plan.data import DataPlan
from flodl.plan.limits import Choice, Whole
from flodl.plan.outer import OuterPlan
from flodl.plan.refusal import refused
from flodl.plan.section import Section, refuse_unknown, setting
from flodl.plan.training import TrainingPlan

MODES = ("solo", "cpu-sync", "cpu-cadence", "cpu-async")


@dataclass(frozen=True)
class Plan(Section):
    """Resolved and checked: no "auto" is left, and every part fits the others."""

    mode: str = setting(Choice(MODES), "How the ranks keep step; solo is one device without rounds.")
    seed: int = setting(Whole(0), "Of the initial model, the order of samples, dropout and augmentation.", default=0)
    data: DataPlan = field(default_factory=lambda: DataPlan(batch_size=1))
    cadence: CadencePlan = field(default_factory=CadencePlan)
    averaging: AveragingPlan = field(default_factory=AveragingPlan)
    outer: OuterPlan | None = None
    training: TrainingPlan = field(default_factory=TrainingPlan)
    checkpoint: CheckpointPlan = field(default_factory=CheckpointPlan)
    cluster: ClusterPlan = field(default_factory=ClusterPlan)

    def __post_init__(self) -> None:
        super().__post_init__()
        world = self.cluster.world_size
        if self.mode == "solo" and world > 1:
            raise refused("mode", "solo", f"cpu-sync, cpu-cadence or cpu-async with {world} devices")
        if self.mode != "solo" and self.cluster.device_of(0).kind == "cuda":
            raise refused("mode", self.mode, "solo with a GPU: GPUs among several ranks are not in this version")
        micro = self.data.micro_batch
        if isinstance(micro, tuple) and len(micro) != world:
            raise refused("micro_batch", list(micro), f"one number, or a list with one for each of {world} devices")


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Plain dicts, lists, strings, numbers, booleans and None. plan_from_dict gives an equal plan back."""
    return typing.cast(dict[str, Any], _plain(dataclasses.asdict(plan)))


def plan_from_dict(values: dict[str, Any]) -> Plan:
    """Checked again. Raises PlanError, also for a name that no plan has."""
    return typing.cast(Plan, _section_from(Plan, values))


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What differs between two plans, as "data.batch_size: 64 != 32", in order of names; [] if they are the same."""
    return _differences(_plain(a), _plain(b), "")


def _differences(a: Any, b: Any, name: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        found: list[str] = []
        for key in sorted(a.keys() | b.keys()):
            dotted = f"{name}.{key}" if name else key
            if key in a and key in b:
                found += _differences(a[key], b[key], dotted)
            else:
                found.append(f"{dotted}: {_word(a, key)} != {_word(b, key)}")
        return found
    # 1, 1.0 and True are equal in Python and three different settings.
    return [] if type(a) is type(b) and a == b else [f"{name}: {a!r} != {b!r}"]


def _word(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not set"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _section_from(section: type[Section], values: dict[str, Any]) -> Section:
    hints = typing.get_type_hints(section)
    refuse_unknown(values, hints.keys() - {"prefix"}, f"the fields of {section.__name__}")
    made: dict[str, Any] = {}
    for name, value in values.items():
        inner = _section_of(hints[name])
        if inner is not None and isinstance(value, dict):
            value = _section_from(inner, value)
        made[name] = tuple(value) if isinstance(value, list) else value
    return section(**made)


def _section_of(hint: Any) -> type[Section] | None:
    """The section in `X` or `X | None`."""
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((kind for kind in choices if isinstance(kind, type) and issubclass(kind, Section)), None)
