"""Who may import whom, for Python and C++, read from the sources without importing them."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Room -> the rooms it may import directly. Whatever those may import, it may import too.
PYTHON_ROOMS: Mapping[str, frozenset[str]] = {
    "errors": frozenset(),
    "native": frozenset({"errors"}),
    "plan": frozenset({"errors"}),
    "records": frozenset({"errors"}),
    "protocol": frozenset({"plan"}),
    "simulation": frozenset({"protocol"}),
    "averaging": frozenset({"protocol", "native"}),
    "checkpoint": frozenset({"protocol", "native"}),
    "datasets": frozenset({"protocol", "native"}),
    "devices": frozenset({"protocol", "native"}),
    "processes": frozenset({"protocol", "records", "native", "devices", "checkpoint"}),
    "rank": frozenset({"averaging", "checkpoint", "datasets", "devices"}),
    "result": frozenset({"rank"}),
    "trainer": frozenset({"processes", "result"}),
    "__init__": frozenset({"trainer"}),
    "portal": frozenset({"trainer", "__init__"}),
    "bench": frozenset({"trainer", "__init__"}),
    "cli": frozenset({"bench", "portal", "simulation"}),
    "__main__": frozenset({"cli"}),
}

# What a sans-I/O machine must not touch: it is handed the time and every message.
PROTOCOL_FORBIDS = frozenset(
    {"asyncio", "logging", "multiprocessing", "os", "random", "select", "signal", "socket", "subprocess"}
    | {"threading", "time", "torch"}
)
ENVIRONMENT_READERS = frozenset({"plan/sources.py", "cli/testing.py"})
NAMES_THAT_SAY_NOTHING = frozenset({"utils", "util", "common", "helpers", "helper", "manager", "misc"})

# Room -> the rooms whose headers it may include; its own always.
NATIVE_ROOMS: Mapping[str, frozenset[str]] = {
    "include": frozenset(),
    "core": frozenset({"include"}),
    "transport": frozenset({"core", "include"}),
    "kernels": frozenset({"core", "include"}),
    "cuda": frozenset({"kernels", "core", "include"}),
    "rocm": frozenset({"kernels", "core", "include"}),
    "mps": frozenset({"kernels", "core", "include"}),
    "averager": frozenset({"transport", "kernels", "core", "include"}),
    "bindings": frozenset({"averager", "transport", "kernels", "core", "include"}),
    "tests": frozenset({"averager", "transport", "kernels", "core", "include", "cuda", "rocm", "mps"}),
}
NATIVE_SUFFIXES = frozenset({".h", ".cc", ".cu", ".hip", ".mm", ".metal"})
INCLUDE = re.compile(r'^\s*#\s*(?:include|import)\s*[<"]([^>"]+)[>"]', re.MULTILINE)
ENVIRONMENT_NAMES = frozenset({"environ", "environb", "getenv", "getenvb"})


def reachable(room: str) -> frozenset[str]:
    """The room and everything to its right in the table."""
    found = {room}
    waiting = [room]
    while waiting:
        new = PYTHON_ROOMS[waiting.pop()] - found
        found |= new
        waiting += new
    return frozenset(found)


def imported_modules(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in the file, also inside functions; relative ones resolved.

    `from a import b` gives a.b, because b may be a module.
    """
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                above = ".".join(parts[: len(parts) - node.level + 1])
                base = f"{above}.{base}" if base else above
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def python_violations(package: Path) -> list[str]:
    """One line per violation in the tree of the package flodl at this path."""
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        room = name.parts[0].removesuffix(".py")
        if room not in PYTHON_ROOMS:
            found.append(f"{name}: room '{room}' is not in the table")
            continue
        found += [
            f"{name}: '{part}' is no name" for part in name.with_suffix("").parts if part in NAMES_THAT_SAY_NOTHING
        ]
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        dotted = ".".join(["flodl", *name.with_suffix("").parts]).removesuffix(".__init__")
        for line, target in imported_modules(tree, dotted, path.name == "__init__.py"):
            fault = import_fault(room, target)
            if fault:
                found.append(f"{name}:{line}: {fault}")
        if str(name.as_posix()) not in ENVIRONMENT_READERS:
            found += [f"{name}:{line}: reads the environment" for line in environment_reads(tree)]
    return found


def import_fault(room: str, target: str) -> str:
    """What is wrong with a file of this room importing this dotted name; '' if nothing."""
    parts = target.split(".")
    if parts[0] != "flodl":
        is_forbidden = room == "protocol" and parts[0] in PROTOCOL_FORBIDS
        return f"protocol imports {parts[0]}" if is_forbidden else ""
    second = parts[1] if len(parts) > 1 else ""
    if second == "_native":
        return "" if room == "native" else f"{room} imports _native"
    other = second if second in PYTHON_ROOMS else "__init__"
    return "" if other in reachable(room) else f"{room} imports {other}"


def environment_reads(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES:
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in ENVIRONMENT_NAMES)


def native_violations(native: Path) -> list[str]:
    """One line per violation in the tree of C++ rooms at this path."""
    found: list[str] = []
    for path in sorted(native.rglob("*")):
        name = path.relative_to(native)
        if path.suffix not in NATIVE_SUFFIXES or "third_party" in name.parts:
            continue
        room = name.parts[0]
        if room not in NATIVE_ROOMS:
            found.append(f"{name}: room '{room}' is not in the table")
            continue
        for header in INCLUDE.findall(path.read_text(encoding="utf-8")):
            first = header.split("/")[0]
            if first in {"Python.h", "nanobind"}:
                if room != "bindings":
                    found.append(f"{name}: {room} includes {header}")
                continue
            if "/" not in header or first not in {*NATIVE_ROOMS, "flodl"}:
                continue
            other = "include" if first == "flodl" else first
            if other not in {room, *NATIVE_ROOMS[room]}:
                found.append(f"{name}: {room} includes {header}")
    return found


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_python_rooms_import_to_the_right_only() -> None:
    package = ROOT / "src" / "flodl"
    assert len(list(package.rglob("*.py"))) > 10
    assert python_violations(package) == []


def test_native_rooms_include_to_the_right_only() -> None:
    native = ROOT / "native"
    assert len(list(native.rglob("*.cc"))) > 10
    assert native_violations(native) == []


def test_nothing_reaches_itself_through_another_room() -> None:
    for room in PYTHON_ROOMS:
        assert all(room not in reachable(other) for other in reachable(room) - {room}), room
    assert "rank" not in reachable("processes")
    assert reachable("records") == {"records", "errors"}
    assert reachable("protocol") == {"protocol", "plan", "errors"}


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("protocol/round.py", "import time\n", "protocol imports time"),
        ("protocol/round.py", "def f():\n    from random import choice\n", "protocol imports random"),
        ("protocol/round.py", "from ..processes import spawn\n", "protocol imports processes"),
        ("processes/agent.py", "from flodl.rank.loop import run\n", "processes imports rank"),
        ("processes/agent.py", "from flodl import rank\n", "processes imports rank"),
        ("processes/agent.py", "import flodl\n", "processes imports __init__"),
        ("records/record.py", "from flodl.plan import data\n", "records imports plan"),
        ("errors.py", "from flodl import native\n", "errors imports native"),
        ("rank/loop.py", "from flodl import _native\n", "rank imports _native"),
        ("rank/loop.py", "from flodl._native import isa\n", "rank imports _native"),
        ("simulation/world.py", "from flodl.processes.driver import Driver\n", "simulation imports processes"),
        ("rank/loop.py", "import os\nhome = os.environ['HOME']\n", "reads the environment"),
        ("rank/loop.py", "from os import getenv\n", "reads the environment"),
        ("rank/utils.py", "", "'utils' is no name"),
        ("tricks/magic.py", "", "room 'tricks' is not in the table"),
    ],
)
def test_a_python_violation_is_found(tmp_path: Path, name: str, text: str, fault: str) -> None:
    found = python_violations(write_tree(tmp_path, {name: text}))
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("core/thread.cc", '#include "transport/link.h"\n', "core includes transport/link.h"),
        ("kernels/avx2.cc", '#include "transport/link.h"\n', "kernels includes transport/link.h"),
        ("include/flodl/status.h", '#include "core/thread.h"\n', "include includes core/thread.h"),
        ("averager/fold.cc", "#include <nanobind/nanobind.h>\n", "averager includes nanobind/nanobind.h"),
        ("core/status.cc", "  #  include <Python.h>\n", "core includes Python.h"),
        ("tests/fold_test.cc", '#include "bindings/names.h"\n', "tests includes bindings/names.h"),
        ("tricks/magic.cc", "", "room 'tricks' is not in the table"),
    ],
)
def test_a_native_violation_is_found(tmp_path: Path, name: str, text: str, fault: str) -> None:
    found = native_violations(write_tree(tmp_path, {name: text}))
    assert len(found) == 1
    assert fault in found[0]


def test_what_the_table_allows_passes(tmp_path: Path) -> None:
    python = {
        "__init__.py": "from flodl.trainer import Trainer\nfrom flodl.errors import FlodlError\n",
        "native.py": "from flodl import _native\n",
        "protocol/round.py": "from dataclasses import dataclass\nfrom . import messages\nfrom flodl.plan import data\n",
        "protocol/messages.py": "from ..errors import WireError\n",
        "trainer.py": "from flodl.rank import loop\nfrom flodl.records import record\n",
        "plan/sources.py": "import os\nvalue = os.environ.get('FLODL_ROLE')\n",
        "cli/demo.py": "import flodl\nfrom flodl import bench\n",
    }
    native = {
        "bindings/module.cc": '#include <nanobind/nanobind.h>\n#include "averager/fold.h"\n#include "flodl/pool.h"\n',
        "core/pool.cc": '#include "flodl/pool.h"\n#include <sys/types.h>\n#include "core/thread.h"\n',
    }
    assert python_violations(write_tree(tmp_path / "flodl", python)) == []
    assert native_violations(write_tree(tmp_path / "native", native)) == []
