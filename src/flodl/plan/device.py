"""What one rank trains on, as a word in the plan.

    cpu                     the processor
    cuda, cuda:N            a GPU
    emulated:47ms           a processor step padded to 47 milliseconds (also: 0.05s)
    emulated:cpu*4.7        a processor step padded to 4.7 times what it took
    emulated:...,jitter=0.1 each step's duration times a factor drawn evenly from 1 - jitter to 1 + jitter
    emulated:...,drift=1.5  the duration changes evenly over the run, and ends at so many times what it began with

An emulated device does the whole real step on the processor and then waits, so a step never lasts shorter than the real
one. It is named emulated wherever a run is reported.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from flodl.plan.refusal import refused

ALLOWED = (
    '"cpu", "cuda:N", "emulated:47ms" or "emulated:cpu*4.7", the last two with ",jitter=0.1" and ",drift=1.5" if wanted'
)
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_PAD = re.compile(rf"{_NUMBER}(ms|s)")
_FACTOR = re.compile(rf"cpu\*{_NUMBER}")
_CUDA = re.compile(r"cuda(?::(\d{1,4}))?")
_LONGEST_PAD_MS = 3_600_000.0


@dataclass(frozen=True)
class Device:
    """kind: cpu, cuda or emulated. index: of the GPU. An emulated device has either pad_ms or factor."""

    kind: str
    index: int = 0
    pad_ms: float | None = None
    factor: float | None = None
    jitter: float = 0.0
    drift: float = 1.0

    @property
    def is_emulated(self) -> bool:
        return self.kind == "emulated"

    @property
    def torch_name(self) -> str:
        """What torch calls the device that computes."""
        return f"cuda:{self.index}" if self.kind == "cuda" else "cpu"

    def step_ms(self, raw_ms: float, done: float, draw: float) -> float:
        """How long a step lasts that took raw_ms of real work; never less than that.

        done: the share of the run behind, 0 to 1. draw: an even draw from -1 to 1, of the batch's own generator.
        """
        if not self.is_emulated:
            return raw_ms
        base = self.pad_ms if self.pad_ms is not None else raw_ms * (self.factor or 1.0)
        return max(raw_ms, base * (1.0 + (self.drift - 1.0) * done) * (1.0 + self.jitter * draw))


def parse_device(text: object, field: str = "devices") -> Device:
    """Raises PlanError naming the part that is not in the grammar above."""
    if not isinstance(text, str):
        raise refused(field, text, ALLOWED)
    if text == "cpu":
        return Device("cpu")
    if match := _CUDA.fullmatch(text):
        return Device("cuda", int(match[1] or 0))
    if text.startswith("emulated:"):
        return _parse_emulated(text, field)
    raise refused(field, text, ALLOWED)


def _parse_emulated(text: str, field: str) -> Device:
    duration, *options = text.removeprefix("emulated:").split(",")
    values = {"jitter": 0.0, "drift": 1.0}
    seen: set[str] = set()
    for option in options:
        name, equals, number = option.strip().partition("=")
        if name not in values or not equals or name in seen:
            raise refused(field, text, "after the duration only jitter=NUMBER and drift=NUMBER, each once")
        seen.add(name)
        values[name] = _number(number, text, field)
    if not values["jitter"] < 1.0:
        raise refused(field, text, "a jitter of at least 0 and below 1")
    if not 0.01 <= values["drift"] <= 100.0:
        raise refused(field, text, "a drift from 0.01 to 100")
    duration = duration.strip()
    if match := _PAD.fullmatch(duration):
        pad_ms = float(match[1]) * (1.0 if match[2] == "ms" else 1000.0)
        if not 0.0 < pad_ms <= _LONGEST_PAD_MS:
            raise refused(field, text, "a duration above 0 ms and at most an hour")
        return Device("emulated", pad_ms=pad_ms, jitter=values["jitter"], drift=values["drift"])
    if match := _FACTOR.fullmatch(duration):
        factor = float(match[1])
        if not 1.0 <= factor <= 1000.0:
            raise refused(field, text, "a factor from 1 to 1000: a padded step is never shorter than the real one")
        return Device("emulated", factor=factor, jitter=values["jitter"], drift=values["drift"])
    raise refused(field, text, 'a duration such as "47ms", "0.05s" or "cpu*4.7" after "emulated:"')


def _number(text: str, device: str, field: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0.0:
        raise refused(field, device, f"a finite number, 0 or more, instead of {text!r}")
    return number
