"""Changed copies of records: equal to those of `dataclasses.replace`, for every kind of class."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
from control_harness import app_spec, backend, goal
from tables import each_case

from daskserve.common.copying import replace
from daskserve.control.observed.observed import Notes


@dataclass(frozen=True, slots=True)
class Base:
    zone: int = 1


@dataclass(frozen=True, slots=True)
class Derived(Base):
    area: int = 2


@dataclass(frozen=True)
class WithoutSlots:
    zone: int = 1
    area: int = 2


@dataclass(slots=True)
class Checked:
    zone: int = 1
    doubled: int = field(default=2, repr=False)

    def __post_init__(self) -> None:
        self.doubled = 2 * self.zone


@each_case(
    ("record", "changes"),
    [
        (backend(), {"version": "v2", "goal": "g"}),
        (goal(), {"failures": {"b": 1}}),
        (app_spec(), {"route": None}),
        (Notes(), {"failures": 3}),
        (Base(), {"zone": 5}),
        (Derived(), {"zone": 5}),
        (Derived(), {}),
        (WithoutSlots(), {"area": 5}),
        (Checked(), {"zone": 5}),
    ],
)
def test_a_copy_is_that_of_the_standard_library(record: Any, changes: dict[str, Any]) -> None:
    before = dataclasses.replace(record)
    found = replace(record, **changes)
    assert type(found) is type(record)
    assert found == dataclasses.replace(record, **changes)
    assert record == before


def test_a_copy_of_a_frozen_record_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        replace(Base(), zone=2).zone = 3  # type: ignore[misc]


def test_an_unknown_name_is_an_error_that_names_the_class() -> None:
    with pytest.raises(AttributeError, match="'Base' object has no attribute 'zoen'"):
        replace(Base(), zoen=2)
