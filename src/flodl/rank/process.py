"""A rank's process: from its role to its exit. run_rank never returns."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import pdb
import signal
import sys
import threading
import traceback
from typing import NoReturn

import torch

from flodl.averaging.cpu import Blend, CpuPlane, HostMemories
from flodl.averaging.layout import ModelLayout, build_layout
from flodl.errors import FlodlError, PlanError
from flodl.native import Endpoint, RankPage
from flodl.plan import Plan, Role, plan_to_dict, started
from flodl.plan.parent import signal_at_parents_death
from flodl.protocol.admission import plan_differences
from flodl.protocol.messages import Failed, Hello, Leaving
from flodl.rank.data_signature import data_signature
from flodl.rank.line import Admission, ControlLine
from flodl.rank.loop import RankLoop
from flodl.rank.parts import Parts
from flodl.rank.saving import Saving
from flodl.rank.trainee import Trainee

LONGEST_HEARTBEAT_S = 1.0
FLUSH_S = 10.0
MOST_IN_A_LINE, MOST_WORDS = 1_000, 30_000
"""Characters of a failure, in one sentence and with its traceback."""


class RankProcess:
    """The parts of one rank's life that its end must know of."""

    def __init__(self, plan: Plan, role: Role) -> None:
        self._plan = plan
        self._role = role
        self._endpoint = Endpoint(min(LONGEST_HEARTBEAT_S, plan.cluster.detect_s / 5.0), 0.0)
        link = self._endpoint.add_link(role.link, role.generation)
        if not role.is_debugged:
            self._endpoint.set_lifeline(link)
            # From here on the lifeline ends the rank with all that it started; a stopped rank has to be woken for it.
            signal_at_parents_death(signal.SIGCONT)
        self._line = ControlLine(self._endpoint, link)
        self._trainee: Trainee | None = None
        self._loop: RankLoop | None = None

    def live(self, parts: Parts) -> int:
        """Trains until told to stop. Returns the exit code: 0 after Leaving, 1 after Failed."""
        try:
            self._train(parts)
            self._line.flush(FLUSH_S)
            return 0
        except BaseException as error:  # a script's sys.exit() inside a part is a failure like any other
            self._report(error)
            if self._role.is_debugged and isinstance(error, Exception):
                pdb.post_mortem(error.__traceback__)
            return 1
        finally:
            if self._trainee is not None:
                with contextlib.suppress(Exception):
                    self._trainee.close()

    def _train(self, parts: Parts) -> None:
        refuse_other_program(self._plan, len(parts.data), self._role)
        trainee = self._trainee = Trainee(self._plan, parts, self._role.rank)
        layout = build_layout(trainee.model)
        signature = data_signature(parts.data, self._plan.seed, self._plan.data.check)
        if signature.reason and self._plan.data.check == "content" and self._role.rank == 0:
            print(f"flodl: the content of the data is not compared between ranks: {signature.reason}", file=sys.stderr)
        self._line.send(
            Hello(
                pid=os.getpid(),
                device=self._plan.cluster.devices[self._role.rank],
                plan=plan_to_dict(self._plan),
                layout=layout.spec,
                data=signature.spec,
                threads=torch.get_num_threads(),
            )
        )
        admission = self._line.receive_admission()
        if admission is None:
            self._line.send(Leaving(0))
            return
        trainee.counter = RankPage(admission.rank)
        plane = self._plane(layout, admission)
        self._loop = RankLoop(self._line, plane, trainee, saving=Saving(trainee, layout.spec, plane.read_committed))
        self._loop.run()

    def _plane(self, layout: ModelLayout, admission: Admission) -> CpuPlane:
        averaging = self._plan.averaging
        blend = Blend(averaging.blend, averaging.alpha) if self._plan.mode == "cpu-async" else None
        return CpuPlane(layout, HostMemories(admission.rank, admission.buffers), blend)

    def _report(self, error: BaseException) -> None:
        """To the controller if it is there, and to this rank's output."""
        words = shortened("".join(traceback.format_exception(error)), MOST_WORDS)
        print(words, file=sys.stderr, flush=True)
        current = self._loop.current if self._loop is not None else None
        batch = None if current is None else (current.epoch, current.index)
        with contextlib.suppress(FlodlError, OSError):
            self._line.send(Failed(named(error), words, batch))
            self._line.flush(FLUSH_S)


def refuse_other_program(plan: Plan, dataset_length: int, role: Role) -> None:
    """Before anything is built. Raises PlanError naming all that came out otherwise here than in the launcher."""
    found = [] if role.plan is None else plan_differences(role.plan, plan_to_dict(plan))
    if role.dataset_length not in (0, dataset_length):
        found.append(f"data has {dataset_length} samples here and {role.dataset_length} in the launcher")
    if found:
        what = "; ".join(words.removeprefix("plan: ") for words in found)
        raise PlanError(
            f"the script made another plan in rank {role.rank}: {what}\n"
            "A plan must be the same each time the script runs: keep time, chance and process ids out of it.",
            field=what.partition(" ")[0],
        )


def named(error: BaseException) -> str:
    """One line: the exception's class and first line, with the remedy where it is one of flodl's own."""
    try:
        lines = str(error).splitlines()
    except Exception:  # of a class whose own __str__ fails; format_exception knows better
        lines = traceback.format_exception_only(error)[-1].splitlines()[:1]
    if not lines:
        return type(error).__name__
    remedy = f". {lines[1]}" if isinstance(error, FlodlError) and len(lines) > 1 else ""
    return shortened(f"{type(error).__name__}: {lines[0]}{remedy}", MOST_IN_A_LINE)


def shortened(words: str, most: int) -> str:
    """At most so many characters and a note: the first third and the last two."""
    if len(words) <= most:
        return words
    return f"{words[: most // 3]} [... {len(words) - most} characters ...] {words[len(words) - most + most // 3 :]}"


def run_rank(plan: Plan, parts: Parts, role: Role) -> NoReturn:
    """Trains as this rank until the run is over, and exits: 0 as told, 1 on any failure.

    The launcher decides about Ctrl-C, so SIGINT is ignored, unless the script called run() in another thread than its
    main one, where Python allows no handlers. The script's exit handlers run, its remaining lines do not; what it wrote
    to files that are still open is flushed.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not role.is_debugged:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    if role.threads > 0 and "OMP_NUM_THREADS" not in started().environment:
        torch.set_num_threads(role.threads)
    code = RankProcess(plan, role).live(parts)
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    flush_files()
    os._exit(code)


def flush_files() -> None:
    """Every open file object of this process, which os._exit would not flush. Those that cannot be are passed over."""
    # By type() and not isinstance(), which would ask objects that pretend to be others for their __class__.
    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):  # text first: it writes to the others
        for file in gc.get_objects():
            if issubclass(type(file), kind):
                with contextlib.suppress(Exception):
                    file.flush()
