"""What a setting may be: small rules that accept and normalise one value, and say in words what they accept.

The same words stand in the error and in the table of settings, so they cannot differ.
"""

from __future__ import annotations

import math
import numbers
import os
from dataclasses import dataclass
from typing import Any, Protocol

LARGEST = 2**63 - 1


class Refusal(ValueError):
    """A value that a rule does not accept. The caller knows the setting's name and makes the message."""


class Rule(Protocol):
    """One setting's limits."""

    @property
    def allowed(self) -> str:
        """What is accepted, as the end of the sentence "allowed: …"."""

    def accept(self, value: Any) -> Any:
        """The value in its plain form (int, float, bool, str, tuple). Raises Refusal."""


@dataclass(frozen=True)
class Whole:
    """An integer that 64 bits can hold. A bool is none, and neither is 2.0."""

    least: int
    most: int | None = None

    @property
    def allowed(self) -> str:
        if self.most is None:
            return f"a whole number, {self.least} or more"
        return f"a whole number from {self.least} to {self.most}"

    def accept(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise Refusal
        whole = int(value)
        if not self.least <= whole <= (LARGEST if self.most is None else self.most):
            raise Refusal
        return whole


@dataclass(frozen=True)
class Real:
    """A finite number; integers are taken as floats, a bool is refused. `least` and `most` are themselves allowed."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    @property
    def allowed(self) -> str:
        bounds = [
            words
            for words, bound in (
                (f"at least {self.least}", self.least),
                (f"above {self.above}", self.above),
                (f"at most {self.most}", self.most),
                (f"below {self.below}", self.below),
            )
            if bound is not None
        ]
        return " ".join(["a finite number", " and ".join(bounds)]).strip()

    def accept(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise Refusal
        try:
            real = float(value)
        except OverflowError:
            raise Refusal from None
        if (
            not math.isfinite(real)
            or (self.least is not None and real < self.least)
            or (self.above is not None and real <= self.above)
            or (self.most is not None and real > self.most)
            or (self.below is not None and real >= self.below)
        ):
            raise Refusal
        return real


@dataclass(frozen=True)
class Choice:
    """One of a few names."""

    names: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return " or ".join(f'"{name}"' for name in self.names)

    def accept(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise Refusal
        return value


@dataclass(frozen=True)
class Flag:
    """True or False, and nothing that merely counts as such."""

    @property
    def allowed(self) -> str:
        return "True or False"

    def accept(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise Refusal
        return value


@dataclass(frozen=True)
class Folder:
    """A path, str or os.PathLike. It is made absolute at once: a script may change its working directory later."""

    words: str = "a path"

    @property
    def allowed(self) -> str:
        return self.words

    def accept(self, value: Any) -> str:
        if not isinstance(value, str | os.PathLike):
            raise Refusal
        path = os.fspath(value)
        if not isinstance(path, str) or not path.strip() or "\0" in path:
            raise Refusal
        try:
            os.fsencode(path)
        except UnicodeEncodeError:  # half of a surrogate pair, which no file system takes
            raise Refusal from None
        return os.path.abspath(os.path.expanduser(path))


@dataclass(frozen=True)
class Either:
    """The first of two rules that accepts."""

    first: Rule
    second: Rule

    @property
    def allowed(self) -> str:
        return f"{self.first.allowed}, or {self.second.allowed}"

    def accept(self, value: Any) -> Any:
        try:
            return self.first.accept(value)
        except Refusal:
            return self.second.accept(value)


@dataclass(frozen=True)
class Maybe:
    """None with a meaning of its own, or what the rule accepts."""

    rule: Rule
    none: str

    @property
    def allowed(self) -> str:
        return f"None ({self.none}), or {self.rule.allowed}"

    def accept(self, value: Any) -> Any:
        return None if value is None else self.rule.accept(value)


@dataclass(frozen=True)
class Each:
    """A list or tuple of at least one value, every one of them under the same rule."""

    rule: Rule
    words: str

    @property
    def allowed(self) -> str:
        return self.words

    def accept(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not value:
            raise Refusal
        return tuple(self.rule.accept(item) for item in value)
