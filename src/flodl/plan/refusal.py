"""The one form of a PlanError: field and value in the first line, what is allowed in the second."""

from __future__ import annotations

import reprlib

from flodl.errors import PlanError

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120
_short.maxlist = _short.maxtuple = _short.maxdict = 8


def refused(field: str, value: object, allowed: str, *, why: str = "") -> PlanError:
    """The error to raise. why: half a sentence after the value, where the value alone does not show what is wrong."""
    reason = f": {_one_line(why)}" if why else " is not allowed"
    shown = _one_line(_short.repr(value))
    return PlanError(f"{field} = {shown}{reason}\nAllowed: {allowed}.", field=field, value=value, allowed=(allowed,))


def missing(field: str, allowed: str) -> PlanError:
    """For a field that has no default and was not given."""
    return PlanError(f"{field} is not given\nAllowed: {allowed}.", field=field, value=None, allowed=(allowed,))


def _one_line(text: str) -> str:
    return " ".join(text.split())
