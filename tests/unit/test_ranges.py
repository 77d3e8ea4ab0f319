"""Ranges against a plain set."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl.protocol.ranges import Ranges


def members(ranges: Ranges) -> set[int]:
    return {value for start, stop in ranges for value in range(start, stop)}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8))))
def test_adding_is_a_union_of_disjoint_sets_and_refuses_what_is_there(pieces: list[tuple[int, int]]) -> None:
    ranges, plain = Ranges(), set[int]()
    for start, count in pieces:
        new = set(range(start, start + count))
        if plain & new:
            with pytest.raises(ValueError, match="overlaps"):
                ranges.add(start, start + count)
        else:
            ranges.add(start, start + count)
            plain |= new
        assert members(ranges) == plain
        assert len(ranges) == len(plain)
        assert bool(ranges) == bool(plain)
    pairs = list(ranges)
    assert all(a[1] < b[0] for a, b in pairwise(pairs))
    assert [value for value in range(60) if value in ranges] == sorted(plain)


@given(st.sets(st.integers(0, 60)), st.integers(0, 70))
def test_taking_removes_the_lowest(values: set[int], count: int) -> None:
    ranges = Ranges([(value, value + 1) for value in values])
    taken = [value for start, stop in ranges.take(count) for value in range(start, stop)]
    assert taken == sorted(values)[:count]
    assert members(ranges) == values - set(taken)


def test_an_empty_range_adds_nothing() -> None:
    ranges = Ranges([(3, 3), (5, 4)])
    assert not ranges
    assert ranges.take(3) == []
