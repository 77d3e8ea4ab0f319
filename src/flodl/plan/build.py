"""From the user's flat settings to a plan: which name belongs to which part, and what "auto" means here."""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any, TypedDict

from flodl.plan import sources
from flodl.plan.averaging import AveragingPlan
from flodl.plan.cadence import CadencePlan
from flodl.plan.checkpoint import CheckpointPlan
from flodl.plan.cluster import ClusterPlan, resolve_devices
from flodl.plan.data import DataPlan, LoaderPlan
from flodl.plan.outer import OuterPlan
from flodl.plan.plan import MODES, Plan
from flodl.plan.refusal import missing, refused
from flodl.plan.section import Section, refuse_unknown, setting_name
from flodl.plan.training import TrainingPlan


class Settings(TypedDict, total=False):
    """Every setting by the name that the trainer takes. Limits and defaults: the sections' own, docs/settings.md."""

    batch_size: int
    epochs: int
    samples: int | None
    seed: int
    mode: str
    devices: str | list[str] | tuple[str, ...]
    micro_batch: int | list[int] | tuple[int, ...] | None
    data_check: str
    loader: LoaderPlan | dict[str, Any]
    clip_grad_norm: float | None
    anchor: int
    overhead_target: float
    guard: str | None
    max_ratio: float
    gamma: float
    wire_dtype: str
    blend: str
    alpha: float
    outer: OuterPlan | None
    checkpoint: str | os.PathLike[str] | None
    resume: bool | str | os.PathLike[str]
    overwrite: bool
    checkpoint_keep: int
    checkpoint_every_epochs: int
    respawn: int
    max_failures: int | float | None
    detect_s: float
    stall_s: float | None
    debug_rank: int | None
    eval_rank: int | None


SECTIONS: tuple[tuple[str, type[Section]], ...] = (
    ("data", DataPlan),
    ("training", TrainingPlan),
    ("cadence", CadencePlan),
    ("averaging", AveragingPlan),
    ("checkpoint", CheckpointPlan),
    ("cluster", ClusterPlan),
)
AUTO_MODES = ("auto", *MODES)
AUTOMATIC = ("mode", "devices")
"""Settings whose default is "auto", which build_plan resolves."""


def setting_names() -> tuple[str, ...]:
    """All names that build_plan takes."""
    return tuple(Settings.__annotations__)


def build_plan(**settings: Any) -> Plan:
    """The checked plan of these settings (see Settings). Raises PlanError with field, value and what is allowed."""
    refuse_unknown(settings, setting_names(), "the settings")
    if "batch_size" not in settings:
        raise missing("batch_size", "samples in one optimizer step, 1 or more")
    settings["devices"] = resolve_devices(settings.get("devices", "auto"), sources.count_gpus)
    if settings.get("debug_rank") is None and (debugged := sources.debug_rank()) is not None:
        settings["debug_rank"] = debugged
    settings["loader"] = _loader(settings.get("loader", LoaderPlan()))
    made = {name: _section(kind, settings) for name, kind in SECTIONS}
    devices: tuple[str, ...] = settings["devices"]
    outer = _outer(settings.get("outer"))
    mode = resolve_mode(settings.get("mode", "auto"), devices)
    if mode == "solo" and outer is not None:
        warnings.warn("outer is not used: one device makes no rounds to take an outer step at", stacklevel=3)
    return Plan(mode=mode, seed=settings.get("seed", Plan.seed), outer=outer, **made)  # type: ignore[arg-type]  # by name


def resolve_mode(mode: object, devices: tuple[str, ...]) -> str:
    """ "auto" is solo on one device and cpu-cadence on several. Raises PlanError."""
    if not isinstance(mode, str):
        raise refused("mode", mode, _quoted(AUTO_MODES))
    if mode.partition("-")[0] in ("collective", "nccl"):
        raise refused("mode", mode, f"{_quoted(AUTO_MODES)}; the collective modes are not in this version")
    if mode not in AUTO_MODES:
        raise refused("mode", mode, _quoted(AUTO_MODES))
    if mode != "auto":
        return mode
    return "solo" if len(devices) == 1 else "cpu-cadence"


def _section(kind: type[Section], settings: dict[str, Any]) -> Section:
    given = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # every section is a dataclass
        name = setting_name(field) if "rule" in field.metadata else field.name
        if name in settings:
            given[field.name] = settings[name]
    return kind(**given)


def _loader(value: object) -> LoaderPlan:
    if isinstance(value, LoaderPlan):
        return value
    if not isinstance(value, dict):
        raise refused("loader", value, "a LoaderPlan, or a dict such as {'workers': 2}")
    known = [field.name for field in dataclasses.fields(LoaderPlan)]
    refuse_unknown(value, known, "the settings of loader")
    return LoaderPlan(**value)


def _outer(value: object) -> OuterPlan | None:
    if value is None or isinstance(value, OuterPlan):
        return value
    raise refused("outer", value, "None, flodl.DiLoCo(...) or flodl.SlowMo(...)")


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)
