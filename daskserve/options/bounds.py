"""How many replicas a backend may have: its own bounds, in whole groups, and the share of them for now.

Policies import this module, so it does without pydantic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from daskserve.errors import BadRequestError

#: Where the target capacity of an instance has gone last.
UP, DOWN = "UP", "DOWN"


def share_of(replicas: int, capacity: float | None, multiple_of: int = 1) -> int:
    """Return a share of so many replicas, rounded up to whole groups; of some it is none only at 0 percent.

    Parameters
    ----------
    capacity : float or None
        In percent; None is all of them.
    multiple_of : int
        How many replicas work as a group.
    """
    groups = -(-replicas // multiple_of)
    if capacity is not None and groups:
        # Rounded first: the last digit of a float must not be a replica more.
        share = math.ceil(round(groups * capacity / 100, 9))
        groups = max(share, 1) if capacity > 0 else 0
    return groups * multiple_of


def checked_capacity(percent: Any) -> float | None:
    """Return a target capacity as it is kept; `BadRequestError` unless it is from 0 to 100, or None."""
    if percent is None:
        return None
    is_number = isinstance(percent, Real) and not isinstance(percent, bool)
    if is_number and 0 <= percent <= 100:
        return float(percent)
    raise BadRequestError(
        f"The target capacity is {percent!r}; it must be a percentage from 0 to 100, or None for all."
    )


class ReplicaRange(Protocol):
    """The options of `daskserve.options.autoscaling.AutoscalingConfig` that bounds are made of."""

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
    """Between which numbers the autoscaler chooses.

    Attributes
    ----------
    least, most, first : int
        Never fewer, never more, and how many to begin with; all in whole groups.
    multiple_of : int
        How many replicas work as a group.
    capacity : float or None
        The percentage of its own bounds that these are; None for all of them.
    """

    least: int
    most: int
    first: int
    multiple_of: int = 1
    capacity: float | None = None

    @classmethod
    def of(cls, config: ReplicaRange, capacity: float | None = None, direction: str | None = None) -> Bounds:
        """Return the bounds of a config at a target capacity: while that goes up, ``first`` is the least."""
        unit = config.multiple_of
        most = share_of(config.max_replicas // unit * unit, capacity, unit)
        first = min(share_of(config.first_replicas, capacity, unit), most)
        is_held = direction == UP and config.initial_replicas is not None
        least = first if is_held else min(share_of(config.min_replicas, capacity, unit), most)
        return cls(least, most, first, unit, capacity)

    def allows(self, replicas: int) -> bool:
        """Whether there may be so many."""
        return self.least <= replicas <= self.most and replicas % self.multiple_of == 0

    def nearest(self, replicas: int) -> int:
        """Return the number to have where so many are wanted: whole groups, within the bounds."""
        return min(max(self.whole(replicas), self.least), self.most)

    def whole(self, replicas: int) -> int:
        """Return a number rounded up to whole groups."""
        return -(-replicas // self.multiple_of) * self.multiple_of

    @property
    def note(self) -> str:
        """What to say beside a bound, for people to read; empty at full capacity."""
        return "" if self.capacity is None else f", at a target capacity of {self.capacity:g} %"
