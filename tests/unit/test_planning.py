"""Windows dealt from counts and from what is left."""

from hypothesis import given
from hypothesis import strategies as st

from flodl.protocol.planning import Horizon, Member, one_each, targets

FAST, SLOW = Member(0, 10.0, 0), Member(1, 40.0, 0)
COUNTS = {0: 40, 1: 10}


def test_far_from_the_end_targets_are_the_counts() -> None:
    assert targets([FAST, SLOW], COUNTS, Horizon(1000, 1000)) == (COUNTS, "")


def test_the_last_window_takes_everything_and_ends_together() -> None:
    dealt, why = targets([FAST, SLOW], COUNTS, Horizon(60, 60))
    assert dealt == {0: 48, 1: 12}
    assert why == "the last window: 60 batches dealt to end together"


def test_one_and_a_half_windows_are_one() -> None:
    assert sum(targets([FAST, SLOW], COUNTS, Horizon(75, 75))[0].values()) == 75
    assert targets([FAST, SLOW], COUNTS, Horizon(76, 76))[0] == COUNTS


def test_before_the_last_epoch_a_rest_that_fills_a_window_is_no_end() -> None:
    assert targets([FAST, SLOW], COUNTS, Horizon(60, 600))[0] == COUNTS


def test_a_last_batch_that_a_slow_rank_would_finish_later_goes_to_the_fast_one() -> None:
    assert targets([FAST, SLOW], COUNTS, Horizon(3, 3))[0] == {0: 3, 1: 0}


def test_a_rank_keeps_what_it_holds() -> None:
    dealt, _ = targets([FAST, Member(1, 40.0, 5)], COUNTS, Horizon(6, 6))
    assert dealt == {0: 1, 1: 5}


def test_a_pause_to_expect_makes_the_window_shorter_but_not_empty() -> None:
    assert targets([Member(0, 10.0, 0, 200.0), SLOW], COUNTS, Horizon(1000, 1000))[0] == {0: 20, 1: 10}
    assert targets([Member(0, 10.0, 0, 9999.0), SLOW], COUNTS, Horizon(1000, 1000))[0] == {0: 1, 1: 10}


def test_sync_deals_one_to_each_and_the_rest_to_the_fastest() -> None:
    assert one_each([FAST, SLOW], Horizon(10, 10)) == {0: 1, 1: 1}
    assert one_each([SLOW, FAST], Horizon(1, 1)) == {0: 1, 1: 0}


members = st.lists(
    st.builds(Member, st.integers(), st.floats(1.0, 100.0), st.integers(0, 5)),
    min_size=1,
    max_size=6,
    unique_by=lambda m: m.rank,
)


@given(members, st.integers(0, 200), st.integers(0, 500))
def test_no_window_asks_for_more_than_there_is(able: list[Member], grantable: int, beyond: int) -> None:
    reachable = grantable + sum(m.held for m in able)
    counts = {m.rank: max(1, round(100.0 / m.ms)) for m in able}
    dealt, _ = targets(able, counts, Horizon(reachable, reachable + beyond))
    assert sum(max(0, dealt[m.rank] - m.held) for m in able) <= grantable
    assert sum(dealt.values()) <= reachable
    assert not reachable or max(dealt.values()) > 0


@given(members, st.integers(1, 60))
def test_nobody_waits_longer_than_a_slow_batch_at_the_end(able: list[Member], rest: int) -> None:
    fresh = [Member(m.rank, m.ms, 0) for m in able]
    dealt, _ = targets(fresh, {m.rank: 10**6 for m in fresh}, Horizon(rest, rest))
    assert sum(dealt.values()) == rest
    last = max(dealt[m.rank] * m.ms for m in fresh)
    # Whoever is done earlier could not have finished one more before the last is done.
    assert all((dealt[m.rank] + 1) * m.ms >= last - 1e-6 for m in fresh)
