"""Rows of every benchmark: one table for people, one JSON file for machines."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """subject: flodl or a peer's name. ratio: value to bound. ok: None where there is no budget."""

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


def report(rows: list[Row], json_path: str | None) -> None:
    """Prints the table; writes the file if asked."""
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("case", "subject", "metric", "value", "bound", "ratio", "budget", "", "note"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        mark = "" if row.ok is None else ("ok" if row.ok else "MISSED")
        bound = "" if row.bound is None else f"{row.bound:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        value = f"{row.value:.4g} {row.unit}".strip()
        table.add_row(row.case, row.subject, row.metric, value, bound, ratio, row.budget, mark, row.note)
    console = Console()
    console.print(table)
    if json_path:
        document = {"commit": _commit(), "machine": machine(), "rows": [asdict(row) for row in rows]}
        Path(json_path).write_text(json.dumps(document, indent=1) + "\n")


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
