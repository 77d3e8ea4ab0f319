"""Signals of the launcher as events of its endpoint, for as long as a run lasts."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from types import FrameType
from typing import Any

ENDING = ("SIGINT", "SIGTERM", "SIGHUP")
JOB_CONTROL = ("SIGTSTP", "SIGCONT")


class Signals:
    """A context: within it the signals above wake the endpoint instead of doing what they did before.

    In any thread but the main one it does nothing. A signal that is ignored stays ignored (nohup, a shell's background
    job). One that nobody took from the endpoint takes its former effect when the context ends.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._former: dict[int, Any] = {}
        self._former_descriptor: int | None = None
        self._noted: Counter[int] = Counter()

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._former_descriptor = signal.set_wakeup_fd(self._descriptor, warn_on_full_buffer=False)
        for number in (signal.Signals[name] for name in (*ENDING, *JOB_CONTROL) if hasattr(signal, name)):
            former = signal.getsignal(number)
            if former is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._former_descriptor is None:
            return
        for number, former in self._former.items():
            # None: a handler that C code installed, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if former is None else former)
        signal.set_wakeup_fd(self._former_descriptor)
        self._former, self._former_descriptor = {}, None
        for number in (signal.Signals[name] for name in ENDING if hasattr(signal, name)):
            if self._noted[number] > 0:
                signal.raise_signal(number)

    def taken(self, number: int) -> None:
        """The driver saw one of these."""
        self._noted[number] -= 1

    def _note(self, number: int, _: FrameType | None) -> None:
        self._noted[number] += 1
