"""Trainer: a plan and the user's parts in, a RunResult out."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from flodl.errors import PlanError
from flodl.plan import Plan, Role, Settings, build_plan, program, setting_names, sources
from flodl.plan.refusal import refused
from flodl.plan.section import refuse_unknown
from flodl.rank.parts import Parts, build_parts, check_entry, part_names, parts_from_entry
from flodl.result import RunResult, make_result, stored_result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from flodl.processes.perform_records import View

_GUARD = (
    'Put the statements that the script runs under `if __name__ == "__main__":`, so that importing it runs nothing.'
)
RUNS = "runs"


@dataclass
class _Calls:
    """The run() calls of this process, in order: each one's run directory, "" where it was refused."""

    directories: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


_calls = _Calls()


@dataclass(frozen=True)
class _Shown:
    """What the user sees of a run of several ranks."""

    view: View | None
    is_quiet: bool


class Trainer:
    """Trains one model on one device or on several of unequal speed.

    model, optimizer, loss, data and the other parts are described in flodl.rank.parts.Parts; every further keyword is a
    setting (docs/settings.md). entry="package.module:build" names a function that returns the parts as a dict instead,
    for programs that cannot be started a second time, such as notebooks and tests; the parts are then not given here.
    run_directory: where the run writes what it did; a folder of its own under runs/ unless set.

    Raises PlanError, naming field, value and what is allowed, before anything starts.
    """

    def __init__(
        self,
        *,
        model: Callable[[], nn.Module] | None = None,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        data: Any = None,
        evaluate: Callable[[nn.Module, Any], Mapping[str, float]] | None = None,
        eval_data: Any = None,
        scheduler: Callable[[Any], Any] | None = None,
        callbacks: list[Any] | tuple[Any, ...] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        worker_init: Callable[[int], None] | None = None,
        entry: str | None = None,
        run_directory: str | os.PathLike[str] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        own = ("entry", "run_directory")
        refuse_unknown(settings, (*setting_names(), *part_names(), *own), "the trainer's settings and parts")
        parts = {
            "model": model,
            "optimizer": optimizer,
            "loss": loss,
            "data": data,
            "evaluate": evaluate,
            "eval_data": eval_data,
            "scheduler": scheduler,
            "callbacks": callbacks,
            "collate": collate,
            "worker_init": worker_init,
        }
        given = {name: part for name, part in parts.items() if part is not None}
        self._entry = None if entry is None else check_entry(entry)
        if self._entry is not None and given:
            raise refused("entry", entry, f"without {', '.join(given)}: with entry, its function returns all parts")
        self._run_directory = _absolute(run_directory)
        self._plan = build_plan(**settings)
        self._parts = None if self._entry is not None else build_parts(given)
        if self._parts is not None and "torch" in sys.modules:
            _check_parts(self._parts)

    @property
    def plan(self) -> Plan:
        """The checked plan: nothing in it is "auto"."""
        return self._plan

    def run(self, *, view: View | None = None, quiet: bool = False) -> RunResult:
        """Trains to the end. In a process that a launcher started as a rank it never returns.

        view: shows a run of several ranks while it goes on. quiet: what the ranks print goes to their logs only. Raises
        PlanError before anything starts, RunFailed with the failing
        rank's traceback once it has; on one device the user's own exceptions pass through.
        """
        _refuse_foreign_process()
        if not _calls.lock.acquire(blocking=False):
            raise PlanError(
                "run() was called while another run() of this process is at work\nCall one after the other."
            )
        try:
            ordinal = len(_calls.directories)
            _calls.directories.append("")
            role = sources.role()
            if role is not None:
                return self._run_as_rank(role, ordinal)
            return self._run_as_launcher(ordinal, _Shown(view, quiet))
        finally:
            _calls.lock.release()

    def _run_as_rank(self, role: Role, ordinal: int) -> RunResult:
        """Earlier calls of the script give what they gave in the launcher; the call that made this rank trains."""
        if role.entry is not None:
            raise PlanError(
                f"run() was called by {role.entry}, which a rank calls for its parts\n"
                "Let it return a dict of parts, and call run() elsewhere."
            )
        parts = self._checked_parts()
        if ordinal < role.ordinal:
            directory = role.earlier[ordinal]
            if not directory:
                raise PlanError(
                    f"call {ordinal + 1} of run() was refused in the launcher\n"
                    "The launcher's message says why; this rank repeats only that it was."
                )
            return stored_result(directory, parts, self._plan.seed)
        from flodl.rank.process import run_rank

        return run_rank(self._plan, parts, role)

    def _run_as_launcher(self, ordinal: int, shown: _Shown) -> RunResult:
        is_solo = self._plan.mode == "solo"
        if not is_solo and self._entry is None:
            _refuse_program_without_return(self._plan)
        parts = self._checked_parts()
        self._check_run(parts)
        run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        directory = _make_run_directory(self._run_directory, run)
        _calls.directories[ordinal] = directory
        began = time.monotonic()
        raw = self._train_alone(parts, directory) if is_solo else self._launch(parts, (run, directory), ordinal, shown)
        raw.setdefault("wall_s", time.monotonic() - began)
        return make_result(raw, directory, parts, self._plan.seed)

    def _train_alone(self, parts: Parts, directory: str) -> dict[str, Any]:
        from flodl.rank.solo import run_solo

        return run_solo(self._plan, parts, directory)

    def _launch(self, parts: Parts, place: tuple[str, str], ordinal: int, shown: _Shown) -> dict[str, Any]:
        from flodl.processes.launcher import LaunchRequest, launch

        start = sources.started()
        is_entered = self._entry is not None
        request = LaunchRequest(
            plan=self._plan,
            dataset_length=len(parts.data),
            run=place[0],
            run_directory=place[1],
            command=(sys.executable, "-m", "flodl.rank") if is_entered else program.command_again(),
            directory=start.directory,
            environment=dict(start.environment),
            entry=self._entry,
            earlier=tuple(_calls.directories[:ordinal]),
            ordinal=ordinal,
            view=shown.view,
            evaluates=parts.evaluate is not None,
            quiet=shown.is_quiet,
        )
        return launch(request)

    def _checked_parts(self) -> Parts:
        if self._parts is None:
            assert self._entry is not None
            self._parts = parts_from_entry(self._entry)
        _check_parts(self._parts)
        return self._parts

    def _check_run(self, parts: Parts) -> None:
        from flodl.rank.checks import check_fit

        check_fit(self._plan, len(parts.data))
        checkpoint = self._plan.checkpoint
        if checkpoint.directory is None or checkpoint.resume is not False or checkpoint.overwrite:
            return
        if os.path.isdir(checkpoint.directory) and os.listdir(checkpoint.directory):
            raise refused(
                "checkpoint",
                checkpoint.directory,
                'an empty or new folder, or this one with resume="auto" (go on) or overwrite=True (start anew)',
                why="the folder is not empty",
            )


def _check_parts(parts: Parts) -> None:
    from flodl.rank.checks import check_parts

    check_parts(parts)


def _refuse_foreign_process() -> None:
    """Raises PlanError where this process only imports the script, for a rank's or a loader's sake."""
    if program.is_being_prepared():
        raise PlanError(f"run() was reached while multiprocessing imports the script for a child process\n{_GUARD}")
    mark = sources.inside()
    if mark is not None and sources.role() is None:
        raise PlanError(
            f"run() was reached in process {os.getpid()}, which rank {mark.rank} of run {mark.run} started "
            f"and which is not that rank (process {mark.pid})\n{_GUARD} "
            f"A separate program must not inherit the variable {sources.INSIDE}."
        )


def _refuse_program_without_return(plan: Plan) -> None:
    """Several ranks start this program again: raises PlanError where that would not lead to this call."""
    reason = program.why_not_again()
    if reason:
        raise PlanError(
            f"{plan.cluster.world_size} ranks cannot be started by running this program again: {reason}\n"
            "Write a function build() that returns dict(model=..., optimizer=..., loss=..., data=...) in a module, and "
            'use Trainer(entry="package.module:build", batch_size=..., ...). One device in mode "solo" needs neither.',
            field="entry",
        )


def _absolute(run_directory: str | os.PathLike[str] | None) -> str | None:
    if run_directory is None:
        return None
    if not isinstance(run_directory, str | os.PathLike) or not str(run_directory).strip():
        raise refused("run_directory", run_directory, "None, or the path of a new or empty folder")
    return os.path.abspath(os.path.expanduser(os.fspath(run_directory)))


def _make_run_directory(wanted: str | None, run: str) -> str:
    directory = wanted or os.path.join(sources.started().directory, RUNS, run)
    try:
        os.makedirs(directory, exist_ok=wanted is not None)
        is_taken = bool(os.listdir(directory))
    except OSError as error:
        allowed = "the path of a folder that can be made and written to"
        raise refused("run_directory", directory, allowed, why=str(error)) from error
    if is_taken:
        raise refused("run_directory", directory, "a new or empty folder", why="it holds another run or other files")
    return directory
