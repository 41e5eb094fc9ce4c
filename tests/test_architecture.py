"""The plan of the code: its size limits, and its picture in the documentation."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tables import each_case

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import draw_architecture  # noqa: E402
from components import Plan, packages, read_inside, read_plan  # noqa: E402


@pytest.fixture(scope="module")
def plan() -> Plan:
    return read_plan()


def test_the_plan_is_within_its_size_limits(plan: Plan) -> None:
    assert {"client", "control", "data", "proxies", "cluster"} <= set(plan.imports)
    assert len(plan.imports) <= 30
    assert max(plan.layers().values()) + 1 <= 9
    assert len(plan.arrows()) <= 130


@each_case("package", packages())
def test_the_inside_of_each_package_is_within_its_size_limits(package: str) -> None:
    inside = read_inside(package)
    assert len(inside.imports) <= 16
    assert max(inside.layers().values()) + 1 <= 10
    assert len(inside.arrows()) <= 60


def test_the_picture_is_up_to_date(plan: Plan) -> None:
    picture = (ROOT / "docs/architecture.svg").read_text(encoding="utf-8")
    assert draw_architecture.svg(plan) == picture, "run python scripts/draw_architecture.py"


def test_the_map_names_every_room_and_only_existing_files(plan: Plan) -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    paths = re.findall(r"`([a-z_/0-9]+(?:\.py|/))`", text)
    assert len(paths) > 60
    found = [
        f"/{path.relative_to(ROOT).as_posix()}{'/' if path.is_dir() else ''}"
        for folder in ("daskserve", "proxies", "tests", "scripts")
        for path in (ROOT / folder, *(ROOT / folder).rglob("*"))
    ]
    missing = [each for each in paths if not any(path.endswith(f"/{each}") for path in found)]
    assert missing == []
    table = text.split("| component |")[1].split("\n\n")[0]
    components = {Path(each).stem for each in re.findall(r"`([a-z_/.]+)`", table)}
    assert set(plan.imports) - components == {"__init__", "__main__", "_version"}


def test_a_cycle_of_rooms_raises() -> None:
    plan = Plan({"a": frozenset({"b"}), "b": frozenset({"a"}), "c": frozenset()})
    with pytest.raises(ValueError, match="a, b"):
        plan.layers()


def test_imports_implied_by_a_longer_path_are_not_drawn() -> None:
    plan = Plan({"a": frozenset({"b", "c"}), "b": frozenset({"c"}), "c": frozenset()})
    assert plan.layers() == {"c": 0, "b": 1, "a": 2}
    assert plan.arrows() == [("a", "b"), ("a", "c"), ("b", "c")]
    assert plan.direct() == [("a", "b"), ("b", "c")]
