"""What a loader process does: read a batch, send it back, until it is told to end or its rank is gone."""

from __future__ import annotations

import os
import signal
import traceback
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from typing import Any

import msgspec
import torch
from torch.utils.data._utils import worker as torch_worker

from flodl.plan.parent import end_with_parent
from flodl.rank.items import Source
from flodl.rank.leases import Lease
from flodl.rank.seeds import derive, plant


class Task(msgspec.Struct, frozen=True, array_like=True):
    """Read this batch. ticket: comes back with it."""

    ticket: int
    epoch: int
    index: int
    items: list[int]


@dataclass(frozen=True)
class Loaded:
    """One batch, or an exception's words and traceback. ticket -1: the process could not begin."""

    ticket: int
    batch: Any = None
    error: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class Post:
    """Which loader process this is, and its two pipes."""

    number: int
    count: int
    tasks: connection.Connection
    results: connection.Connection


def work(source: Source, post: Post) -> None:
    """The body of a loader process. It never trains, never prints, and ends with its rank."""
    rank = parent_process()
    assert rank is not None
    assert rank.pid is not None
    end_with_parent(rank.pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    seed = derive(source.order.seed, "worker", post.number)
    plant(seed)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=post.number, num_workers=post.count, seed=seed, dataset=source.data
    )
    try:
        if source.worker_init is not None:
            source.worker_init(post.number)
    except Exception as error:
        post.results.send(_failure(-1, error))
        return
    decoder = msgspec.msgpack.Decoder(Task)
    while post.tasks in connection.wait([post.tasks, rank.sentinel]):
        try:
            payload = post.tasks.recv_bytes()
        except EOFError:
            return
        if not payload:
            return
        _answer(source, post, decoder.decode(payload))
    os._exit(1)  # the rank died: nobody wants what is ready


def _answer(source: Source, post: Post, task: Task) -> None:
    try:
        loaded = Loaded(task.ticket, source.batch(Lease(task.epoch, task.index), task.items))
    except Exception as error:
        loaded = _failure(task.ticket, error)
    try:
        post.results.send(loaded)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)
    except Exception as error:  # what the user's collate returned cannot be sent
        post.results.send(_failure(task.ticket, error))


def _failure(ticket: int, error: Exception) -> Loaded:
    return Loaded(ticket, None, str(error), traceback.format_exc())
