"""The bounds of a backend's number of replicas, in whole groups and at the instance's target capacity.

Policies import this module, so it does not import pydantic.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Protocol

from daskserve.common.formatting import as_whole, shown
from daskserve.errors import BadRequestError

#: Directions of the last change of an instance's target capacity.
UP, DOWN = "UP", "DOWN"


def share_of(replicas: int, capacity: float | None, multiple_of: int = 1) -> int:
    """Return a share of a number of replicas, rounded up to whole groups.

    The share of a number above 0 is 0 only at 0 percent.

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
    """Return a number of replicas that is given as such, or as a rounded percentage of ``replicas``.

    Raises
    ------
    ValueError
        It is neither a whole number from 0 on nor a percentage such as ``"25%"``.
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


class ReplicaRange(Protocol):
    """The options of `daskserve.options.autoscaling.AutoscalingConfig` that determine the bounds."""

    @property
    def min_replicas(self) -> int: ...
    @property
    def max_replicas(self) -> int: ...
    @property
    def initial_replicas(self) -> int | None: ...
    @property
    def first_replicas(self) -> int: ...
    @property
    def multiple_of(self) -> int: ...


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

    @classmethod
    def of(cls, config: ReplicaRange, capacity: float | None = None, direction: str | None = None) -> Bounds:
        """Return the bounds of a config at a target capacity.

        While the capacity goes up, the initial number of replicas, if set, is the minimum.
        """
        unit = config.multiple_of
        most = share_of(config.max_replicas // unit * unit, capacity, unit)
        first = min(share_of(config.first_replicas, capacity, unit), most)
        is_held = direction == UP and config.initial_replicas is not None
        least = first if is_held else min(share_of(config.min_replicas, capacity, unit), most)
        return cls(least, most, first, unit, capacity)

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
