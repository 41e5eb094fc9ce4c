"""The report of a controller to the scheduler about the workers that its instance uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from daskserve.common.types import WorkerAddress


@dataclass(frozen=True, slots=True)
class UsageReport:
    """A controller's report to the scheduler about the workers that its instance uses.

    Attributes
    ----------
    in_use : frozenset
        Workers that hold replicas, other bundles of their placement groups, or proxies, or are about to.
    retiring : frozenset
        Workers that are about to leave, so that the controller places nothing new on them.
    waiting_workers : int
        Number of additional workers needed for the replicas that wait for capacity.
    proxies : frozenset
        Workers that hold proxies, from which the controller keeps away.
    held : frozenset
        Workers that an adaptive cluster must keep: those in use, except for proxies that may end with them.
    grace_s : float
        How long the requests on retiring workers may take, in seconds.
    occupied : mapping
        The amounts on each worker that Dask's tasks cannot use, by resource; threads count as the resource
        CPU.
    claimed : mapping
        The amounts of resources on each worker for which replicas wait, because tasks hold them.
    """

    in_use: frozenset[WorkerAddress] = frozenset()
    retiring: frozenset[WorkerAddress] = frozenset()
    waiting_workers: int = 0
    proxies: frozenset[WorkerAddress] = frozenset()
    held: frozenset[WorkerAddress] = frozenset()
    grace_s: float = 0.0
    occupied: Mapping[WorkerAddress, Mapping[str, float]] = field(default_factory=dict)
    claimed: Mapping[WorkerAddress, Mapping[str, float]] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: sorted(each) if isinstance(each, frozenset) else each for name, each in values.items()}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """Return the report for values from `plain`."""
        lists = (list, tuple)
        values: dict[str, Any] = {
            name: frozenset(each) if isinstance(each, lists) else each for name, each in plain.items()
        }
        return cls(**values)
