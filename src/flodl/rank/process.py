"""A rank's process: from its role to its exit. run_rank never returns."""

from __future__ import annotations

import atexit
import contextlib
import os
import pdb
import signal
import sys
import traceback
from typing import NoReturn

import torch

from flodl.averaging.cpu import Blend, CpuPlane, HostMemories
from flodl.averaging.layout import ModelLayout, build_layout
from flodl.errors import FlodlError
from flodl.native import Endpoint, RankPage
from flodl.plan import Plan, Role, plan_to_dict, started
from flodl.protocol.messages import Failed, Hello, Leaving
from flodl.rank.data_signature import data_signature
from flodl.rank.line import Admission, ControlLine
from flodl.rank.loop import RankLoop
from flodl.rank.parts import Parts
from flodl.rank.saving import Saving
from flodl.rank.trainee import Trainee

LONGEST_HEARTBEAT_S = 1.0
FLUSH_S = 10.0


class RankProcess:
    """The parts of one rank's life that its end must know of."""

    def __init__(self, plan: Plan, role: Role) -> None:
        self._plan = plan
        self._role = role
        self._endpoint = Endpoint(min(LONGEST_HEARTBEAT_S, plan.cluster.detect_s / 5.0), 0.0)
        link = self._endpoint.add_link(role.link, role.generation)
        if not role.is_debugged:
            self._endpoint.set_lifeline(link)
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
        words = "".join(traceback.format_exception(error))
        print(words, file=sys.stderr, flush=True)
        current = self._loop.current if self._loop is not None else None
        batch = None if current is None else (current.epoch, current.index)
        first = str(error).splitlines()
        named = f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
        with contextlib.suppress(FlodlError, OSError):
            self._line.send(Failed(named, words, batch))
            self._line.flush(FLUSH_S)


def run_rank(plan: Plan, parts: Parts, role: Role) -> NoReturn:
    """Trains as this rank until the run is over, and exits: 0 as told, 1 on any failure.

    The launcher decides about Ctrl-C, so SIGINT is ignored. The script's exit handlers run, its remaining lines do not.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not role.is_debugged:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if role.threads > 0 and "OMP_NUM_THREADS" not in started().environment:
        torch.set_num_threads(role.threads)
    code = RankProcess(plan, role).live(parts)
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
