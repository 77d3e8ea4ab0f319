"""A rank's own loader processes: batches read ahead by ticket, delivered in the order of leases.

Each process has a pipe for tasks and one for results, so that a killed one holds no lock that others need. Tasks are
written without blocking: a process that is busy sending a large batch cannot hold up its rank.
"""

from __future__ import annotations

import os
import pickle
import select
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import torch.multiprocessing

from flodl.errors import PlanError, RunFailed
from flodl.plan.data import LoaderPlan
from flodl.rank.items import Source
from flodl.rank.leases import Lease
from flodl.rank.loader_worker import Loaded, Post, Task, work

END_S = 2.0
"""How long loader processes may take to end when told to, all together."""


_KILLED = "If it was killed for memory, use fewer workers or a smaller prefetch."
_EXITED = "Its own message stands above; where several ranks train, it is in the rank's log too."
_UNBORN = (
    "Its own message stands above. A spawned loader process imports the script again: put the statements that the "
    'script runs under `if __name__ == "__main__":`, or use start_method="fork".'
)


@dataclass
class _Worker:
    process: BaseProcess
    tasks: connection.Connection
    results: connection.Connection
    unsent: bytearray = field(default_factory=bytearray)
    outstanding: int = 0
    has_spoken: bool = False

    def post(self, payload: bytes) -> None:
        """Queues one frame as multiprocessing's Connection reads it."""
        self.unsent += struct.pack("!i", len(payload)) + payload
        self.push()

    def push(self) -> None:
        """Writes what fits now."""
        while self.unsent:
            try:
                written = os.write(self.tasks.fileno(), self.unsent[:65536])
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.unsent.clear()  # its death is noticed at its sentinel
                return
            del self.unsent[:written]


class LoaderPool:
    """Starts its processes at once. Every method is called from the training thread; close() ends the processes."""

    def __init__(self, source: Source, plan: LoaderPlan) -> None:
        self._source = source
        self._depth = plan.workers * plan.prefetch
        self._prefetch = plan.prefetch
        self._is_spawned = plan.start_method == "spawn"
        self._tickets: dict[Lease, int] = {}
        self._ready: dict[int, Loaded] = {}
        self._next_ticket = 0
        self._workers: list[_Worker] = []
        for number in range(plan.workers):
            self._workers.append(_start(source, plan, number))

    def follow(self, upcoming: Iterable[Lease]) -> None:
        """Reads ahead along these leases, first to last; what was asked for and is not among them is dropped."""
        wanted = list(islice(upcoming, self._depth))
        for lease in self._tickets.keys() - set(wanted):
            self._ready.pop(self._tickets.pop(lease), None)
        for lease in wanted:
            if lease not in self._tickets and not self._ask(lease):
                return

    def take(self, lease: Lease) -> Any:
        """The batch of this lease; waits for it. Raises RunFailed naming the item or the process that failed."""
        while True:
            ticket = self._tickets.get(lease)
            if ticket is None:
                self._ask(lease)
                ticket = self._tickets.get(lease)
            if ticket is not None and ticket in self._ready:
                break
            self._wait()
        del self._tickets[lease]
        loaded = self._ready.pop(ticket)
        if loaded.error:
            raise RunFailed(loaded.error)
        return loaded.batch

    def close(self) -> None:
        """Ends the processes: asked first, those that run on after END_S are killed."""
        for worker in self._workers:
            worker.post(b"")
            worker.results.close()
        ends = time.monotonic() + END_S
        for worker in self._workers:
            worker.process.join(max(0.0, ends - time.monotonic()) if not worker.unsent else 0.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.tasks.close()
        self._workers.clear()

    def _ask(self, lease: Lease) -> bool:
        """False if every process has as much as it may."""
        worker = min(self._workers, key=lambda w: w.outstanding)
        if worker.outstanding >= self._prefetch:
            return False
        self._tickets[lease] = self._next_ticket
        task = Task(self._next_ticket, lease.epoch, lease.index, self._source.order.indices(lease))
        self._next_ticket += 1
        worker.outstanding += 1
        worker.post(msgspec.msgpack.encode(task))
        return True

    def _wait(self) -> None:
        """Until a batch came. Raises RunFailed if a process ended."""
        poll = select.poll()
        readers: dict[int, _Worker] = {}
        for worker in self._workers:
            readers[worker.results.fileno()] = worker
            poll.register(worker.results.fileno(), select.POLLIN)
            poll.register(worker.process.sentinel, select.POLLIN)
            if worker.unsent:
                poll.register(worker.tasks.fileno(), select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll()}
        for worker in self._workers:
            worker.push()
        speaking = [worker for descriptor, worker in readers.items() if descriptor in ready]
        for worker in speaking:
            self._receive(worker)
        if not speaking:
            self._refuse_dead()

    def _receive(self, worker: _Worker) -> None:
        try:
            loaded = worker.results.recv()
        except (EOFError, OSError) as error:
            worker.process.join(END_S)
            self._refuse_dead()
            raise RunFailed(f"loader process {worker.process.name} sent nothing readable: {error}") from error
        worker.has_spoken = True
        worker.outstanding -= 1
        if loaded.error:
            where = f"In loader process {worker.process.name}:\n{loaded.traceback.rstrip()}"
            loaded = Loaded(loaded.ticket, error=f"{loaded.error.rstrip()}\n{where}")
            if loaded.ticket < 0:
                raise RunFailed(loaded.error)
        if loaded.ticket in self._tickets.values():
            self._ready[loaded.ticket] = loaded

    def _refuse_dead(self) -> None:
        for worker in self._workers:
            code = worker.process.exitcode
            if code is not None:
                how = f"exit code {code}" if code >= 0 else f"signal {-code}"
                is_unborn = self._is_spawned and code > 0 and not worker.has_spoken
                hint = _KILLED if code < 0 else _EXITED
                raise RunFailed(
                    f"loader process {worker.process.name} (pid {worker.process.pid}) ended with {how}"
                    f"{' before it read anything' if is_unborn else ''}\n{_UNBORN if is_unborn else hint}"
                )


def _start(source: Source, plan: LoaderPlan, number: int) -> _Worker:
    context: Any = torch.multiprocessing.get_context(plan.start_method)
    tasks_read, tasks_write = context.Pipe(duplex=False)
    results_read, results_write = context.Pipe(duplex=False)
    os.set_blocking(tasks_write.fileno(), False)
    post = Post(number, plan.workers, tasks_read, results_write)
    process = context.Process(target=work, args=(source, post), name=f"loader-{number}", daemon=True)
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PlanError(
            f"data: it cannot be sent to a loader process: {error}\n"
            'Define data set, collate and worker_init at the top level of a module, or use start_method="fork".'
        ) from error
    tasks_read.close()
    results_write.close()
    return _Worker(process, tasks_write, results_read)
