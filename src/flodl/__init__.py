"""Data-parallel training of PyTorch models on devices of unequal speed.

Importing flodl needs neither torch nor the extension; it keeps the process's start and takes its role (plan.sources).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flodl.plan import sources as _sources  # noqa: F401 -- before the script can change directory or environment

if TYPE_CHECKING:
    from flodl.errors import (
        AdmissionError,
        CheckpointError,
        FlodlError,
        LinkError,
        NativeError,
        PlanError,
        RoundAborted,
        RunFailed,
        WireError,
    )
    from flodl.plan import DiLoCo, LoaderPlan, SlowMo
    from flodl.result import RunResult
    from flodl.trainer import Trainer

    __version__: str

_HOMES = {
    "AdmissionError": "flodl.errors",
    "CheckpointError": "flodl.errors",
    "DiLoCo": "flodl.plan",
    "FlodlError": "flodl.errors",
    "LinkError": "flodl.errors",
    "LoaderPlan": "flodl.plan",
    "NativeError": "flodl.errors",
    "PlanError": "flodl.errors",
    "RoundAborted": "flodl.errors",
    "RunFailed": "flodl.errors",
    "RunResult": "flodl.result",
    "SlowMo": "flodl.plan",
    "Trainer": "flodl.trainer",
    "WireError": "flodl.errors",
}

__all__ = [
    "AdmissionError",
    "CheckpointError",
    "DiLoCo",
    "FlodlError",
    "LinkError",
    "LoaderPlan",
    "NativeError",
    "PlanError",
    "RoundAborted",
    "RunFailed",
    "RunResult",
    "SlowMo",
    "Trainer",
    "WireError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used."""
    if name == "__version__":
        value: Any = _version()
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'flodl' has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flodl")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"


def __dir__() -> list[str]:
    return sorted(__all__)
