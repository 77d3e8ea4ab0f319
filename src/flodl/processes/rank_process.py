"""One process of one rank, and the table of those of this host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from flodl.processes.output import RankOutput

# After an exit, its last messages and output are waited for this long: a descendant outside the rank's process group
# can hold the pipe open for ever.
DRAIN_S = 0.5
# A process that closed its link can say nothing more. One that took its leave may still run its exit handlers.
LINKLESS_S = 1.0
LEAVING_S = 5.0


@dataclass
class RankProcess:
    """What is known of it. Times on the run's clock; `output` is None where the rank has the terminal."""

    rank: int
    generation: int
    process: subprocess.Popen[bytes]
    link: int
    stream: int | None
    output: RankOutput | None
    has_said_hello: bool = False
    is_leaving: bool = False
    link_closed_s: float | None = None
    link_reason: str = ""
    is_stream_open: bool = True
    exit_code: int | None = None
    exited_s: float = 0.0
    kill_reason: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        """False once its exit was reported; a killed one lives until then."""
        return self.exit_code is None

    def exited(self, code: int, now: float) -> None:
        """The endpoint reaped it: Popen must neither wait for it nor warn about it."""
        self.exit_code = code
        self.exited_s = now
        self.process.returncode = code

    def is_settled(self, now: float) -> bool:
        """Everything it said before its end has been heard."""
        if self.exit_code is None:
            return False
        is_drained = self.link_closed_s is not None and (self.stream is None or not self.is_stream_open)
        return is_drained or now >= self.exited_s + DRAIN_S

    def patience_ends(self) -> float | None:
        """When to look again: to settle its exit, or to kill it for having closed its link."""
        if self.exit_code is not None:
            return self.exited_s + DRAIN_S
        if self.link_closed_s is not None and not self.kill_reason:
            return self.link_closed_s + (LEAVING_S if self.is_leaving else LINKLESS_S)
        return None

    def signal_group(self, number: int) -> None:
        """To the process and all that it started and left in its group. Nothing where it has been reaped."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def kill(self, reason: str) -> None:
        """SIGKILL to its group. The exit is reported as usual; the first reason is kept."""
        self.kill_reason = self.kill_reason or reason
        self.signal_group(signal.SIGKILL)

    def words(self) -> str:
        """Why it ended, as far as the outside can tell, then the last lines that it printed."""
        said = self.output.words() if self.output is not None else ""
        why = []
        if self.kill_reason:
            why.append(f"killed by the launcher: {self.kill_reason}")
        elif self.exit_code == 0 and not self.has_said_hello:
            why.append("the script ended without reaching the run() of a Trainer that it was started for")
        return "\n".join([*why, *([said] if said else [])])


class RankTable:
    """The processes of this host whose end has not been told to the controller."""

    def __init__(self) -> None:
        self._processes: list[RankProcess] = []

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(list(self._processes))

    def __len__(self) -> int:
        return len(self._processes)

    def add(self, process: RankProcess) -> None:
        self._processes.append(process)

    def remove(self, process: RankProcess) -> None:
        self._processes.remove(process)

    def of(self, rank: int, generation: int) -> RankProcess | None:
        """The process of this rank and generation, alive or not yet settled."""
        return next((p for p in self._processes if (p.rank, p.generation) == (rank, generation)), None)

    def current(self, rank: int) -> RankProcess | None:
        """The rank's newest process."""
        candidates = [p for p in self._processes if p.rank == rank]
        return max(candidates, key=lambda p: p.generation, default=None)

    def of_link(self, link: int) -> RankProcess | None:
        return next((p for p in self._processes if p.link == link), None)

    def of_stream(self, stream: int) -> RankProcess | None:
        return next((p for p in self._processes if p.stream == stream), None)

    def of_pid(self, pid: int) -> RankProcess | None:
        """The one that lives under this number: a number may be given again after an exit."""
        return next((p for p in self._processes if p.pid == pid and p.is_alive), None)
