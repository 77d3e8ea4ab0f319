"""What else used the processor while a figure was measured: a figure without it says little."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    """Over one stretch of time, all in cores: own is this process and its ended children; foreign everybody else.

    foreign is None where the system does not tell how long its cores were idle.
    """

    seconds: float
    own: float
    foreign: float | None

    @property
    def words(self) -> str:
        """For a row's note."""
        return "foreign load unknown" if self.foreign is None else f"foreign load {self.foreign:.2f} cores"


class LoadMeter:
    """Started when made; usage() tells what happened since. Children count once they have ended."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._own_s = own_cpu_s()
        self._busy_s = _busy_s()

    def usage(self) -> Usage:
        """Foreign work is what the cores did less what was our own; never below zero."""
        seconds = max(1e-9, time.monotonic() - self._began)
        own_s = own_cpu_s() - self._own_s
        busy_s = _busy_s()
        if busy_s is None or self._busy_s is None:
            return Usage(seconds, own_s / seconds, None)
        return Usage(seconds, own_s / seconds, max(0.0, busy_s - self._busy_s - own_s) / seconds)


def own_cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(cpu_s(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def cpu_s(who: int) -> float:
    """User and system time; who as in resource.getrusage."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def _busy_s() -> float | None:
    """Seconds that all cores together spent on anything but waiting, since the system started. Linux only."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    idle, waiting = fields[3], fields[4]
    return (sum(fields) - idle - waiting) / os.sysconf("SC_CLK_TCK")
