"""What must agree before a rank is let in, and in which words a difference is named."""

from __future__ import annotations

from typing import Any

from flodl.protocol import signatures
from flodl.protocol.messages import Hello


def differences(plan: dict[str, Any], hello: Hello, first: Hello | None) -> list[str]:
    """How a newcomer differs from the launcher's plan and from the first rank's model and data; empty: let it in."""
    found = plan_differences(plan, hello.plan)
    if first is not None:
        found += signatures.differences(first.layout, hello.layout)
        found += signatures.differences(first.data, hello.data)
    return found


def plan_differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Dotted names of the fields whose values differ, with both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = []
        for key in sorted(ours.keys() | theirs.keys()):
            found += plan_differences(ours.get(key), theirs.get(key), f"{path}.{key}" if path else str(key))
        return found
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        ours, theirs = list(ours), list(theirs)
    return [] if ours == theirs else [f"plan: {path} is {theirs!r} here and {ours!r} in the launcher"]
