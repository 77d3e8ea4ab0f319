"""An emulated device: a real step on the processor, and then nothing until the device would have been done."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from flodl.plan.device import Device

STEPS_MEASURED = 20
"""A device given as a factor is calibrated on so many of its first real steps."""
_PR_SET_TIMERSLACK = 29


MOST_OVER_PAD = 0.01


def outlasted(device: str, over: int, batches: int) -> str:
    """In words, if over 1 % of the steps took longer than the device's would; else ''."""
    if over <= MOST_OVER_PAD * batches:
        return ""
    return f"{over} of {batches} steps on {device} took longer than that: its speed was not emulated"


@dataclass
class Pad:
    """Makes steps last as long as the device's would. One per rank; it counts the steps that were too long already.

    clock in seconds; sleep returns no earlier than asked.
    """

    device: Device
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    steps: int = 0
    raw_over_pad: int = 0
    _first_ms: list[float] = field(default_factory=list)
    _typical_ms: float = 0.0

    def hold(self, started: float, done: float, seed: int) -> None:
        """Returns when the step that began at `started` would have ended on the device.

        done: share of the run behind, 0 to 1. seed: of the batch, so that its jitter is its own wherever it runs.
        """
        raw_ms = 1e3 * (self.clock() - started)
        self.steps += 1
        draw = Random(seed).uniform(-1.0, 1.0) if self.device.jitter else 0.0
        target_ms = self.device.step_ms(self._basis_ms(raw_ms), done, draw)
        if raw_ms > target_ms:
            self.raw_over_pad += 1
            return
        deadline = started + 1e-3 * target_ms
        while (left := deadline - self.clock()) > 0.0:
            self.sleep(left)

    def _basis_ms(self, raw_ms: float) -> float:
        """What the duration follows from: nothing for a fixed pad, the typical real step for a factor."""
        if self.device.factor is None:
            return 0.0
        if len(self._first_ms) < STEPS_MEASURED:
            self._first_ms.append(raw_ms)
            self._typical_ms = statistics.median(self._first_ms)
        return self._typical_ms


def sharpen_sleep() -> None:
    """Lets this process's sleeps end within some ten microseconds of their deadline, where the system allows it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
