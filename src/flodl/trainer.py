"""Trainer: a plan and the user's parts in, a RunResult out."""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from flodl.errors import NativeError, PlanError
from flodl.plan import Plan, Role, Settings, build_plan, program, setting_names, sources
from flodl.plan.limits import Folder, Refusal
from flodl.plan.refusal import refused
from flodl.plan.section import refuse_unknown
from flodl.plan.sources import EarlierCall
from flodl.rank.parts import Parts, build_parts, check_entry, part_names, parts_from_entry
from flodl.result import RunResult, error_of, failed_call, make_result, stored_result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from flodl.checkpoint.start import Start
    from flodl.processes.recording import Recording
    from flodl.records.views import View, ViewName

_GUARD = (
    'Put the statements that the script runs under `if __name__ == "__main__":`, so that importing it runs nothing.'
)
RUNS = "runs"


@dataclass
class _Calls:
    """The run() calls of this process, in order; the last may still be at work. spent_s: in all that are over."""

    made: list[EarlierCall] = field(default_factory=list)
    spent_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


_calls = _Calls()


@dataclass(frozen=True)
class _Place:
    """Which run this is, which run() call of its program, and what it goes on from."""

    run: str
    directory: str
    ordinal: int
    start: Start


@dataclass(frozen=True)
class _Shown:
    """What the user sees of a run."""

    view: View | None
    is_quiet: bool


def require_torch() -> None:
    """Raises NativeError naming what training needs and this environment lacks."""
    if missing := [name for name in ("torch", "numpy") if importlib.util.find_spec(name) is None]:
        raise NativeError(
            f"training needs {' and '.join(missing)}, not installed here\nRun: pip install 'flodl[torch]'"
        )


class Trainer:
    """Trains one model on one device or on several of unequal speed.

    model, optimizer, loss, data and the other parts are described in flodl.rank.parts.Parts; every further keyword is a
    setting (docs/settings.md). entry="package.module:build" names a function that returns the parts as a dict instead,
    for programs that cannot be started a second time, such as notebooks and tests; the parts are then not given here.
    run_directory: where the run writes what it did; a folder of its own under runs/ unless set. replay: the run
    directory of an earlier run in a cpu mode, with the same parts and plan; it is played again, batch by batch and
    death by death, up to its last commit, and ends as RunFailed at the first round whose bits differ.

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
        replay: str | os.PathLike[str] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        own = ("entry", "run_directory", "replay")
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
        self._run_directory = _absolute("run_directory", run_directory, "None, or the path of a new or empty folder")
        self._replay = _absolute("replay", replay, "None, or the run directory of an earlier run")
        self._plan = build_plan(**settings)
        self._parts = None if self._entry is not None else build_parts(given)
        if self._parts is not None and "torch" in sys.modules:
            _check_parts(self._parts)

    @property
    def plan(self) -> Plan:
        """The checked plan: nothing in it is "auto"."""
        return self._plan

    def run(self, *, view: View | ViewName | None = None, quiet: bool = False) -> RunResult:
        """Trains to the end. In a process that a launcher started as a rank it never returns.

        view: what shows the run. None or "live": on a terminal a table of the ranks, elsewhere the lines of "plain",
        both on stderr; "json": JSON lines on stdout, and what the ranks print on stderr; or an object of your own with
        record(dict), told of every line of schedule.jsonl, and close(). On one device "live" is "plain". quiet: what
        the ranks print goes to their logs only, and unless a view is named, nothing is shown.

        Raises NativeError without torch or NumPy and PlanError before anything starts, RunFailed with the failing
        rank's traceback once it has; on one device the user's own exceptions pass through.
        """
        _refuse_foreign_process()
        require_torch()
        shown = _view_of(view, quiet, is_solo=self._plan.mode == "solo")
        if not _calls.lock.acquire(blocking=False):
            raise PlanError(
                "run() was called while another run() of this process is at work\nCall one after the other."
            )
        began = time.monotonic()
        try:
            ordinal = len(_calls.made)
            _calls.made.append(EarlierCall(""))
            role = sources.role()
            if role is not None:
                return self._run_as_rank(role, ordinal)
            return self._run_as_launcher(ordinal, _Shown(shown, quiet))
        except BaseException as error:
            _calls.made[-1] = failed_call(_calls.made[-1].directory, error)
            raise
        finally:
            _calls.spent_s += time.monotonic() - began
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
            call = role.earlier[ordinal]
            if call.error:
                raise error_of(call)
            return stored_result(call.directory, parts, self._plan.seed)
        from flodl.rank.process import run_rank

        return run_rank(self._plan, parts, role)

    def _run_as_launcher(self, ordinal: int, shown: _Shown) -> RunResult:
        from flodl.checkpoint.start import Start, give_finished, is_finished, prepare
        from flodl.rank.checks import check_devices, check_fit
        from flodl.records.schedule import warn_on_stderr

        is_solo = self._plan.mode == "solo"
        if not is_solo and self._entry is None:
            _refuse_program_without_return(self._plan)
        parts = self._checked_parts()
        check_devices(self._plan)
        check_fit(self._plan, len(parts.data))
        recording = self._read_recording(parts)
        run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        # A replay goes through what was recorded: it neither begins from a checkpoint nor saves any.
        start = Start() if recording else prepare(self._plan, run, len(parts.data), warn_on_stderr)
        try:
            directory = _make_run_directory(self._run_directory, run)
            _calls.made[ordinal] = EarlierCall(directory)
            began = time.monotonic()
            if is_finished(start, self._plan, len(parts.data)):
                raw = give_finished(start, self._plan, run, directory)
            elif is_solo:
                raw = self._train_alone(parts, directory, shown, start)
            else:
                raw = self._launch(parts, _Place(run, directory, ordinal, start), shown, recording)
        finally:
            start.release()
        raw.setdefault("wall_s", time.monotonic() - began)
        return make_result(raw, directory, parts, self._plan.seed)

    def _train_alone(self, parts: Parts, directory: str, shown: _Shown, start: Start) -> dict[str, Any]:
        from flodl.rank.solo import run_solo

        if shown.view is None:
            return run_solo(self._plan, parts, directory, start=start)
        from flodl.records.record import RecordLine
        from flodl.records.views import GuardedView

        began, view = time.monotonic(), GuardedView(shown.view)

        def tell(kind: str, fields: dict[str, Any]) -> None:
            view.record(RecordLine(time.monotonic() - began, kind, fields).as_dict())

        try:
            return run_solo(self._plan, parts, directory, tell, start)
        finally:
            view.close()

    def _read_recording(self, parts: Parts) -> Recording | None:
        """Of the run to be replayed, if any."""
        if self._replay is None:
            return None
        from flodl.processes.recording import read_recording

        return read_recording(self._replay, self._plan, len(parts.data))

    def _launch(self, parts: Parts, place: _Place, shown: _Shown, recording: Recording | None) -> dict[str, Any]:
        from flodl.processes.launcher import LaunchRequest, launch

        start = sources.started()
        is_entered = self._entry is not None
        request = LaunchRequest(
            plan=self._plan,
            dataset_length=len(parts.data),
            run=place.run,
            run_directory=place.directory,
            command=(sys.executable, "-m", "flodl.rank") if is_entered else program.command_again(),
            directory=start.directory,
            environment=dict(start.environment),
            entry=self._entry,
            earlier=tuple(_calls.made[: place.ordinal]),
            ordinal=place.ordinal,
            view=shown.view,
            evaluates=parts.evaluate is not None,
            quiet=shown.is_quiet,
            recording=recording,
            start=place.start,
            # A rank runs the script's lines up to here again; an entry does not.
            script_s=0.0 if is_entered else max(0.0, sources.running_s() - _calls.spent_s),
        )
        return launch(request)

    def _checked_parts(self) -> Parts:
        if self._parts is None:
            assert self._entry is not None
            self._parts = parts_from_entry(self._entry)
        _check_parts(self._parts)
        return self._parts


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


def _view_of(view: View | ViewName | None, is_quiet: bool, is_solo: bool) -> View | None:
    """Nothing for None if the run is to be quiet. One device has epochs to tell of, and no table. Raises PlanError."""
    from flodl.records.views import VIEWS, is_view, make_view

    if view is None and is_quiet:
        return None
    if view is None or (isinstance(view, str) and view in VIEWS):
        name: ViewName = view or "live"
        return make_view("plain" if is_solo and name == "live" else name, sources.started().environment.get("TERM"))
    if isinstance(view, str) or not is_view(view):
        raise refused("view", view, f"None, {', '.join(map(repr, VIEWS))}, or an object with record(dict) and close()")
    return view


def _absolute(name: str, path: str | os.PathLike[str] | None, allowed: str) -> str | None:
    try:
        return None if path is None else Folder().accept(path)
    except Refusal:
        raise refused(name, path, allowed) from None


def _make_run_directory(wanted: str | None, run: str) -> str:
    from flodl.checkpoint.files import probe

    directory = wanted or os.path.join(sources.started().directory, RUNS, run)
    try:
        os.makedirs(directory, exist_ok=wanted is not None)
        is_taken = bool(os.listdir(directory))
        probe(Path(directory))
    except OSError as error:
        allowed = "the path of a folder that can be made and written to"
        raise refused("run_directory", directory, allowed, why=error.strerror or str(error)) from error
    if is_taken:
        raise refused("run_directory", directory, "a new or empty folder", why="it holds another run or other files")
    return directory
