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

from flodl.plan.program import parse_command_line
from flodl.plan.refusal import refused
from flodl.plan.sources import ROLE, EarlierCall, Role

THREADS_VARIABLE = "OMP_NUM_THREADS"


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
    earlier: tuple[EarlierCall, ...] = ()
    sys_path: tuple[str, ...] = ()
    debug_rank: int | None = None
    dataset_length: int = 0


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
        # The kernel ends a rank with the thread that starts it (flodl.plan.parent). That is the thread which called
        # launch() and drives the run: it stays in there until the last rank is gone.
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
    program = parse_command_line(command)
    if program.kind not in ("script", "module"):
        how = "a program started as `python file.py` or `python -m module`"
        raise refused("debug_rank", shlex.join(command), how, why="this command has no script or module for pdb")
    start = ("-m", program.name) if program.kind == "module" else (program.name,)
    return (command[0], *program.options, "-m", "pdb", *start, *program.arguments)


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
        dataset_length=settings.dataset_length,
        earlier=settings.earlier,
    )
