"""Leases: in the order granted, given back from the end; and which samples a batch holds."""

from flodl.protocol.messages import BatchRange
from flodl.rank.leases import Lease, Leases
from flodl.rank.order import Order


def held(*ranges: tuple[int, int, int]) -> Leases:
    leases = Leases()
    leases.grant(BatchRange(*each) for each in ranges)
    return leases


def test_leases_come_in_the_order_granted_not_by_position() -> None:
    leases = held((1, 0, 2), (0, 7, 1))
    assert list(leases) == [Lease(1, 0), Lease(1, 1), Lease(0, 7)]
    assert [leases.next() for _ in range(3)] == [Lease(1, 0), Lease(1, 1), Lease(0, 7)]
    assert not leases
    assert len(leases) == 0


def test_an_empty_range_is_no_lease() -> None:
    assert not held((0, 3, 0))


def test_recall_gives_up_everything_beyond_what_is_kept() -> None:
    leases = held((0, 0, 3), (0, 10, 4), (1, 0, 2))
    assert leases.recall(5) == Lease(0, 12)
    assert list(leases) == [Lease(0, 0), Lease(0, 1), Lease(0, 2), Lease(0, 10), Lease(0, 11)]
    assert leases.recall(5) is None
    assert leases.recall(0) == Lease(0, 0)
    assert not leases


def test_iterating_does_not_consume() -> None:
    leases = held((0, 0, 1000))
    assert next(iter(leases)) == Lease(0, 0)
    assert len(leases) == 1000


def test_an_epoch_holds_every_sample_once_and_each_epoch_another_order() -> None:
    order = Order(seed=3, length=103, batch_size=10, samples_per_epoch=103)
    epochs = []
    for epoch in range(2):
        batches = [order.indices(Lease(epoch, index)) for index in range(order.batches_per_epoch)]
        assert [len(batch) for batch in batches] == [10] * 10 + [3]
        epochs.append([item for batch in batches for item in batch])
        assert sorted(epochs[-1]) == list(range(103))
    assert epochs[0] != epochs[1]


def test_order_follows_from_the_seed_alone() -> None:
    first, second, other = (Order(seed, 50, 8, 50).indices(Lease(1, 2)) for seed in (5, 5, 6))
    assert first == second != other


def test_positions_count_samples_and_a_dropped_last_batch_takes_no_place() -> None:
    order = Order(seed=0, length=103, batch_size=10, samples_per_epoch=100)
    assert order.batches_per_epoch == 10
    assert order.position(Lease(2, 3)) == 230
    assert order.samples(Lease(2, 9)) == 10


def test_two_epochs_are_kept_and_older_ones_come_back_the_same() -> None:
    order = Order(seed=1, length=40, batch_size=4, samples_per_epoch=40)
    first = order.indices(Lease(0, 0))
    for epoch in range(5):
        order.indices(Lease(epoch, 1))
    assert len(order._kept) == 2
    assert order.indices(Lease(0, 0)) == first
