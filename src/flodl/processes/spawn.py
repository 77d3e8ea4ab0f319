"""Starts one rank: the user's command once more, with a role in its environment and a socket to this process."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flodl.plan.refusal import refused
from flodl.plan.sources import ROLE, Role

THREADS_VARIABLE = "OMP_NUM_THREADS"

# Options of the Python command line that take a value, joined (-Wignore) or as the next argument.
_VALUE_OPTIONS = "cmWX"
_LONG_VALUE_OPTION = "--check-hash-based-pycs"


@dataclass(frozen=True)
class SpawnSettings:
    """What is the same for every rank of a run. threads: of torch in each rank."""

    run: str
    run_directory: str
    command: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    plan: dict[str, Any]
    threads: int
    ordinal: int = 0
    entry: str | None = None
    earlier: tuple[str, ...] = ()
    sys_path: tuple[str, ...] = ()
    debug_rank: int | None = None


@dataclass(frozen=True)
class SpawnedRank:
    """A running rank. Both descriptors belong to the caller; output is None where the rank has the terminal."""

    process: subprocess.Popen[bytes]
    link: int
    output: int | None


def spawn_rank(settings: SpawnSettings, rank: int, generation: int) -> SpawnedRank:
    """Starts the process in a session of its own. Raises OSError; nothing is left behind then.

    It inherits its end of a socket pair and nothing else that this process opened. The caller reaps it.
    """
    is_debugged = rank == settings.debug_rank
    with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as childs_ends:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        on_failure.callback(ours.close)
        childs_ends.callback(theirs.close)
        read_end = write_end = None
        if not is_debugged:
            read_end, write_end = os.pipe()
            on_failure.callback(os.close, read_end)
            childs_ends.callback(os.close, write_end)
        command = pdb_command(settings.command) if is_debugged else settings.command
        process = subprocess.Popen(
            command,
            cwd=settings.directory,
            env=rank_environment(settings, _role(settings, rank, generation, theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            stdin=None if is_debugged else subprocess.DEVNULL,
            stdout=write_end,
            stderr=None if is_debugged else subprocess.STDOUT,
        )
        on_failure.pop_all()
        return SpawnedRank(process, ours.detach(), read_end)


def rank_environment(settings: SpawnSettings, role: Role) -> dict[str, str]:
    """The environment of flodl's import, the role, and defaults where the user did not decide."""
    environment = {"PYTHONUNBUFFERED": "1", THREADS_VARIABLE: str(settings.threads), **settings.environment}
    environment[ROLE] = role.to_json()
    return environment


def asked_threads(environment: Mapping[str, str]) -> int | None:
    """The user's OMP_NUM_THREADS (its first level); None where it is no number: the rank gets a share of the cores."""
    asked = environment.get(THREADS_VARIABLE, "").split(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) > 0 else None


def pdb_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """The same Python command under pdb. Raises PlanError where the command has neither a script nor a module."""
    at = 1
    while at < len(command):
        argument = command[at]
        if argument == "--":
            at += 1
            break
        if argument == "-" or not argument.startswith("-"):
            break
        letter, value_is_joined, before = _value_option(argument)
        if letter == "m":
            module = argument[argument.index("m") + 1 :] if value_is_joined else command[at + 1]
            rest = command[at + 1 :] if value_is_joined else command[at + 2 :]
            return (*command[:at], *before, "-m", "pdb", "-m", module, *rest)
        if letter == "c":
            break
        at += 2 if letter and not value_is_joined else 1
    if at >= len(command) or command[at].startswith("-"):
        how = "a program started as `python file.py` or `python -m module`"
        raise refused("debug_rank", shlex.join(command), how, why="this command has no script or module for pdb")
    options = command[: at - 1] if command[at - 1] == "--" else command[:at]
    return (*options, "-m", "pdb", *command[at:])


def _value_option(argument: str) -> tuple[str, bool, tuple[str, ...]]:
    """(its letter or "", whether the value is in the same argument, the options joined before it)."""
    if argument.startswith("--"):
        return ("-" if argument == _LONG_VALUE_OPTION else ""), False, ()
    for place, letter in enumerate(argument[1:], start=1):
        if letter in _VALUE_OPTIONS:
            before = (argument[:place],) if place > 1 else ()
            return letter, place + 1 < len(argument), before
    return "", False, ()


def _role(settings: SpawnSettings, rank: int, generation: int, link: int) -> Role:
    return Role(
        run=settings.run,
        rank=rank,
        generation=generation,
        ordinal=settings.ordinal,
        link=link,
        run_directory=settings.run_directory,
        entry=settings.entry,
        plan=settings.plan,
        threads=settings.threads,
        sys_path=settings.sys_path,
        is_debugged=rank == settings.debug_rank,
        earlier=settings.earlier,
    )
