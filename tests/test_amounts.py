"""Numbers in messages and options."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
from tables import each_case

from daskserve.common.formatting import as_whole, shown, shown_size
from daskserve.common.strict_json import strict_json

ROOT = Path(__file__).parent.parent
#: Modules whose numbers are for programs, or for an axis.
FOR_PROGRAMS = {"daskserve/simulation/svg.py"}


@each_case(
    ("value", "text"),
    [
        (1.11022e-16, "0"),
        (-1.11022e-16, "0"),
        (0.1 + 0.2, "0.3"),
        (1 / 3, "0.333"),
        (0.0001234, "0.000123"),
        (0.9999, "1"),
        (2, "2"),
        (2.0, "2"),
        (100, "100"),
        (61.25, "61.25"),
        (-2.5, "-2.5"),
        (33.33333, "33.333"),
        (10_000_000.0, "10000000"),
        (1e18, "1000000000000000000"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_no_exponent_and_no_noise(value: float, text: str) -> None:
    assert shown(value) == text


@each_case(
    ("count", "text"),
    [(0, "0 bytes"), (1000, "1000 bytes"), (1 << 20, "1 MiB"), (1.5e9, "1.4 GiB"), (1 << 60, "1 EiB")],
)
def test_sizes_have_a_unit(count: float, text: str) -> None:
    assert shown_size(count) == text


def test_no_message_formats_a_number_with_an_exponent() -> None:
    found = [
        f"{name}:{line}"
        for folder in ("daskserve", "proxies")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (name := str(path.relative_to(ROOT))) not in FOR_PROGRAMS
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r":\.?\d*[ge]\}|%\.?\d*[ge]\b", text)
    ]
    assert not found, f"use daskserve.common.formatting.shown in {', '.join(found)}"


@each_case("value", [8, 8.0, np.int64(8), np.float64(8)])
def test_whole_floats_are_whole_numbers(value: object) -> None:
    found = as_whole(value)
    assert found == 8
    assert type(found) is int


@each_case("value", [8.5, math.inf, math.nan, "8", None, True, [8]])
def test_anything_else_is_no_whole_number(value: object) -> None:
    assert as_whole(value) is None


def test_json_has_texts_for_numbers_that_python_does_not_write() -> None:
    large, text = 10**5000, '"<int: ValueError in its repr>"'
    assert strict_json({"n": large, "f": 1.5, large: 1}) == f'{{"n": {text}, "f": 1.5, {text}: 1}}'
