"""Sets of code are pickled in an order that is the same in each process."""

from __future__ import annotations

import enum
import pickle
from pathlib import PurePosixPath
from typing import Any

from tables import each_case

from daskserve.internals.ordered_sets import OrderedSet, SetOrder


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@each_case(
    ("value", "items"),
    [
        ({Color.RED, Color.BLUE}, [Color.BLUE, Color.RED]),
        (frozenset({str, int, len}), [int, len, str]),
        ({("b", 1), ("a", (2, Color.RED))}, [("a", (2, Color.RED)), ("b", 1)]),
        ({PurePosixPath("b"), PurePosixPath("a"), "c"}, [PurePosixPath("a"), PurePosixPath("b"), "c"]),
        ({frozenset({"x", Color.RED})}, [frozenset({"x", Color.RED})]),
    ],
)
def test_a_set_is_ordered_and_stays_a_set(value: Any, items: list[Any]) -> None:
    found = SetOrder().ordered(value)
    assert found.items == items
    copy = pickle.loads(pickle.dumps(found))
    assert copy == value
    assert type(copy) is type(value)


@each_case("value", [{"a", 1, None}, set(), {object()}, {("a", object())}, ["a"], {"a": {1}}])
def test_other_values_stay(value: Any) -> None:
    assert SetOrder().ordered(value) is value


def test_a_set_in_several_places_stays_one() -> None:
    order, colors = SetOrder(), {Color.RED, Color.BLUE}
    table = {"a": colors, "b": {"c": colors}, "d": 1}
    found = order.ordered(table)
    assert type(found["a"]) is OrderedSet
    assert found["a"] is found["b"]["c"] is order.ordered(colors)
    assert order.ordered(table) is found
    assert table["a"] is colors


def test_a_dictionary_in_itself_ends() -> None:
    table: dict[str, Any] = {"a": {Color.RED}}
    table["self"] = table
    assert type(SetOrder().ordered(table)["a"]) is OrderedSet
