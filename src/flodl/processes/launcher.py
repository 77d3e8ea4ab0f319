"""A run of several ranks on this host, from plan to result.json: everything is opened here, and everything ended."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import platform
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flodl.checkpoint.files import finite, write_json
from flodl.checkpoint.folder import find_checkpoints
from flodl.checkpoint.start import Start
from flodl.errors import CheckpointError, NativeError, RunFailed
from flodl.native import INSTALL_PAGE, Endpoint, build_info
from flodl.plan import Plan, plan_to_dict
from flodl.plan.refusal import refused
from flodl.plan.sources import EarlierCall
from flodl.processes.clock import RunClock
from flodl.processes.consensus import CONSENSUS, write_consensus
from flodl.processes.driver import Death, Driver, Performers
from flodl.processes.output import Console, RawLog
from flodl.processes.perform_checkpoint import CheckpointPerformer, Origin
from flodl.processes.perform_memory import MemoryPerformer, MemorySettings, OuterStep
from flodl.processes.perform_processes import RankPerformer
from flodl.processes.perform_records import SCHEDULE, RecordFiles, RecordPerformer
from flodl.processes.recording import Recording, installed_version
from flodl.processes.result import RESULT, RunFacts, result_of
from flodl.processes.resuming import beginning_of
from flodl.processes.signals import Signals
from flodl.processes.spawn import THREADS_VARIABLE, SpawnSettings, asked_threads
from flodl.protocol.controller import Controller
from flodl.protocol.effects import EndRun
from flodl.protocol.forming import MISFIT
from flodl.protocol.ledger import epoch_sizes
from flodl.protocol.replay import Replay
from flodl.protocol.settings import SHORTEST_START_S, ControllerSettings, SaveSettings
from flodl.records.json_lines import JsonView
from flodl.records.schedule import warn_on_stderr
from flodl.records.views import View

# The controller ends a run when every rank is gone, or by killing them: what is left then has this long.
LAST_GRACE_S = 1.0


@dataclass(frozen=True)
class LaunchRequest:
    """A run to be made. command: argv that leads to the same run() again (or to the entry), in `directory` and with
    `environment`. earlier: what the script's run() calls before this one, which is number `ordinal`, came to.
    evaluates: the user gave an evaluate function. quiet: ranks' lines go to their logs only. recording: the run that is
    to be played again, instead of one of its own. start: what it goes on from and where it saves. script_s: how long
    the script took to reach this call, as its ranks will."""

    plan: Plan
    dataset_length: int
    run: str
    run_directory: str
    command: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    entry: str | None = None
    earlier: tuple[EarlierCall, ...] = ()
    ordinal: int = 0
    view: View | None = None
    evaluates: bool = False
    quiet: bool = False
    recording: Recording | None = None
    start: Start = field(default_factory=Start)
    script_s: float = 0.0


def launch(request: LaunchRequest) -> dict[str, Any]:
    """Trains, and gives the result that is also in <run_directory>/result.json.

    Raises RunFailed with the reason, the rank's traceback and the log; PlanError where nothing was started;
    KeyboardInterrupt or SystemExit where the user ended the run, after what is committed has been saved.
    No process, thread or descriptor of the run is left on any way out.
    """
    refuse_platform(sys.platform)
    directory = _make_directory(request.run_directory)
    with contextlib.ExitStack() as stack:
        run = _Run(request, directory, stack)
        recording = request.recording
        controller = Replay(run.settings, recording.script, recording.notes) if recording else Controller(run.settings)
        try:
            end = run.driver.run(controller)
        except BaseException:
            run.driver.end_ranks(0.0)
            raise
        death = run.driver.death
        if recording is not None and death is not None and not death.is_own:
            death = None  # played as recorded
        run.driver.end_ranks(0.0 if end.failed else LAST_GRACE_S)
        result = run.save(controller.summary())
        if run.driver.interruption:
            raise _interruption(run.driver.interruption, _kept(result, directory) + _resumes(request.start))
        if end.failed and end.reason.startswith(MISFIT):
            raise _misfit(end.reason, request.start)
        if end.failed:
            raise _failure(request.run, end, death, result, directory)
        if result["save_error"]:
            raise RunFailed(
                f"run {request.run} trained to its end, but its result could not be saved: {result['save_error']}\n"
                f"Make room or give write access in {directory}, and run again or resume from a checkpoint.",
                reason=result["save_error"],
                log_path=str(directory / SCHEDULE),
            )
        return result


def controller_settings(request: LaunchRequest) -> ControllerSettings:
    """The plan in the controller's words."""
    plan = request.plan
    outer, loader, cluster = plan.outer, plan.data.loader, plan.cluster
    checkpoint = request.start.checkpoint
    return ControllerSettings(
        world_size=cluster.world_size,
        mode=plan.mode,
        dataset_length=plan.data.samples_per_epoch(request.dataset_length),
        batch_size=plan.data.batch_size,
        epochs=plan.data.epochs,
        samples=plan.data.samples,
        anchor=plan.cadence.anchor,
        overhead_target=plan.cadence.overhead_target,
        guard=plan.cadence.guard,
        is_elastic=plan.mode == "cpu-async" and plan.averaging.blend == "elastic",
        max_ratio=plan.cadence.max_ratio,
        gamma=plan.averaging.gamma,
        respawn=cluster.respawn,
        max_failures=cluster.max_failures,
        stall_s=math.inf if cluster.debug_rank is not None else cluster.stall_s,
        start_limit_s=_start_limit_s(request),
        prefetch=max(1, loader.workers) * loader.prefetch,
        evaluates=request.evaluates,
        eval_rank=cluster.eval_rank,
        outer_min_window=outer.min_window if outer is not None and outer.warm == "stretch" else 0,
        plan=plan_to_dict(plan),
        saves=_save_settings(request),
        beginning=beginning_of(checkpoint, plan) if checkpoint is not None else None,
    )


def _start_limit_s(request: LaunchRequest) -> float:
    """How long a silent process may take to introduce itself: the script's own time, while all ranks share the cores,
    three times over, and whatever the user allows a rank that makes no step."""
    cluster = request.plan.cluster
    crowd = max(1.0, cluster.world_size / _cores())
    stall_s = math.inf if cluster.debug_rank is not None else cluster.stall_s or 0.0
    return max(SHORTEST_START_S, stall_s, 3.0 * request.script_s * crowd)


def _save_settings(request: LaunchRequest) -> SaveSettings | None:
    folder, checkpoint = request.start.folder, request.start.checkpoint
    if folder is None:
        return None
    return SaveSettings(
        directory=folder.directory.as_posix(),
        run=folder.run,
        every_epochs=request.plan.checkpoint.every_epochs,
        first_number=checkpoint.document.round if checkpoint is not None else 0,
    )


def refuse_platform(name: str) -> None:
    """Raises NativeError where several ranks on one host cannot be run yet (Windows)."""
    if name == "win32":
        raise NativeError(
            "several ranks on one host need socket pairs and process groups, which this version has no code for on "
            f'Windows\nTrain on one device (mode="solo"), or use Linux, macOS or WSL 2: {INSTALL_PAGE}',
            install_page=INSTALL_PAGE,
        )


class _Run:
    """Everything that a run holds open; `stack` closes it in reverse."""

    def __init__(self, request: LaunchRequest, directory: Path, stack: contextlib.ExitStack) -> None:
        self._request = request
        self._directory = directory
        self._clock = RunClock()
        self.settings = controller_settings(request)
        plan = request.plan
        is_debugged = plan.cluster.debug_rank is not None
        spawning = _spawn_settings(request, directory)
        averaging_threads = min(2, _cores())
        detect_s = plan.cluster.detect_s
        endpoint = Endpoint(min(1.0, detect_s / 5), 0.0 if is_debugged else detect_s)
        stack.callback(endpoint.close)
        signals = stack.enter_context(Signals(endpoint.signal_descriptor()))
        records = RecordPerformer(_open_files(directory), self._clock, request.view)
        stack.callback(records.close)
        logs = _Logs(directory)
        stack.callback(logs.close)
        console = Console(request.quiet, is_on_stderr=isinstance(request.view, JsonView))
        ranks = RankPerformer(endpoint, spawning, logs.of, console)
        resume = request.start.checkpoint.path if request.start.checkpoint is not None else None
        memory_settings = MemorySettings(_outer_step(plan), averaging_threads, self.settings.batches_per_epoch, resume)
        self._memory = MemoryPerformer(endpoint, memory_settings, records, ranks.send_with)
        stack.callback(self._memory.close)
        performers = Performers(ranks, self._memory, records, self._checkpoints(stack))
        self.driver = Driver(endpoint, performers, signals, self._clock)
        records.record("head", _head(request, spawning.threads, averaging_threads) | _sizes(self.settings))
        if is_debugged:
            warn_on_stderr(f"rank {plan.cluster.debug_rank} runs under pdb: limits of silence and stalls are off")

    def _checkpoints(self, stack: contextlib.ExitStack) -> CheckpointPerformer | None:
        folder, plan = self._request.start.folder, self._request.plan
        if folder is None:
            return None
        origin = Origin(self._request.run, plan_to_dict(plan), plan.cluster.world_size)
        performer = CheckpointPerformer(folder, origin, self._memory)
        stack.callback(performer.close)
        return performer

    def save(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Writes consensus.safetensors (if a round was committed) and result.json. save_error: what failed, or ""."""
        committed, layout = self._memory.committed, self._memory.layout
        error = ""
        try:
            if committed is not None and layout is not None:
                write_consensus(self._directory / CONSENSUS, layout, committed, self._memory.read_committed)
        except OSError as failure:
            error = f"{CONSENSUS}: {failure.strerror or failure}"
        facts = RunFacts(self._request.plan, self._request.run, self._clock.real(), committed, self.driver.interruption)
        result: dict[str, Any] = finite(result_of(summary, facts))
        result["degraded"] = [*self._request.start.warnings, *result["degraded"]]
        result["resumed_from"] = self._request.start.resumed_from
        result["save_error"] = error
        try:
            write_json(self._directory / RESULT, result)
        except OSError as failure:
            result["save_error"] = error or f"{RESULT}: {failure.strerror or failure}"
        return result


class _Logs:
    """One raw log per rank, for all its generations."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._logs: dict[int, RawLog] = {}

    def of(self, rank: int) -> RawLog:
        return self._logs.setdefault(rank, RawLog(_log_path(self._directory, rank)))

    def close(self) -> None:
        for log in self._logs.values():
            log.close()


def _log_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.log"


def _make_directory(path: str) -> Path:
    directory = Path(os.path.abspath(path))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(
            "run_directory", path, "a folder that can be written", why=error.strerror or str(error)
        ) from error
    return directory


def _open_files(directory: Path) -> RecordFiles:
    try:
        return RecordFiles.open(directory)
    except OSError as error:
        why = error.strerror or str(error)
        raise refused("run_directory", str(directory), "a folder that can be written", why=why) from error


def _spawn_settings(request: LaunchRequest, directory: Path) -> SpawnSettings:
    from flodl.devices.cpu import threads_per_rank

    world_size = request.plan.cluster.world_size
    environment = dict(request.environment)
    if request.recording is not None and request.recording.threads:
        environment[THREADS_VARIABLE] = str(request.recording.threads)
    return SpawnSettings(
        run=request.run,
        run_directory=str(directory),
        command=request.command,
        directory=request.directory,
        environment=environment,
        plan=plan_to_dict(request.plan),
        threads=asked_threads(environment) or threads_per_rank(world_size),
        ordinal=request.ordinal,
        entry=request.entry,
        earlier=request.earlier,
        sys_path=tuple(sys.path) if request.entry is not None else (),
        debug_rank=request.plan.cluster.debug_rank,
        dataset_length=request.dataset_length,
    )


def _outer_step(plan: Plan) -> OuterStep:
    outer = plan.outer
    if outer is None:
        return OuterStep()
    warm_samples = outer.min_window * plan.data.batch_size if outer.warm == "momentum" else 0
    return OuterStep(outer.rule, outer.lr, outer.momentum, float(warm_samples))


def _cores() -> int:
    from flodl.devices.cpu import usable_cores

    return usable_cores()


def _head(request: LaunchRequest, rank_threads: int, averaging_threads: int) -> dict[str, Any]:
    """The first line of the schedule: what a replay and a reader need to know."""
    return {
        "run": request.run,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: installed_version(name) for name in ("flodl", "torch", "numpy")}
        | {"python": platform.python_version()},
        "native": build_info(),
        "platform": platform.platform(),
        "cores": _cores(),
        "threads": {"rank": rank_threads, "averaging": averaging_threads},
        "pid": os.getpid(),
        "dataset_length": request.dataset_length,
        "plan": plan_to_dict(request.plan),
        "replayed": request.recording.script.head.run if request.recording is not None else None,
        "resumed_from": request.start.resumed_from,
    }


def _sizes(settings: ControllerSettings) -> dict[str, int]:
    """How many epochs and batches the run holds, and batches an epoch; `samples` may end it within an epoch."""
    per_epoch = settings.batches_per_epoch
    sizes = epoch_sizes(per_epoch, settings.epochs, settings.dataset_length, settings.samples, settings.batch_size)
    return {"epochs": len(sizes), "batches_per_epoch": per_epoch, "batches": sum(sizes)}


def _misfit(reason: str, start: Start) -> CheckpointError:
    return CheckpointError(
        f"{reason}\nResume with the model and the data that it was made with, or begin anew in another folder.",
        path=str(start.checkpoint.path) if start.checkpoint is not None else "",
    )


def _failure(run: str, end: EndRun, death: Death | None, result: dict[str, Any], directory: Path) -> RunFailed:
    log = directory / SCHEDULE if death is None else _log_path(directory, death.rank)
    log = log if log.exists() else directory / SCHEDULE  # of a rank that printed nothing
    kept = _kept(result, directory)
    traceback = end.traceback or (death.words if death is not None else "")
    reason = " ".join(end.reason.split())
    said = f"\n\n{traceback.rstrip()}" if traceback else ""
    return RunFailed(
        f"run {run} failed: {reason}\nThe log is {log}; {kept}.{said}",
        reason=end.reason,
        log_path=str(log),
        rank_traceback=traceback,
    )


def _kept(result: dict[str, Any], directory: Path) -> str:
    """What a run that did not end well leaves, in words."""
    round_ = result["committed_round"]
    if round_ is None:
        return "nothing was committed"
    if result["save_error"]:
        return f"round {round_} could not be saved ({result['save_error']})"
    return f"round {round_} is kept in {directory / CONSENSUS}"


def _resumes(start: Start) -> str:
    """Where the run goes on, if it saved anything."""
    found = find_checkpoints(start.folder.directory) if start.folder is not None else []
    return f"; it goes on from {found[0][1]} with resume=True" if found else ""


def _interruption(name: str, kept: str) -> BaseException:
    """What a Ctrl-C or the named signal does to a program that does not handle it, now that all is saved."""
    if name == "Ctrl-C":
        return KeyboardInterrupt(f"the run was ended by Ctrl-C; {kept}")
    return SystemExit(128 + signal.Signals[name])
