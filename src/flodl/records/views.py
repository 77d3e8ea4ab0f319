"""What shows a run while it goes on: the names a user may give, and a guard around whatever they lead to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal, Protocol

from flodl.records.schedule import warn_on_stderr

ViewName = Literal["live", "plain", "json"]
VIEWS: tuple[ViewName, ...] = ("live", "plain", "json")


class View(Protocol):
    """Something that shows a run while it goes on. One that also has tick() is called at least once a second."""

    def record(self, record: dict[str, Any]) -> None:
        """One line of the schedule, as it is written."""

    def close(self) -> None:
        """The run is over."""


def is_view(value: object) -> bool:
    """Whether this can be told of records."""
    return all(callable(getattr(value, name, None)) for name in ("record", "close"))


def make_view(name: ViewName, terminal: str | None) -> View:
    """The view of this name: "live" on stderr where that is a terminal that can move its cursor, plain lines elsewhere;
    "plain" on stderr; "json" on stdout. terminal: the value of TERM."""
    if name == "json":
        from flodl.records.json_lines import JsonView

        return _Nothing() if sys.stdout is None else JsonView(sys.stdout)
    if sys.stderr is None:
        return _Nothing()
    if name == "live" and sys.stderr.isatty() and terminal not in ("dumb", "unknown"):
        from flodl.records.live import LiveView

        return LiveView(sys.stderr)
    from flodl.records.plain import PlainView

    return PlainView(sys.stderr)


class GuardedView:
    """A view that cannot end the run: what it raises is said once, and then it is shown nothing more."""

    def __init__(self, view: View, warn: Callable[[str], None] = warn_on_stderr) -> None:
        self._view = view
        self._tick: Callable[[], None] | None = getattr(view, "tick", None)
        self._warn = warn
        self._is_broken = False
        self._is_closed = False

    def record(self, record: dict[str, Any]) -> None:
        """Never raises an Exception."""
        if not self._is_broken:
            self._try(lambda: self._view.record(record))

    def tick(self) -> None:
        """Never raises an Exception; nothing for a view that has no tick()."""
        if self._tick is not None and not self._is_broken:
            self._try(self._tick)

    def close(self) -> None:
        """The view is closed even where it failed before. Twice is once."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._view.close()
        except Exception as error:
            self._warn(f"the view failed while closing: {error!r}")

    def _try(self, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception as error:
            self._is_broken = True
            self._warn(f"the view failed and is off from now on; training goes on: {error!r}")


class _Nothing:
    """For a process without streams."""

    def record(self, record: dict[str, Any]) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Nothing is open."""
