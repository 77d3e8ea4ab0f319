"""Speeds, counts and the anchor."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl.protocol.cadence import Cadence
from flodl.protocol.messages import WindowReport


def cadence(**changes: Any) -> Cadence:
    given: dict[str, Any] = {"anchor": 10, "overhead_target": 0.02, "max_ratio": 64.0, "batches_per_epoch": 10**6}
    return Cadence(**{**given, **changes})


def report(ms: float, batches: int = 9, first_ms: float | None = None, data_ms: float = 0.0) -> WindowReport:
    return WindowReport(batches, (ms - data_ms) * batches, data_ms * batches, ms if first_ms is None else first_ms)


def measured(speeds: dict[int, float], **changes: Any) -> Cadence:
    found = cadence(**changes)
    for rank, ms in speeds.items():
        found.observe(rank, report(ms))
    return found


def test_counts_are_the_anchor_times_the_ratio() -> None:
    assert measured({0: 10.0, 1: 47.0, 2: 47.0}).pace([0, 1, 2]).counts == {0: 47, 1: 10, 2: 10}


def test_a_window_stays_open_until_every_rank_is_measured_and_says_which_is_not() -> None:
    pace = measured({0: 10.0}).pace([0, 1, 2])
    assert pace.counts is None
    assert pace.reason == "open window: the speed of ranks 1, 2 is not measured yet"


def test_waiting_for_data_counts_as_cost() -> None:
    found = cadence()
    found.observe(0, report(50.0, data_ms=40.0))
    assert found.ms(0) == pytest.approx(50.0)


def test_the_first_batch_of_a_window_is_not_in_its_speed() -> None:
    found = cadence()
    found.observe(0, report(10.0, first_ms=5000.0))
    assert found.ms(0) == pytest.approx(10.0)


def test_a_window_of_one_batch_is_measured_less_its_usual_excess() -> None:
    found = cadence()
    found.observe(0, report(10.0, first_ms=14.0))
    for _ in range(4):
        found.observe(0, WindowReport(0, 0.0, 0.0, 104.0))
    assert found.ms(0) == pytest.approx(100.0)


def test_one_odd_window_changes_nothing_and_two_are_believed() -> None:
    found = cadence()
    for _ in range(5):
        found.observe(0, report(10.0))
    found.observe(0, report(100.0))
    assert found.ms(0) == pytest.approx(10.0)
    found.observe(0, report(101.0))
    assert found.ms(0) == pytest.approx(100.5)


def test_a_rank_that_was_waited_for_is_believed_at_once() -> None:
    found = cadence()
    for _ in range(5):
        found.observe(0, report(10.0))
    found.observe(0, report(300.0), is_late=True)
    assert found.ms(0) == pytest.approx(300.0)


@pytest.mark.parametrize("ms", [0.0, float("nan"), float("inf"), -3.0])
def test_what_is_no_time_is_not_measured(ms: float) -> None:
    found = cadence()
    found.observe(0, WindowReport(3, 3 * ms, 0.0, 1.0))
    assert found.ms(0) is None


def test_the_ratio_is_capped() -> None:
    assert measured({0: 1.0, 1: 1000.0}, max_ratio=64.0, anchor=2).pace([0, 1]).counts == {0: 128, 1: 2}


def test_the_anchor_grows_with_the_overhead_at_most_twofold_and_not_from_the_first_window() -> None:
    found = measured({0: 10.0, 1: 10.0})
    assert found.observe_round([0, 1], 100.0) == ""
    assert found.observe_round([0, 1], 100.0).startswith("anchor 10 -> 20: a round and its first batch cost 50.0 %")
    assert found.anchor == 20


def test_the_anchor_does_not_grow_within_the_target() -> None:
    found = measured({0: 10.0, 1: 10.0})
    for _ in range(5):
        found.observe_round([0, 1], 1.0)
    assert found.anchor == 10


def test_growth_is_held_until_it_is_released() -> None:
    found = measured({0: 10.0})
    found.observe_round([0], 100.0)
    found.hold()
    assert found.observe_round([0], 100.0) == ""
    found.release()
    assert found.observe_round([0], 100.0) != ""


def test_an_epoch_holds_twenty_rounds() -> None:
    found = measured({0: 10.0, 1: 40.0}, batches_per_epoch=1000)
    pace = found.pace([0, 1])
    assert pace.counts == {0: 40, 1: 10}
    small = measured({0: 10.0, 1: 40.0}, batches_per_epoch=500).pace([0, 1])
    assert small.counts == {0: 20, 1: 5}
    assert "should hold 20 rounds" in small.reason


def test_the_anchor_is_not_made_so_small_that_rounding_costs_more_than_the_target() -> None:
    # At an anchor of 1, 1.5 rounds to 2 batches against 1: a quarter of the window is lost.
    counts = measured({0: 10.0, 1: 15.0}, batches_per_epoch=20).pace([0, 1]).counts
    assert counts == {0: 3, 1: 2}


def test_an_anchor_at_which_the_speeds_do_not_fit_is_passed_over_upwards() -> None:
    # 368 : 245 : 69 at an anchor of 5 would make a window of 8 × 245 in which the others have 5 × 368 and 26 × 70.
    pace = measured({0: 245.0, 1: 69.5, 2: 368.0}, anchor=5).pace([0, 1, 2])
    assert pace.counts is not None
    longest = max(count * ms for count, ms in zip(pace.counts.values(), (245.0, 69.5, 368.0), strict=True))
    assert (
        min(count * ms for count, ms in zip(pace.counts.values(), (245.0, 69.5, 368.0), strict=True)) > 0.96 * longest
    )
    assert 5 < pace.anchor <= 10


def test_halving_starts_from_the_anchor_in_use() -> None:
    found = measured({0: 10.0, 1: 10.0}, anchor=64, batches_per_epoch=640)
    assert found.pace([0, 1]).anchor == 16
    found.shorten()
    assert found.pace([0, 1]).anchor == 8


def test_an_outer_step_gets_its_window() -> None:
    pace = measured({0: 10.0, 1: 10.0}, min_window=30).pace([0, 1])
    assert pace.counts == {0: 30, 1: 30}
    assert "the outer optimizer wants 30 batches" in pace.reason


@given(st.lists(st.floats(1.0, 500.0), min_size=1, max_size=8), st.integers(1, 200))
def test_every_rank_works_and_the_slowest_makes_the_anchor_in_use(speeds: list[float], anchor: int) -> None:
    pace = measured(dict(enumerate(speeds)), anchor=anchor).pace(range(len(speeds)))
    assert pace.counts is not None
    slowest = max(range(len(speeds)), key=lambda rank: speeds[rank])
    assert pace.counts[slowest] == pace.anchor
    assert anchor <= pace.anchor <= max(2 * anchor, 4)
    assert min(pace.counts.values()) >= 1
    assert all(pace.counts[rank] <= 64 * pace.anchor for rank in pace.counts)
