"""Rows of every benchmark: a line as each becomes known, one table for people, one JSON file for machines."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

_PLAIN_WIDTH = 160


@dataclass(frozen=True)
class Row:
    """subject: flodl or a peer's name. ratio: value to bound.

    ok: whether the budget was kept; None where there is none, or where the figure is void.
    """

    case: str
    subject: str
    metric: str
    value: float
    unit: str = ""
    bound: float | None = None
    ratio: float | None = None
    budget: str = ""
    ok: bool | None = None
    note: str = ""


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    from flodl.devices.cpu import usable_cores

    return {
        "processor": _processor(),
        "usable_cores": usable_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def line_of(row: Row) -> str:
    """One row as a plain line, as it becomes known."""
    words = [f"{row.case}: {row.subject} {row.metric} {row.value:.4g} {row.unit}".rstrip()]
    if row.bound is not None and row.ratio is not None:
        words.append(f"{row.ratio:.3f} of {row.bound:.4g} {row.unit}".rstrip())
    if row.budget:
        words.append(f"budget {row.budget}: {_mark(row.ok)}")
    return ", ".join(words) + (f" ({row.note})" if row.note else "")


def report(rows: list[Row], json_path: str | None) -> None:
    """Prints the table, notes below it; writes the file if asked. Raises OSError where it cannot be written."""
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("case", "subject", "metric", "value", "bound", "ratio", "budget", ""):
        table.add_column(
            heading, overflow="fold", justify="right" if heading in ("value", "bound", "ratio") else "left"
        )
    for number, row in enumerate(rows, start=1):
        bound = "" if row.bound is None else f"{row.bound:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        value = f"{row.value:.4g} {row.unit}".strip()
        case = f"{row.case} [{number}]" if row.note else row.case
        mark = _mark(row.ok) if row.budget else ""
        table.add_row(Text(case), Text(row.subject), row.metric, value, bound, ratio, row.budget, mark)
    notes = [Text(f"[{number}] {row.note}", style="dim") for number, row in enumerate(rows, start=1) if row.note]
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    console.print(Group(table, *notes))
    if json_path:
        document = {"commit": _commit(), "machine": machine(), "rows": [asdict(row) for row in rows]}
        Path(json_path).write_text(json.dumps(document, indent=1) + "\n")


def _mark(ok: bool | None) -> str:
    return "void" if ok is None else ("ok" if ok else "MISSED")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    try:
        where = Path(__file__).parent
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=True)
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
