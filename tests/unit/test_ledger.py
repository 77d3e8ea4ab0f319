"""The ledger: lowest first, one epoch ahead, nothing twice, nothing lost."""

from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flodl.protocol.ledger import MAX_RETURNS, Holder, Ledger, epoch_sizes
from flodl.protocol.messages import BatchRange

A, B = (0, 0), (1, 1)


def ranges(*triples: tuple[int, int, int]) -> tuple[BatchRange, ...]:
    return tuple(BatchRange(*triple) for triple in triples)


def test_leases_are_the_lowest_positions() -> None:
    ledger = Ledger([10])
    assert ledger.grant(A, 4) == ranges((0, 0, 4))
    assert ledger.grant(B, 4) == ranges((0, 4, 4))
    assert ledger.forfeit(A) == 4
    assert ledger.grant(B, 5) == ranges((0, 0, 4), (0, 8, 1))


def test_the_next_epoch_is_leased_when_the_pool_of_this_one_is_empty_and_no_further() -> None:
    ledger = Ledger([2, 2, 2])
    assert ledger.grant(A, 9) == ranges((0, 0, 2), (1, 0, 2))
    assert ledger.grantable() == 0
    ledger.seal(A, 2)
    assert ledger.commit([A]).closed_epochs == (0,)
    assert ledger.grant(A, 9) == ranges((2, 0, 2))


def test_an_epoch_closes_at_the_commit_of_its_last_batch() -> None:
    ledger = Ledger([3])
    ledger.grant(A, 2)
    ledger.grant(B, 1)
    ledger.seal(A, 2)
    settled = ledger.commit([A])
    assert settled.batches == ranges((0, 0, 2))
    assert settled.closed_epochs == ()
    assert not ledger.is_complete
    ledger.seal(B, 1)
    assert ledger.commit([B]).closed_epochs == (0,)
    assert ledger.is_complete


def test_more_cannot_be_sealed_than_is_held() -> None:
    ledger = Ledger([3])
    ledger.grant(A, 2)
    with pytest.raises(ValueError, match="rank 0 sealed 3 batches and held 2"):
        ledger.seal(A, 3)


def test_a_death_after_the_seal_returns_only_what_was_not_sealed() -> None:
    ledger = Ledger([6])
    ledger.grant(A, 5)
    ledger.seal(A, 2)
    assert ledger.forfeit(A) == 3
    assert ledger.sealed(A) == 2
    assert ledger.commit([A]).batches == ranges((0, 0, 2))
    assert ledger.remaining(0) == [(2, 6)]


def test_a_recall_takes_back_from_the_named_batch_on_in_the_order_granted() -> None:
    ledger = Ledger([10])
    ledger.grant(A, 3)
    ledger.grant(B, 2)
    ledger.grant(A, 3)
    assert ledger.recall(A, 0, 2) == 4
    assert ledger.held(A) == 2
    assert ledger.grant(B, 9) == ranges((0, 2, 1), (0, 5, 5))


def test_a_recall_of_a_batch_that_is_not_held_changes_nothing() -> None:
    ledger = Ledger([10])
    ledger.grant(A, 3)
    assert ledger.recall(A, 0, 7) == 0
    assert ledger.held(A) == 3


def test_an_excluded_batch_is_dealt_before_the_pool_and_to_another_rank() -> None:
    ledger = Ledger([6])
    ledger.grant(A, 2)
    ledger.seal(A, 2)
    assert ledger.exclude(A) == []
    assert ledger.grant(A, 1) == ranges((0, 2, 1))
    # The later one first: whichever of two neighbours it was, the second try tells them apart.
    assert ledger.grant(B, 3) == ranges((0, 1, 1), (0, 0, 1), (0, 3, 1))


def test_of_an_excluded_window_only_the_suspects_are_counted() -> None:
    ledger = Ledger([6])
    for _ in range(2):
        ledger.grant(A, 4, is_alone=True)
        ledger.seal(A, 4)
        quarantined = ledger.exclude(A, [(0, 1), (0, 2)])
    assert quarantined == [(0, 2), (0, 1)]
    assert ledger.grant(B, 6) == ranges((0, 0, 1), (0, 3, 3))
    assert ledger.unsettled() == 4


def test_an_innocent_that_is_left_out_again_and_again_is_a_suspect() -> None:
    ledger = Ledger([2])
    turns = 0
    while not ledger.is_complete and turns < 50:
        turns += 1
        ledger.grant(A, 2, is_alone=True)
        ledger.seal(A, 2)
        ledger.exclude(A, [(1, 7)])
        ledger.close()
    assert turns == MAX_RETURNS + 2


def test_a_rank_that_is_alone_retries_its_own() -> None:
    ledger = Ledger([2])
    ledger.grant(A, 1)
    ledger.seal(A, 1)
    ledger.exclude(A)
    assert ledger.grant(A, 1, is_alone=True) == ranges((0, 0, 1))


def test_at_the_second_exclusion_a_batch_is_quarantined_and_the_epoch_can_close_without_it() -> None:
    ledger = Ledger([1])
    for holder in (A, B):
        ledger.grant(holder, 1)
        ledger.seal(holder, 1)
        quarantined = ledger.exclude(holder)
    assert quarantined == [(0, 0)]
    assert ledger.quarantined() == [(0, 0)]
    assert not ledger.is_complete
    assert ledger.close() == (0,)
    assert ledger.is_complete
    assert ledger.unsettled() == 0


def test_remaining_is_the_order_less_what_is_settled() -> None:
    ledger = Ledger([10])
    ledger.grant(A, 3)
    ledger.grant(B, 2)
    ledger.seal(B, 2)
    ledger.commit([B])
    assert ledger.remaining(0) == [(0, 3), (5, 10)]
    assert ledger.contributed_ranges() == ranges((0, 3, 2))


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((3, 2, 11, None, 4), [3, 3]),
        ((3, 2, 11, 22, 4), [3, 3]),
        ((3, 2, 11, 21, 4), [3, 3]),
        ((3, 2, 11, 12, 4), [3, 1]),
        ((3, 2, 11, 11, 4), [3]),
        ((3, 2, 11, 4, 4), [1]),
        ((3, 2, 11, 5, 4), [2]),
        ((2, 3, 7, 5, 5), [1]),
    ],
)
def test_samples_cuts_the_last_epoch_at_a_whole_batch(arguments: Any, sizes: list[int]) -> None:
    assert epoch_sizes(*arguments) == sizes


class LedgerMachine(RuleBasedStateMachine):
    """Any order of events: every batch is in exactly one place."""

    SIZES = (5, 1, 4, 6)
    holders = st.tuples(st.integers(0, 2), st.integers(0, 1))

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(list(self.SIZES))
        self.contributed: set[tuple[int, int]] = set()

    @rule(holder=holders, count=st.integers(1, 6), is_alone=st.booleans())
    def grant(self, holder: Holder, count: int, is_alone: bool) -> None:
        open_epoch = self.ledger.current_epoch
        for granted in self.ledger.grant(holder, count, is_alone):
            assert open_epoch <= granted.epoch <= open_epoch + 1

    @rule(holder=holders, part=st.floats(0, 1))
    def seal(self, holder: Holder, part: float) -> None:
        self.ledger.seal(holder, int(part * self.ledger.held(holder)))

    @rule(holder=holders)
    def forfeit(self, holder: Holder) -> None:
        held = self.ledger.held(holder)
        assert self.ledger.forfeit(holder) == held

    @rule(holder=holders)
    def exclude(self, holder: Holder) -> None:
        self.ledger.exclude(holder)

    @rule(cohort=st.sets(holders))
    def commit(self, cohort: set[Holder]) -> None:
        for settled in self.ledger.commit(cohort).batches:
            for index in range(settled.first, settled.first + settled.count):
                assert (settled.epoch, index) not in self.contributed
                self.contributed.add((settled.epoch, index))

    @invariant()
    def everything_is_somewhere(self) -> None:
        ledger = self.ledger
        holders = [(rank, generation) for rank in range(3) for generation in range(2)]
        moving = sum(ledger.held(h) + ledger.sealed(h) for h in holders)
        not_open = sum(self.SIZES[ledger.current_epoch + 2 :])
        settled = len(self.contributed) + len(ledger.quarantined())
        assert moving + ledger.grantable() + not_open + settled == sum(self.SIZES)
        assert ledger.unsettled() == sum(self.SIZES) - settled


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
