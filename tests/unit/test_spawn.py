"""Starting a rank: the same command, a role, a socket, and nothing else of this process."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flodl.errors import PlanError
from flodl.plan.sources import ROLE, Role
from flodl.processes.spawn import SpawnedRank, SpawnSettings, asked_threads, pdb_command, spawn_rank

REPORT = """
import json, os, socket, sys
role = json.loads(os.environ["FLODL_ROLE"])
link = socket.socket(fileno=role["link"])
listed = [int(name) for name in os.listdir("/proc/self/fd")]
seen = {"argv": sys.argv[1:], "cwd": os.getcwd(), "session": os.getsid(0), "pid": os.getpid(),
        "descriptors": sorted(d for d in listed if os.path.exists(f"/proc/self/fd/{d}")),
        "input": sys.stdin.read(), "role": role,
        "threads": os.environ["OMP_NUM_THREADS"], "unbuffered": os.environ["PYTHONUNBUFFERED"],
        "own": os.environ.get("OWN")}
print("to stdout")
print("to stderr", file=sys.stderr)
link.sendall(json.dumps(seen).encode())
"""


def settings(folder: Path, command: tuple[str, ...], **changes: Any) -> SpawnSettings:
    values: dict[str, Any] = {
        "run": "r1",
        "run_directory": str(folder / "run"),
        "command": command,
        "directory": str(folder),
        "environment": {"PATH": os.environ["PATH"], "OWN": "a b"},
        "plan": {"mode": "cpu-sync"},
        "threads": 3,
    }
    return SpawnSettings(**{**values, **changes})


def end_of(spawned: SpawnedRank) -> tuple[dict[str, Any], str]:
    """What the process sent and printed. Reaps it."""
    with socket.socket(fileno=spawned.link) as link, link.makefile("rb") as reader:
        seen = json.loads(reader.read() or b"null")
    assert spawned.output is not None
    with os.fdopen(spawned.output, "r") as output:
        printed = output.read()
    assert spawned.process.wait() == 0
    return seen, printed


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "a script's name.py"
    path.write_text(REPORT)
    return path


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_rank_gets_its_role_and_only_its_own_descriptors(tmp_path: Path, script: Path) -> None:
    arguments = ("--name", "two words", "it's", '"quoted"', "", "$HOME", "--flag=a;b")
    unrelated = os.open(tmp_path, os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    spawned = spawn_rank(settings(tmp_path, (sys.executable, str(script), *arguments), ordinal=2), 1, 4)
    seen, printed = end_of(spawned)
    os.close(unrelated)
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert seen["argv"] == list(arguments)
    assert seen["cwd"] == str(tmp_path)
    assert seen["session"] == seen["pid"] == spawned.process.pid
    assert seen["input"] == ""
    assert seen["descriptors"] == sorted({0, 1, 2, seen["role"]["link"]})
    assert printed == "to stdout\nto stderr\n"
    assert (seen["threads"], seen["unbuffered"], seen["own"]) == ("3", "1", "a b")
    role = Role.from_json(json.dumps(seen["role"]))
    assert (role.run, role.rank, role.generation, role.ordinal) == ("r1", 1, 4, 2)
    assert role.plan == {"mode": "cpu-sync"}
    assert (role.threads, role.is_debugged) == (3, False)


def test_the_users_own_settings_stay(tmp_path: Path, script: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": ""}
    seen, _ = end_of(spawn_rank(settings(tmp_path, (sys.executable, str(script)), environment=environment), 0, 0))
    assert (seen["threads"], seen["unbuffered"]) == ("7", "")


def test_a_module_is_started_as_a_module(tmp_path: Path, script: Path) -> None:
    script.rename(tmp_path / "reporter.py")
    seen, _ = end_of(spawn_rank(settings(tmp_path, (sys.executable, "-m", "reporter", "x y")), 0, 0))
    assert seen["argv"] == ["x y"]


@pytest.mark.parametrize(("command", "directory"), [("no-such-program-anywhere", "."), (sys.executable, "missing")])
def test_what_cannot_be_started_leaves_nothing_behind(tmp_path: Path, command: str, directory: str) -> None:
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    with pytest.raises(OSError, match="No such file"):
        spawn_rank(settings(tmp_path, (command,), directory=str(tmp_path / directory)), 0, 0)
    if before:
        assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py --lr 1", "python -m pdb train.py --lr 1"),
        ("python -u -X dev train.py -m x", "python -u -X dev -m pdb train.py -m x"),
        ("python -Xdev -Wignore train.py", "python -X dev -W ignore -m pdb train.py"),
        ("python -m pkg.train --lr 1", "python -m pdb -m pkg.train --lr 1"),
        ("python -mpkg.train a", "python -m pdb -m pkg.train a"),
        ("python -um pkg.train a", "python -u -m pdb -m pkg.train a"),
        ("python --check-hash-based-pycs always t.py", "python --check-hash-based-pycs always -m pdb t.py"),
        ("python -- train.py", "python -m pdb train.py"),
    ],
)
def test_pdb_goes_before_the_script(command: str, expected: str) -> None:
    assert shlex.join(pdb_command(tuple(shlex.split(command)))) == expected


@pytest.mark.parametrize("command", ["python -c pass", "python -", "python", "python -uc pass"])
def test_pdb_needs_a_script(command: str) -> None:
    with pytest.raises(PlanError, match="debug_rank") as caught:
        pdb_command(tuple(shlex.split(command)))
    assert caught.value.field == "debug_rank"


def test_a_debugged_rank_has_the_terminal(tmp_path: Path) -> None:
    """Started from a process whose own input and output stand for the terminal."""
    (tmp_path / "tiny.py").write_text("import sys\nprint('args', sys.argv[1:])\n")
    launcher = f"""
import os, sys
from flodl.processes.spawn import SpawnSettings, spawn_rank
settings = SpawnSettings("r", {str(tmp_path)!r}, (sys.executable, "tiny.py", "a b"), {str(tmp_path)!r},
                         dict(os.environ), {{}}, 1, debug_rank=1)
spawned = spawn_rank(settings, 1, 0)
assert spawned.output is None
sys.exit(spawned.process.wait())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", launcher],
        input="continue\nquit\n",
        capture_output=True,
        check=True,
        text=True,
        env=environment,
    )
    assert "(Pdb)" in done.stdout
    assert "args ['a b']" in done.stdout


@pytest.mark.parametrize(
    ("value", "threads"), [("4", 4), ("3,2", 3), (" 2 ", 2), ("0", None), ("", None), ("many", None), ("-1", None)]
)
def test_threads_that_the_user_asked_for(value: str, threads: int | None) -> None:
    assert asked_threads({"OMP_NUM_THREADS": value}) == threads
    assert asked_threads({}) is None


def test_the_role_is_not_in_the_command_line(tmp_path: Path, script: Path) -> None:
    spawned = spawn_rank(settings(tmp_path, (sys.executable, str(script))), 0, 0)
    assert ROLE not in shlex.join(str(part) for part in spawned.process.args)  # type: ignore[union-attr]
    end_of(spawned)
