"""Where settings come from outside the script: the environment, the command line, the machine.

The only reader of os.environ. Importing this module, which `import flodl` does, keeps the process's start (folder,
command line, environment) before the script can change it, and takes the role if this process is a rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from flodl.plan.parent import end_with_launcher
from flodl.plan.refusal import refused

ROLE = "FLODL_ROLE"
INSIDE = "FLODL_INSIDE"
DEBUG_RANK = "FLODL_DEBUG_RANK"


@dataclass(frozen=True)
class Started:
    """How this process was started. argv: as the interpreter got it, its own options included (sys.orig_argv)."""

    directory: str
    argv: tuple[str, ...]
    environment: dict[str, str]


class EarlierCall(NamedTuple):
    """A run() call of the script that is over. directory: of its run, "" where it was refused before it had one.
    error: the class of what it raised, "" where it returned; message: its words."""

    directory: str
    error: str = ""
    message: str = ""


@dataclass(frozen=True)
class Role:
    """What a launcher tells a rank's process.

    link: an inherited descriptor, the rank's end of its socket pair; run_rank owns it. ordinal: which run() call of the
    script is this run. earlier: what the calls before it came to. threads: torch threads, 0 leaves them alone.
    dataset_length: in samples, as the launcher saw it; 0 where it did not look.
    """

    run: str
    rank: int
    generation: int
    ordinal: int
    link: int
    run_directory: str
    entry: str | None = None
    plan: dict[str, Any] | None = None
    threads: int = 0
    sys_path: tuple[str, ...] = ()
    is_debugged: bool = False
    dataset_length: int = 0
    earlier: tuple[EarlierCall, ...] = ()

    def to_json(self) -> str:
        """The value of FLODL_ROLE."""
        return json.dumps({item.name: getattr(self, item.name) for item in fields(self)}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Role:
        """Raises PlanError where a launcher of another version, or a person, wrote the variable."""
        try:
            values = json.loads(text)
            values["sys_path"] = tuple(values.get("sys_path", ()))
            values["earlier"] = tuple(EarlierCall(*call) for call in values.get("earlier", ()))
            return Role(**values)
        except (ValueError, TypeError, AttributeError) as error:
            raise refused(
                ROLE, text, f"nothing: flodl sets this variable for the processes it starts ({error})"
            ) from None


class Inside(NamedTuple):
    """The mark of a rank: in it, and in every process that it starts."""

    run: str
    rank: int
    pid: int


@dataclass
class _Taken:
    started: Started
    role: Role | None
    pid: int
    at: float  # time.monotonic()


def _take() -> _Taken:
    text = os.environ.pop(ROLE, None)
    role = None if text is None else Role.from_json(text)
    if role is not None:
        os.environ[INSIDE] = f"{role.run}:{role.rank}:{os.getpid()}"
        if not role.is_debugged:
            end_with_launcher(role.link)
    started = Started(_working_directory(), tuple(sys.orig_argv), dict(os.environ))
    return _Taken(started, role, os.getpid(), time.monotonic())


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed while this process stood in it
        return os.environ.get("PWD", os.sep)


_taken = _take()


def started() -> Started:
    """How this process was started, as it was when flodl was imported."""
    return _taken.started


def running_s() -> float:
    """Seconds since this process was started; since flodl was imported where the system does not say (not Linux)."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _taken.at


def role() -> Role | None:
    """This process's role; None in a launcher, and in a process that a rank forked."""
    return _taken.role if os.getpid() == _taken.pid else None


def inside() -> Inside | None:
    """The rank that this process is or was started by, whether or not it is that process."""
    text = os.environ.get(INSIDE)
    if text is None:
        return None
    run, rank, pid = ["", "", "", *text.rsplit(":", 2)][-3:]
    if not run or not rank.isdecimal() or not pid.isdecimal():
        raise refused(INSIDE, text, "nothing: flodl sets this variable for the processes it starts")
    return Inside(run, int(rank), int(pid))


def debug_rank() -> int | None:
    """The rank named by FLODL_DEBUG_RANK, which `--debug-rank` sets; launcher and ranks see the same."""
    text = os.environ.get(DEBUG_RANK, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise refused(DEBUG_RANK, text, "a rank's number")
    return int(text)


def running_test() -> str | None:
    """The test that pytest runs right now, by its own account."""
    return os.environ.get("PYTEST_CURRENT_TEST")


def count_gpus() -> int:
    """GPUs that torch can use now; 0 without torch. Imports torch, and makes no context on any device."""
    try:
        import torch
    except ImportError:
        return 0
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
