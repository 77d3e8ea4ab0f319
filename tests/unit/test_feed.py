"""Batches from leases: the same whatever the loader processes, in the order of leases, failures by name."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from flodl.errors import PlanError, RunFailed
from flodl.plan import LoaderPlan
from flodl.protocol.messages import BatchRange
from flodl.rank.data_signature import data_signature
from flodl.rank.feed import Feed, to_device
from flodl.rank.items import Source
from flodl.rank.leases import Lease, Leases
from flodl.rank.order import Order

LENGTH = 40
SIZE = 4


class Noisy(Dataset[Any]):
    """Each item: its number, a draw of each generator, the loader process that read it (-1: the rank itself)."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        draws = torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))])
        info = get_worker_info()
        return index, draws, -1 if info is None else info.id


class Faulty(Noisy):
    """Item `bad` raises, or kills its process."""

    def __init__(self, bad: int, kills: bool = False) -> None:
        self.bad = bad
        self.kills = kills

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        if index == self.bad and self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.bad:
            raise ValueError("this file is torn")
        return super().__getitem__(index)


class Together(Noisy):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [100 + index for index in indices]


class Heavy(Noisy):
    """Items larger than any pipe's buffer, sent inline because they are no tensors."""

    def __getitem__(self, index: int) -> Any:
        return bytes([index]) * 300_000


def order() -> Order:
    return Order(seed=2, length=LENGTH, batch_size=SIZE, samples_per_epoch=LENGTH)


@contextmanager
def feeding(data: Any, workers: int = 0, **settings: Any) -> Iterator[Feed]:
    collate = settings.pop("collate", None)
    worker_init = settings.pop("worker_init", None)
    plan = LoaderPlan(workers=workers, **settings)
    feed = Feed(Source(data, order(), collate, worker_init), plan, torch.device("cpu"))
    try:
        yield feed
    finally:
        feed.close()


def take_all(feed: Feed, *ranges: tuple[int, int, int]) -> list[Any]:
    leases = Leases()
    leases.grant(BatchRange(*each) for each in ranges)
    feed.follow(leases)
    taken = []
    while leases:
        lease = leases.next()
        taken.append(feed.take(lease).batch)
        feed.follow(leases)
    return taken


def note_worker(number: int) -> None:
    noted.append(number)


noted: list[int] = []


class Noted(Noisy):
    def __getitem__(self, index: int) -> Any:
        return noted[0]


@pytest.mark.parametrize(("workers", "method"), [(1, "fork"), (3, "fork"), (1, "spawn")])
def test_batches_are_the_same_whatever_the_loader_processes(workers: int, method: str) -> None:
    ranges = ((0, 3, 4), (0, 0, 2), (1, 0, 3))
    with feeding(Noisy()) as feed:
        alone = take_all(feed, *ranges)
    with feeding(Noisy(), workers, start_method=method, prefetch=3) as feed:
        together = take_all(feed, *ranges)
    assert [batch[0].tolist() for batch in alone] == [
        order().indices(Lease(epoch, first + n)) for epoch, first, count in ranges for n in range(count)
    ]
    for own, other in zip(alone, together, strict=True):
        assert torch.equal(own[0], other[0])
        assert torch.equal(own[1], other[1])
    assert {int(n) for batch in alone for n in batch[2]} == {-1}
    assert {int(n) for batch in together for n in batch[2]} == set(range(workers))


def test_augmentation_follows_the_position_not_the_history() -> None:
    with feeding(Noisy()) as feed:
        first = feed.take(Lease(0, 5)).batch[1]
        torch.rand(7)
        random.random()
        assert torch.equal(feed.take(Lease(0, 5)).batch[1], first)
        assert not torch.equal(feed.take(Lease(0, 6)).batch[1], first)


def test_worker_init_is_called_in_each_process() -> None:
    with feeding(Noted(), workers=2, worker_init=note_worker) as feed:
        assert {int(n) for batch in take_all(feed, (0, 0, 6)) for n in batch} == {0, 1}


def test_a_worker_init_that_raises_is_reported_with_its_traceback() -> None:
    def broken(number: int) -> None:
        raise OSError("no such share")

    with feeding(Noisy(), workers=1, worker_init=broken) as feed, pytest.raises(RunFailed) as caught:
        take_all(feed, (0, 0, 2))
    assert "no such share" in str(caught.value)
    assert "in broken" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_item_that_cannot_be_read_is_named_when_its_turn_comes(workers: int) -> None:
    bad = order().indices(Lease(0, 2))[1]
    with feeding(Faulty(bad), workers) as feed:
        assert len(take_all(feed, (0, 0, 2))) == 2
        with pytest.raises(RunFailed, match=rf"data\[{bad}\] raised ValueError: this file is torn") as caught:
            take_all(feed, (0, 2, 3))
    if workers:
        assert "in __getitem__" in str(caught.value)
        assert "In loader process loader-" in str(caught.value)
    else:
        assert isinstance(caught.value.__cause__, ValueError)


def test_a_killed_loader_process_is_noticed_at_once_and_named() -> None:
    bad = order().indices(Lease(0, 1))[0]
    with feeding(Faulty(bad, kills=True), workers=2) as feed:
        started = time.monotonic()
        with pytest.raises(RunFailed, match=r"loader process loader-\d \(pid \d+\) ended with signal 9"):
            take_all(feed, (0, 0, 4))
        assert time.monotonic() - started < 5.0


def test_what_is_no_longer_held_is_dropped_and_never_delivered() -> None:
    with feeding(Noisy(), workers=2, prefetch=4) as feed:
        leases = Leases()
        leases.grant([BatchRange(0, 0, 8)])
        feed.follow(leases)
        assert leases.recall(2) == Lease(0, 2)
        feed.follow(leases)
        pool = feed._pool
        assert pool is not None
        assert set(pool._tickets) == {Lease(0, 0), Lease(0, 1)}
        leases.grant([BatchRange(1, 0, 9)])
        feed.follow(leases)
        taken = []
        while leases:
            taken.append(feed.take(leases.next()).batch[0].tolist())
            feed.follow(leases)
    expected = [Lease(0, 0), Lease(0, 1), *(Lease(1, index) for index in range(9))]
    assert taken == [order().indices(lease) for lease in expected]


def test_reading_ahead_is_bounded_by_processes_times_prefetch() -> None:
    with feeding(Noisy(), workers=2, prefetch=3) as feed:
        leases = Leases()
        leases.grant([BatchRange(0, 0, 10)])
        feed.follow(leases)
        assert feed._pool is not None
        assert len(feed._pool._tickets) == 6
        assert [worker.outstanding for worker in feed._pool._workers] == [3, 3]


def test_batches_larger_than_a_pipe_hold_nobody_up() -> None:
    with feeding(Heavy(), workers=2, prefetch=8, collate=list) as feed:
        taken = take_all(feed, (0, 0, 10))
    assert [[item[0] for item in batch] for batch in taken] == [order().indices(Lease(0, n)) for n in range(10)]


def test_closing_ends_every_process() -> None:
    with feeding(Noisy(), workers=3) as feed:
        assert feed._pool is not None
        processes = [worker.process for worker in feed._pool._workers]
        assert all(process.is_alive() for process in processes)
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_loader_processes_end_with_their_rank() -> None:
    reading, writing = os.pipe()
    rank = os.fork()
    if rank == 0:
        plan = LoaderPlan(workers=2)
        feed = Feed(Source(Noisy(), order()), plan, torch.device("cpu"))
        assert feed._pool is not None
        os.write(writing, json.dumps([worker.process.pid for worker in feed._pool._workers]).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(rank, 0)
    pids = json.loads(os.read(reading, 1000))
    os.close(reading)
    os.close(writing)
    deadline = time.monotonic() + 10.0
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} outlived their rank"
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    """A zombie that nobody has reaped yet does not run."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_data_set_that_gives_items_together_is_asked_once_per_batch() -> None:
    with feeding(Together()) as feed:
        assert feed.take(Lease(0, 0)).batch.tolist() == [100 + index for index in order().indices(Lease(0, 0))]


def test_a_collate_that_fails_names_the_batch() -> None:
    def collate(items: list[Any]) -> Any:
        raise KeyError("label")

    with feeding(Noisy(), collate=collate) as feed, pytest.raises(RunFailed, match="batch 3 of epoch 1 could not be"):
        feed.take(Lease(1, 3))


def test_what_cannot_be_sent_to_a_spawned_process_is_refused() -> None:
    with (
        pytest.raises(PlanError, match="cannot be sent to a loader process"),
        feeding(Noisy(), workers=1, start_method="spawn", collate=lambda items: items),
    ):
        pass


def test_tensors_of_any_structure_move_together() -> None:
    moved = to_device({"a": [torch.ones(2), "word"], "b": (torch.zeros(1), 3)}, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["b"][0].is_meta
    assert (moved["a"][1], moved["b"][1]) == ("word", 3)


def test_the_data_signature_names_structure_and_content_and_draws_nothing() -> None:
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    first = data_signature(Noisy(), seed=1)
    assert torch.equal(torch.rand(()), expected)
    assert first.spec == data_signature(Noisy(), seed=1).spec
    assert first.reason == ""
    lines = first.spec.structure.splitlines()
    assert len(lines) == 16
    assert all(line.endswith(": tuple(int, tensor(float32[3]), int)") for line in lines)
    assert len(first.spec.content.splitlines()) == 48


def test_the_data_signature_changes_with_one_value() -> None:
    items: list[Any] = [{"x": np.zeros(2), "name": f"n{k}"} for k in range(5)]
    before = data_signature(items, seed=0).spec
    items[3] = {"x": np.ones(2), "name": "n3"}
    after = data_signature(items, seed=0).spec
    changed = set(before.content.splitlines()) ^ set(after.content.splitlines())
    assert {line.partition(": ")[0] for line in changed} == {"3['x']"}
    assert before.structure == after.structure


def test_content_is_left_out_with_its_reason() -> None:
    class Chance(Noisy):
        def __getitem__(self, index: int) -> Any:
            return os.urandom(8)

    class Odd(Noisy):
        def __getitem__(self, index: int) -> Any:
            return object()

    class Slow(Noisy):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01)
            return index

    assert "is another each time it is read" in data_signature(Chance(), 0).reason
    assert "object, whose content cannot be read" in data_signature(Odd(), 0).reason
    slow = data_signature(Slow(), 0, budget_s=0.03)
    assert "items took 0.03 s" in slow.reason
    assert slow.spec.content == ""
    assert 1 <= len(slow.spec.structure.splitlines()) < 16
    assert data_signature(Noisy(), 0, check="structure").spec.content == ""


def test_a_data_set_may_give_its_own_content() -> None:
    class Versioned(Noisy):
        def flodl_signature(self) -> str:
            return "v7"

    found = data_signature(Versioned(), 0)
    assert found.reason == ""
    assert len(found.spec.content) == 32
