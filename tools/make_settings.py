"""Writes docs/settings.md from the plan: `python tools/make_settings.py`, or with --check to compare only."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from flodl.plan import DiLoCo, LoaderPlan, OuterPlan, Plan, SlowMo
from flodl.plan.build import AUTO_MODES, AUTOMATIC, SECTIONS
from flodl.plan.limits import Choice
from flodl.plan.section import Section, setting_name

TARGET = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Every keyword of `flodl.Trainer` that is not one of the user's parts (model, optimizer, loss, data, ...), with its
default and what is allowed. A value outside of that is a `PlanError` before anything starts. This page is written by
`tools/make_settings.py` from the plan's own classes. The parts, `entry`, `run_directory` and `replay` are in
[parts.md](parts.md); window, anchor and drift in the [glossary](../ARCHITECTURE.md#words).
"""
TITLES = {
    "run": "The run",
    "data": "Data",
    "training": "The step",
    "cadence": "Cadence",
    "averaging": "Averaging",
    "checkpoint": "Checkpoints",
    "cluster": "Ranks",
    "outer": "The outer optimizer: `outer=flodl.DiLoCo(...)` or `outer=flodl.SlowMo(...)`, default None",
    "loader": "The loader: `loader={...}` or `loader=flodl.LoaderPlan(...)`",
}
DEVICES = """
## Devices

A rank trains on `cpu`, `cuda:N`, or an emulated device: a processor step that is padded to a longer duration, and is
named emulated wherever a run is reported.

| word | a step lasts |
|---|---|
| `emulated:47ms`, `emulated:0.047s` | 47 ms, or as long as the real work where that takes longer |
| `emulated:cpu*4.7` | 4.7 times the real work |
| `...,jitter=0.1` | that, times a factor drawn evenly from 0.9 to 1.1 for each batch (0 to below 1) |
| `...,drift=1.5` | that, changing evenly over the run to 1.5 times at its end (0.01 to 100) |

`devices="auto"` takes the one GPU that torch sees, or the processor where it sees none. `mode="auto"` is `solo` on one
device and `cpu-cadence` on several; one device in another mode than `solo` is one rank under a launcher.
"""


def page() -> str:
    """The whole of docs/settings.md."""
    parts = [HEAD, *(_table(name, kind) for name, kind in (("run", Plan), *SECTIONS))]
    return "".join([*parts, _table("outer", OuterPlan), _table("loader", LoaderPlan), DEVICES])


def _table(name: str, kind: type[Section]) -> str:
    lines = [f"\n## {TITLES[name]}\n\n| setting | default | allowed | what it does |\n|---|---|---|---|\n"]
    for field in dataclasses.fields(kind):
        if "rule" not in field.metadata:
            continue
        setting = setting_name(field)
        cells = (f"`{setting}`", _default(setting, field, kind), _allowed(setting, field), field.metadata["doc"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(lines)


def _default(setting: str, field: dataclasses.Field[object], kind: type[Section]) -> str:
    if setting in AUTOMATIC:
        return '`"auto"`'
    if kind is OuterPlan and getattr(DiLoCo(), field.name) != getattr(SlowMo(), field.name):
        return f"DiLoCo {getattr(DiLoCo(), field.name)}, SlowMo {getattr(SlowMo(), field.name)}"
    if field.default is dataclasses.MISSING:
        return "required"
    return f'`"{field.default}"`' if isinstance(field.default, str) else f"`{field.default}`"


def _allowed(setting: str, field: dataclasses.Field[object]) -> str:
    if setting == "mode":
        return Choice(AUTO_MODES).allowed
    return str(field.metadata["rule"].allowed)


def main() -> int:
    """0 if the page is or has been made current, 1 if --check finds it is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not current")
    if not parser.parse_args().check:
        TARGET.write_text(page(), encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == page():
        return 0
    sys.stderr.write(f"{TARGET} is not current: run python tools/make_settings.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
