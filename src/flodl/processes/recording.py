"""The schedule that an earlier run left in its directory, read for a replay and compared with what is to be run."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flodl.errors import CheckpointError, PlanError
from flodl.plan import Plan, differences, plan_to_dict
from flodl.plan.refusal import refused
from flodl.processes.perform_records import SCHEDULE
from flodl.protocol.script import Head, Script, read_script
from flodl.records.schedule import read_lines

ALLOWED = "the run directory of an earlier run in a cpu mode, which committed a round"

# What may differ without a change of bits: how data is loaded, how failures are met, where results go, on which kind
# of processor device a rank computes (an emulated one only waits). The pace was recorded.
SECTIONS = ("mode", "seed", "data", "averaging", "outer", "training")
BITLESS_DATA = ("check",)
BITLESS_LOADER = ("workers", "start_method", "prefetch", "pin_memory")


@dataclass(frozen=True)
class Recording:
    """notes: what may make a difference and cannot be set here, in sentences."""

    script: Script
    notes: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """Of torch in each rank of the recorded run; 0: not recorded."""
        return self.script.head.threads.get("rank", 0)


def read_recording(directory: str, plan: Plan, dataset_length: int) -> Recording:
    """Raises PlanError: no such run, another plan (naming the fields), another data set."""
    if plan.checkpoint.resume is not False:
        raise refused("resume", plan.checkpoint.resume, "False together with replay, which begins at the beginning")
    script = _read(directory)
    _compare(script.head, plan, dataset_length, directory)
    _check_fit(script, plan, dataset_length, directory)
    return Recording(script, tuple(_version_notes(script.head)))


def _read(directory: str) -> Script:
    path = Path(directory, SCHEDULE)
    try:
        return read_script(read_lines(path))
    except OSError as error:
        raise refused("replay", directory, ALLOWED, why=f"{SCHEDULE} cannot be read: {error.strerror}") from error
    except CheckpointError as error:
        raise refused("replay", directory, ALLOWED, why=str(error).partition("\n")[0]) from error
    except ValueError as error:
        raise refused("replay", directory, ALLOWED, why=f"{SCHEDULE} cannot be played: {error}") from error


def _compare(head: Head, plan: Plan, dataset_length: int, directory: str) -> None:
    found = differences(_bits_of(head.plan), _bits_of(plan_to_dict(plan)))
    if head.dataset_length != dataset_length:
        found.append(f"the data set's length: {head.dataset_length} != {dataset_length}")
    if found:
        raise PlanError(
            f"replay = {directory!r}: that run was made with other settings (recorded != given): {'; '.join(found)}\n"
            "Give the recorded values: each of these changes the bits of the result.",
            field="replay",
            value=directory,
            allowed=(ALLOWED,),
        )


def _bits_of(plan: dict[str, Any]) -> dict[str, Any]:
    """What of a plan decides the bits, beside the schedule."""
    bits = {name: plan.get(name) for name in SECTIONS}
    if isinstance(data := bits["data"], dict):
        bits["data"] = {name: value for name, value in data.items() if name not in (*BITLESS_DATA, "loader")}
        loader = data.get("loader")
        bits["loader"] = {n: v for n, v in loader.items() if n not in BITLESS_LOADER} if loader else None
    cluster = plan.get("cluster")
    bits["devices"] = len(cluster.get("devices", ())) if isinstance(cluster, dict) else None
    return bits


def _check_fit(script: Script, plan: Plan, dataset_length: int, directory: str) -> None:
    """A schedule of this plan has no rank and no batch beyond these."""
    batches = plan.data.batches_per_epoch(dataset_length)
    for rank, lives in script.lives.items():
        pieces = [piece for life in lives for piece in life.batches]
        is_outside = any(p.epoch >= plan.data.epochs or p.first + p.count > batches for p in pieces)
        if rank >= plan.cluster.world_size or is_outside:
            raise refused("replay", directory, ALLOWED, why=f"rank {rank} has batches that this plan has not")


def _version_notes(head: Head) -> list[str]:
    notes = []
    for package in ("flodl", "torch"):
        recorded, here = head.versions.get(package), installed_version(package)
        if recorded != here:
            notes.append(f"replayed with {package} {here}, recorded with {recorded}: bits may differ")
    return notes


def installed_version(package: str) -> str | None:
    """None where there is no such package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
