"""Ctrl-C and SIGTERM of a run on one device, put off until the batch under way has ended, so that it can be saved."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Within, the first of these signals is only noted; a second one acts at once. Handlers of the user's stay.

    Does nothing outside of the main thread, where Python lets nobody handle signals, and where is_deferred is False.
    """

    def __init__(self, is_deferred: bool) -> None:
        self._is_deferred = is_deferred and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}
        self._number: int | None = None

    def __enter__(self) -> Interruption:
        for number in SIGNALS if self._is_deferred else ():
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def is_asked(self) -> bool:
        return self._number is not None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._number is not None:
            raise _exception(number)
        self._number = number
        print("flodl: a checkpoint is made after this batch; once more ends at once", file=sys.stderr)

    def raise_it(self, saved: str) -> None:
        """What the signal would have done, now that all is saved."""
        assert self._number is not None
        raise _exception(self._number, saved)


def _exception(number: int, saved: str = "") -> BaseException:
    if number == signal.SIGINT:
        return KeyboardInterrupt(saved) if saved else KeyboardInterrupt()
    return SystemExit(128 + number)
