"""One round: who counts, with which weight, and what an attempt's end may change."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl.protocol.effects import Reduced
from flodl.protocol.messages import Sealed, WindowReport
from flodl.protocol.round import Round, RoundPhase

NOTHING = WindowReport(0, 0.0, 0.0, 0.0)


def sealed(batches: int, samples: int, round_: int = 3) -> Sealed:
    return Sealed(round_, 0, batches, samples, NOTHING)


def a_round(samples: dict[int, int], gamma: float = 1.0) -> Round:
    made = Round(3, 8, gamma)
    for rank, count in samples.items():
        made.seal((rank, rank), sealed(-(-count // 8), count))
    return made


def ended(round_: Round, finite: tuple[bool, ...]) -> Reduced:
    return Reduced(round_.start_attempt(1).attempt, finite, (0.0,) * len(finite), 1.0, 7, 0.1)


def test_weights_are_by_samples_in_the_order_of_ranks() -> None:
    reduce = a_round({2: 8, 0: 24}).start_attempt(1)
    assert [(c.rank, c.weight) for c in reduce.contributions] == [(0, 0.75), (2, 0.25)]


def test_gamma_bends_the_weights_and_leaves_those_of_buffers() -> None:
    reduce = a_round({0: 72, 1: 8}, gamma=0.5).start_attempt(1)
    assert [c.weight for c in reduce.contributions] == [0.75, 0.25]
    assert [c.buffer_weight for c in reduce.contributions] == [0.9, 0.1]


def test_a_lone_contribution_has_weight_one_exactly() -> None:
    (only,) = a_round({1: 3}, gamma=0.3).start_attempt(1).contributions
    assert (only.weight, only.buffer_weight) == (1.0, 1.0)


@given(st.dictionaries(st.integers(0, 9), st.integers(1, 10**6), min_size=1), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_weights_sum_to_one(samples: dict[int, int], gamma: float) -> None:
    contributions = a_round(samples, gamma).start_attempt(1).contributions
    assert sum(Fraction(c.weight) for c in contributions) == pytest.approx(1.0)
    assert sum(Fraction(c.buffer_weight) for c in contributions) == pytest.approx(1.0)


def test_who_made_no_batch_is_not_in_the_cohort_and_may_seal_again() -> None:
    made = a_round({0: 8, 1: 0})
    assert [c.rank for c in made.start_attempt(1).contributions] == [0]
    idle = a_round({1: 0})
    assert not idle.has_work
    idle.drop_empty((1, 1))
    idle.seal((1, 1), sealed(1, 8))
    assert idle.has_work


def test_work_that_was_sealed_is_not_dropped() -> None:
    made = a_round({0: 8})
    made.drop_empty((0, 0))
    assert made.counts((0, 0))


@pytest.mark.parametrize(
    ("holder", "round_", "words"),
    [((0, 0), 3, "sealed round 3 twice"), ((1, 1), 2, "sealed round 2 while round 3 is open")],
)
def test_a_seal_that_does_not_belong_here_is_refused(holder: tuple[int, int], round_: int, words: str) -> None:
    made = a_round({0: 8})
    with pytest.raises(ValueError, match=words):
        made.seal(holder, sealed(1, 8, round_))


def test_a_seal_during_the_sum_is_too_late() -> None:
    made = a_round({0: 8})
    made.start_attempt(1)
    with pytest.raises(ValueError, match="while it is reducing"):
        made.seal((1, 1), sealed(1, 8))


def test_what_is_not_finite_leaves_the_round_and_the_rest_is_weighed_anew() -> None:
    made = a_round({0: 8, 1: 8, 2: 24})
    assert made.exclude_nonfinite(ended(made, (True, False, True))) == [(1, 1)]
    assert list(made.excluded) == [(1, 1)]
    again = made.start_attempt(2)
    assert [(c.rank, c.weight) for c in again.contributions] == [(0, 0.25), (2, 0.75)]
    assert not made.is_current(1)
    assert made.is_current(2)


def test_an_accepted_result_is_not_taken_back() -> None:
    made = a_round({0: 8})
    result = ended(made, (True,))
    assert made.accept(result) == 1
    assert made.phase is RoundPhase.COMMITTING
    assert not made.is_current(1)


def test_the_seed_counts_although_it_made_no_batch() -> None:
    seed = Round(0, 8, 1.0)
    seed.seal((4, 4), sealed(0, 0, round_=0))
    assert seed.has_work
    assert [c.rank for c in seed.start_attempt(1).contributions] == [4]
