"""The base of every part of a plan: frozen, made of plain values, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from flodl.errors import PlanError
from flodl.plan.limits import Refusal, Rule
from flodl.plan.refusal import refused


def setting(rule: Rule, doc: str, *, default: Any = dataclasses.MISSING, name: str | None = None) -> Any:
    """A field under a rule. doc: one sentence for the table of settings; name: the user's, where not the field's."""
    metadata = {"rule": rule, "doc": doc, "name": name}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def setting_name(field: dataclasses.Field[Any], prefix: str = "") -> str:
    """What the user calls this field."""
    return prefix + (field.metadata["name"] or field.name)


class Section:
    """Checks and normalises its own settings. A subclass is a frozen dataclass.

    prefix: what stands before a field's name where the user gives the settings in an object of their own.
    """

    prefix = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            rule = field.metadata.get("rule")
            if rule is None:
                continue
            value = getattr(self, field.name)
            try:
                accepted = rule.accept(value)
            except Refusal:
                raise refused(setting_name(field, self.prefix), value, rule.allowed) from None
            object.__setattr__(self, field.name, accepted)


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raises PlanError for the first name that is not known, with the nearest that is."""
    names = sorted(known)
    for name in given:
        if name not in names:
            import difflib

            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            message = f"{name} is not among {what}{hint}\nAllowed: {', '.join(names)}."
            raise PlanError(message, field=str(name), allowed=names)
