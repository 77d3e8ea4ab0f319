"""The run's time: monotonic, less the time in which this process did not run."""

from __future__ import annotations

import time
from collections.abc import Callable

# A wait that overshoots by more than this was no wait: the process was stopped, swapped out, or the machine slept.
OVERSHOOT_S = 1.0


class RunClock:
    """What the controller's `now` is made of. Sleep and SIGSTOP of the launcher do not age anybody's deadlines."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._start = source()
        self._absent_s = 0.0

    def now(self) -> float:
        """Seconds since the run began that this process could have acted in."""
        return self._source() - self._start - self._absent_s

    def real(self) -> float:
        """Seconds since the run began, all of them."""
        return self._source() - self._start

    def leave_out(self, seconds: float) -> None:
        """This much time passed while nothing could act."""
        self._absent_s += max(0.0, seconds)

    def leave_out_overshoot(self, began: float, timeout_s: float) -> float:
        """After a wait of at most timeout_s that began at real() == began: leaves out what went beyond it. How much."""
        beyond = self.real() - began - timeout_s
        if beyond <= OVERSHOOT_S:
            return 0.0
        self.leave_out(beyond)
        return beyond
