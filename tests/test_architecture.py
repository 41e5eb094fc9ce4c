"""The plan of the code: its size, and the picture of it in the documentation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import draw_architecture  # noqa: E402
from rooms import Plan, read_plan  # noqa: E402


@pytest.fixture(scope="module")
def plan() -> Plan:
    return read_plan()


def test_the_plan_fits_in_a_newcomers_head(plan: Plan) -> None:
    assert {"client", "control", "data", "proxies", "cluster"} <= set(plan.imports)
    assert len(plan.imports) <= 28
    assert max(plan.floors().values()) + 1 <= 8
    assert len(plan.arrows()) <= 120


def test_the_picture_is_up_to_date(plan: Plan) -> None:
    picture = (ROOT / "docs/architecture.svg").read_text(encoding="utf-8")
    assert draw_architecture.svg(plan) == picture, "run python scripts/draw_architecture.py"


def test_rooms_that_import_each_other_have_no_floor() -> None:
    plan = Plan({"a": frozenset({"b"}), "b": frozenset({"a"}), "c": frozenset()})
    with pytest.raises(ValueError, match="a, b"):
        plan.floors()


def test_an_import_is_drawn_once_even_if_a_longer_way_exists() -> None:
    plan = Plan({"a": frozenset({"b", "c"}), "b": frozenset({"c"}), "c": frozenset()})
    assert plan.floors() == {"c": 0, "b": 1, "a": 2}
    assert plan.arrows() == [("a", "b"), ("a", "c"), ("b", "c")]
    assert plan.direct() == [("a", "b"), ("b", "c")]
