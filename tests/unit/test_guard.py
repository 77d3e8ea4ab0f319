"""What the guard says to a series of drifts."""

import pytest

from flodl.protocol.guard import OVERWRITE_THRESHOLD, Guard


def words(drifts: list[float], batches: int = 1000, guard: Guard | None = None) -> list[str]:
    guard = guard or Guard(OVERWRITE_THRESHOLD)
    return [guard.judge(drift, batches).word for drift in drifts]


def test_a_steady_drift_is_stable() -> None:
    assert set(words([0.2] * 10)) == {"stable"}


def test_three_rises_over_the_threshold_hold_growth() -> None:
    assert words([0.050, 0.051, 0.052, 0.053]) == ["stable", "stable", "stable", "hold"]


def test_three_rises_below_the_threshold_are_nothing() -> None:
    assert set(words([0.01, 0.011, 0.012, 0.013])) == {"stable"}


def test_a_fall_between_starts_the_count_again() -> None:
    assert "hold" not in words([0.06, 0.061, 0.062, 0.0615, 0.062, 0.063])


def test_an_elastic_blend_has_its_own_threshold() -> None:
    assert set(words([0.1, 0.15, 0.2, 0.25], guard=Guard(0.3))) == {"stable"}


def test_an_exponential_rise_halves() -> None:
    # ln 2 over 10 batches is 0.07 per batch.
    found = words([0.006, 0.012, 0.024, 0.048], batches=10)
    assert found == ["stable", "stable", "stable", "halve"]


def test_a_rise_far_below_the_threshold_is_nothing() -> None:
    assert set(words([0.0002, 0.0004, 0.0008, 0.0016, 0.0032], batches=10)) == {"stable"}


def test_a_window_that_grows_may_drift_further_in_proportion() -> None:
    guard = Guard(OVERWRITE_THRESHOLD)
    verdicts = [guard.judge(0.0005 * batches, batches).word for batches in (10, 20, 40, 80)]
    assert verdicts == ["stable"] * 4


def test_the_same_rise_over_long_windows_is_no_exponential() -> None:
    assert "halve" not in words([0.006, 0.012, 0.024, 0.048], batches=1000)


def test_a_drift_of_zero_is_no_rise_from_nothing() -> None:
    assert set(words([0.0, 0.0, 0.01, 0.0, 0.01], batches=1)) == {"stable"}


def test_a_learning_rate_cliff_halves_once() -> None:
    guard = Guard(OVERWRITE_THRESHOLD)
    verdicts = [guard.judge(0.01, 10, factor) for factor in (1.0, 0.1, 0.1, 0.09)]
    assert [verdict.word for verdict in verdicts] == ["stable", "halve", "stable", "stable"]
    assert verdicts[1].reason == "the learning rate fell from 1 to 0.1 of its base in one window"


def test_a_run_that_begins_at_a_low_rate_did_not_fall_there() -> None:
    """Seen: each resume under a schedule halved the anchor, for a fall before the stop."""
    assert Guard(OVERWRITE_THRESHOLD).judge(0.01, 10, 0.2).word == "stable"


@pytest.mark.parametrize("batches", [0, 1])
def test_a_window_without_batches_is_judged_without_a_rate(batches: int) -> None:
    assert words([0.1, 0.2], batches=batches) == ["stable", "stable"]
