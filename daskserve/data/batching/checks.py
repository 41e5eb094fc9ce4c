"""Checks of the options of ``batch``, ``continuous_batch`` and ``multiplexed``."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from daskserve.common.formatting import as_whole, shown


def check_whole(name: str, value: Any, *, at_least: int = 1, other: str = "") -> int:
    """Return a whole number; raise `TypeError` or `ValueError` for any other value of an option.

    ``other`` is appended to the errors, and names other allowed values, such as ``", or None"``.
    """
    number = as_whole(value)
    if number is None:
        raise TypeError(f"{name} must be a whole number{other}; got {value!r}")
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}{other}; got {value}")
    return number


def check_seconds(name: str, value: Any, *, may_be_zero: bool = False) -> float:
    """Return a finite number of seconds; raise `TypeError` or `ValueError` for any other value."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    if not 0 <= value < math.inf or not (value or may_be_zero):
        bound = "at least" if may_be_zero else "more than"
        raise ValueError(f"{name} must be {bound} 0 s and finite, got {value}")
    return value


def check_number(name: str, value: Any, *, at_least: float = -math.inf) -> float:
    """Return a finite number; raise `TypeError` or `ValueError` for any other value."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r:.120}")
    if not math.isfinite(value) or value < at_least:
        bound = f" of at least {shown(at_least)}" if at_least > -math.inf else ""
        raise ValueError(f"{name} must be a finite number{bound}, got {value!r}")
    return float(value)
