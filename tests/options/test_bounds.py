"""Bounds of the autoscaler: whole groups, and the target capacity."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.errors import BadRequestError
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.fields.bounds import DOWN, UP, Bounds, checked_capacity, share_of


@each_case(
    ("replicas", "capacity", "unit", "expected"),
    [
        (10, None, 1, 10),
        (10, 100, 1, 10),
        (10, 50, 1, 5),
        (1, 50, 1, 1),
        (10, 0, 1, 0),
        (0, 50, 1, 0),
        (100, 7, 1, 7),
        (1000, 0.1, 1, 1),
        (3, 33.3, 1, 1),
        (3, 1e-12, 1, 1),
        (8, 50, 4, 4),
        (8, 51, 4, 8),
        (5, None, 4, 8),
    ],
)
def test_a_share_is_rounded_up_to_whole_groups(
    replicas: int, capacity: float | None, unit: int, expected: int
) -> None:
    assert share_of(replicas, capacity, unit) == expected


def bounds(capacity: float | None = None, direction: str | None = None, **options: Any) -> Bounds:
    return AutoscalingConfig(**options).bounds(capacity, direction)


def test_a_capacity_scales_all_bounds() -> None:
    options = {"min_replicas": 4, "max_replicas": 20, "initial_replicas": 10}
    full, half = bounds(**options), bounds(50, **options)
    assert (full.least, full.first, full.most, full.capacity_note) == (4, 10, 20, "")
    assert (half.least, half.first, half.most) == (2, 5, 10)
    assert half.capacity_note == ", at a target capacity of 50 %"
    nothing = bounds(0, **options)
    assert (nothing.least, nothing.first, nothing.most, nothing.nearest(7)) == (0, 0, 0, 0)


def test_the_initial_number_is_the_minimum_while_the_capacity_goes_up() -> None:
    options = {"min_replicas": 4, "max_replicas": 20, "initial_replicas": 10}
    assert bounds(50, UP, **options).least == 5
    assert bounds(50, DOWN, **options).least == 2
    assert bounds(50, UP, min_replicas=4, max_replicas=20).least == 2


def test_numbers_are_rounded_up_to_whole_groups_within_the_maximum() -> None:
    found = bounds(min_replicas=3, max_replicas=11, initial_replicas=10, multiple_of=4)
    assert (found.least, found.first, found.most) == (4, 8, 8)
    assert [found.nearest(each) for each in (0, 4, 5, 8, 9, 50)] == [4, 4, 8, 8, 8, 8]
    assert [each for each in range(13) if found.allows(each)] == [4, 8]
    assert bounds(min_replicas=0, max_replicas=8, multiple_of=4).nearest(0) == 0


@given(
    st.integers(0, 50), st.integers(0, 50), st.integers(1, 9), st.floats(0, 100), st.sampled_from([UP, DOWN])
)
def test_bounds_at_any_capacity_are_ordered_whole_groups(
    least: int, more: int, unit: int, capacity: float, direction: str
) -> None:
    config = AutoscalingConfig(
        min_replicas=least,
        max_replicas=math.ceil(max(least, 1) / unit) * unit + more,
        initial_replicas=least,
        multiple_of=unit,
    )
    full, part = config.bounds(), config.bounds(capacity, direction)
    assert 0 <= part.least <= part.first <= part.most <= full.most
    assert part.least <= full.least
    assert all(each % unit == 0 for each in (part.least, part.first, part.most))
    assert (part.most == 0) == (capacity == 0)
    assert config.bounds(100.0).most == full.most
    assert all(part.allows(part.nearest(wanted)) for wanted in range(60))


@each_case("percent", [-1, 100.1, math.nan, math.inf, "50", "", True, [50], b"50", 1j, object()])
def test_an_invalid_percentage_is_refused(percent: Any) -> None:
    with pytest.raises(BadRequestError, match="give a percentage from 0 to 100, or None for all"):
        checked_capacity(percent)


def test_any_type_of_number_is_a_percentage() -> None:
    assert [checked_capacity(each) for each in (0, 50, 99.5, 100, None)] == [0.0, 50.0, 99.5, 100.0, None]
    assert isinstance(checked_capacity(50), float)
