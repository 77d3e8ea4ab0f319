"""StartRank, KillRank and Send: what concerns the processes of ranks and their links."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from flodl.errors import FlodlError, LinkError
from flodl.native import Endpoint
from flodl.processes.output import Console, RankOutput, RawLog
from flodl.processes.rank_process import RankProcess, RankTable
from flodl.processes.spawn import SpawnedRank, SpawnSettings, spawn_rank
from flodl.protocol.effects import KillRank, Send, StartFailed, StartRank
from flodl.protocol.messages import encode

# How long the end of a run waits for the exits it caused. A killed process is gone in milliseconds, unless the kernel
# holds it.
REAP_S = 5.0


class RankPerformer:
    """Owns the ranks' processes, links, pipes and output of one run."""

    def __init__(
        self, endpoint: Endpoint, settings: SpawnSettings, logs: Callable[[int], RawLog], console: Console
    ) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._logs = logs
        self._console = console
        self.table = RankTable()

    def start(self, effect: StartRank) -> StartFailed | None:
        """Starts the process and watches it. A process that cannot be watched is ended at once."""
        try:
            spawned = spawn_rank(self._settings, effect.rank, effect.generation)
        except OSError as error:
            what = f"{self._settings.command[0]} in {self._settings.directory}"
            return StartFailed(effect.rank, effect.generation, f"cannot start {what}: {error}")
        try:
            self.table.add(self._watched(spawned, effect))
        except (FlodlError, OSError) as error:
            _end_unwatched(spawned)
            return StartFailed(effect.rank, effect.generation, f"cannot watch process {spawned.process.pid}: {error}")
        return None

    def kill(self, effect: KillRank) -> None:
        """Ends the process and its group. Nothing if it has ended already."""
        process = self.table.of(effect.rank, effect.generation)
        if process is not None:
            process.kill(effect.reason)

    def send(self, effect: Send) -> None:
        """To the rank's newest process. A link that is gone swallows it: the exit is on its way."""
        process = self.table.current(effect.rank)
        if process is not None:
            self._send(process, encode(effect.message), ())

    def send_with(self, rank: int, generation: int, payload: bytes, descriptors: tuple[int, ...]) -> None:
        """To this generation only; the descriptors stay the caller's."""
        process = self.table.of(rank, generation)
        if process is not None:
            self._send(process, payload, descriptors)

    def _send(self, process: RankProcess, payload: bytes, descriptors: tuple[int, ...]) -> None:
        if process.link_closed_s is not None:
            return
        try:
            self._endpoint.send(process.link, payload, descriptors)
        except LinkError as error:
            process.link_reason = process.link_reason or str(error)

    def settled(self, now: float) -> list[RankProcess]:
        """Processes whose exit is complete. They leave the table, their link and output are closed."""
        done = [process for process in self.table if process.is_settled(now)]
        for process in done:
            self._close(process)
            self.table.remove(process)
        return done

    def kill_linkless(self, now: float) -> list[RankProcess]:
        """Kills what closed its link some time ago and did not exit."""
        late = []
        for process in self.table:
            ends = process.patience_ends()
            if process.is_alive and ends is not None and now >= ends:
                reason = f" ({process.link_reason})" if process.link_reason else ""
                process.kill(f"it closed its link{reason} and went on running")
                late.append(process)
        return late

    def next_deadline(self) -> float | None:
        """When settled or kill_linkless may have something to do without any event."""
        return min((ends for p in self.table if (ends := p.patience_ends()) is not None), default=None)

    def pause_all(self) -> None:
        """Stops every rank where it is (job control)."""
        for process in self.table:
            process.signal_group(signal.SIGSTOP)

    def continue_all(self) -> None:
        """Undoes pause_all; harmless for a rank that runs."""
        for process in self.table:
            process.signal_group(signal.SIGCONT)

    def kill_all(self, reason: str) -> None:
        for process in self.table:
            process.kill(reason)

    def _watched(self, spawned: SpawnedRank, effect: StartRank) -> RankProcess:
        try:
            link = self._endpoint.add_link(spawned.link, effect.generation)
        except BaseException:
            if spawned.output is not None:
                os.close(spawned.output)
            raise
        stream = output = None
        try:
            if spawned.output is not None:
                stream = self._endpoint.add_stream(spawned.output)
                output = RankOutput(effect.rank, self._logs(effect.rank), self._console)
            self._endpoint.watch_child(spawned.process.pid, kills_group=True)
        except BaseException:
            self._endpoint.close_link(link)
            raise
        return RankProcess(effect.rank, effect.generation, spawned.process, link, stream, output)

    def _close(self, process: RankProcess) -> None:
        if process.link_closed_s is None:
            self._endpoint.close_link(process.link)
        if process.output is not None:
            process.output.close()


def _end_unwatched(spawned: SpawnedRank) -> None:
    os.killpg(spawned.process.pid, signal.SIGKILL)
    spawned.process.wait()
