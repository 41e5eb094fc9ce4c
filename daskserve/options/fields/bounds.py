"""The number of replicas of a backend: its bounds, and requests of external scalers for a number.

Policies import this module, so it does not import pydantic.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from daskserve.common.formatting import as_whole, shown
from daskserve.errors import BadRequestError

#: Directions of the last change of an instance's target capacity.
UP, DOWN = "UP", "DOWN"
#: Largest accepted number. A larger one is probably a mistake, and would keep the controller busy for a long
#: time.
MOST_REPLICAS = 10_000
#: The key of the number in a request, as in Ray Serve.
KEY = "target_num_replicas"


def share_of(replicas: int, capacity: float | None, multiple_of: int = 1) -> int:
    """Return a share of a number of replicas, rounded up to whole groups.

    A share of more than 0 percent has at least one group, if there is any.

    Parameters
    ----------
    capacity : float or None
        The share in percent; None for all of them.
    multiple_of : int
        How many replicas work as a group.
    """
    groups = -(-replicas // multiple_of)
    if capacity is not None and groups:
        # Round first, so that a floating-point error does not add a replica.
        share = math.ceil(round(groups * capacity / 100, 9))
        groups = max(share, 1) if capacity > 0 else 0
    return groups * multiple_of


def share_or_number(value: Any, replicas: int, rounded: Literal["up", "down"] = "up") -> int:
    """Return a number of replicas, given as a number or as a percentage of ``replicas``, rounded.

    Raises
    ------
    ValueError
        The value is neither a whole number from 0 on nor a percentage such as ``"25%"``.
    """
    number = as_whole(value)
    if number is not None and number >= 0:
        return number
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,5}(?:\.[0-9]+)?) ?%", value)):
        share = round(replicas * float(match[1]) / 100, 9)
        return math.ceil(share) if rounded == "up" else math.floor(share)
    raise ValueError(
        f'{value!r} is not a number of replicas; give a whole number from 0 on, or a percentage such as "25%"'
    )


def checked_capacity(percent: Any) -> float | None:
    """Return a target capacity as a float or None; raise `BadRequestError` unless it is 0 to 100 or None."""
    if percent is None:
        return None
    is_number = isinstance(percent, Real) and not isinstance(percent, bool)
    if is_number and 0 <= percent <= 100:
        return float(percent)
    raise BadRequestError(
        f"The target capacity is {percent!r}; give a percentage from 0 to 100, or None for all."
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of the autoscaler.

    Attributes
    ----------
    least, most, first : int
        The minimum, maximum and initial number of replicas, in whole groups.
    multiple_of : int
        How many replicas work as a group.
    capacity : float or None
        The target capacity, in percent, at which these bounds hold; None for full capacity.
    """

    least: int
    most: int
    first: int
    multiple_of: int = 1
    capacity: float | None = None

    def allows(self, replicas: int) -> bool:
        """Whether this number of replicas is allowed."""
        return self.least <= replicas <= self.most and replicas % self.multiple_of == 0

    def nearest(self, replicas: int) -> int:
        """Return the allowed number for a wanted number: rounded up to whole groups, within the bounds."""
        return min(max(self.whole(replicas), self.least), self.most)

    def whole(self, replicas: int) -> int:
        """Return a number rounded up to whole groups."""
        return -(-replicas // self.multiple_of) * self.multiple_of

    @property
    def capacity_note(self) -> str:
        """A human-readable note about the capacity, to follow a bound; empty at full capacity."""
        return "" if self.capacity is None else f", at a target capacity of {shown(self.capacity)} %"


def checked_number(value: Any) -> int:
    """Return the requested number of replicas if it is allowed.

    Raises
    ------
    BadRequestError
        The number is not allowed. As with ``num_replicas``, zero is not allowed either.
    """
    number = as_whole(value)
    if number is None:
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}..."
        raise BadRequestError(f"{KEY} is {shown}; give a whole number of replicas")
    if not 1 <= number <= MOST_REPLICAS:
        shown = str(number) if abs(number) <= 10**15 else "out of range"
        raise BadRequestError(
            f"{KEY} is {shown}; give a number from 1 to {MOST_REPLICAS}; only autoscaling_config allows 0 "
            "replicas"
        )
    return number


def number_in(body: bytes) -> int:
    """Return the number of replicas in the body of a request.

    Raises
    ------
    BadRequestError
        The body is not JSON, has no number, or the number is not allowed.
    """
    example = f'{{"{KEY}": 3}}'
    try:
        wanted: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequestError(f"the body is not JSON; send {example}") from None
    if not isinstance(wanted, dict) or KEY not in wanted:
        raise BadRequestError(f"the body has no {KEY}; send {example}")
    return checked_number(wanted[KEY])
