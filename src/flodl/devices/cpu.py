"""How many cores this process may use, and how many threads each rank gets of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cores(affinity: Callable[[], int] | None = None, root: Path = CGROUP_ROOT) -> int:
    """Cores by affinity mask, bounded by the quota of this process's control group (rounded up); at least 1."""
    by_mask = (affinity or _cores_by_affinity)()
    quota = _quota(root)
    return max(1, by_mask if quota is None else min(by_mask, int(-(-quota // 1))))


def threads_per_rank(local_ranks: int, cores: int | None = None) -> int:
    """Threads for each of so many ranks on this machine, so that together they fill the cores and no more."""
    return max(1, (usable_cores() if cores is None else cores) // max(1, local_ranks))


def _cores_by_affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota(root: Path) -> float | None:
    """Cores' worth of time that the control group allows, v2 then v1; None without a limit."""
    own = _own_group()
    for folder in (root / own.lstrip("/"), root):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        return None if quota == "max" else int(quota) / int(period)
    try:
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def _own_group() -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), "")
