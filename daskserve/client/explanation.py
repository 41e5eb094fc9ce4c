"""Why a backend has as many replicas as it has: what ``explain()`` returns. Print it to read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class LoadSample:
    """What was seen some seconds ago: requests that ran, that waited, and that ended per second.

    ``backlog`` is what waited in the broker's queue of the policy ``queue``; None: that was not known.
    """

    ago_s: float
    ongoing: float
    queued: float
    rate: float
    backlog: float | None = 0.0

    @property
    def elsewhere(self) -> str:
        """What waited in a broker's queue, in words; nothing if nothing did."""
        if self.backlog == 0:
            return ""
        return f", {'unknown' if self.backlog is None else f'{self.backlog:g}'} in the broker's queue"


@dataclass(frozen=True, slots=True)
class ScaleEvent:
    """One change of the wanted number: when, in seconds since the epoch, from what to what, and why."""

    at: float
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why there are so many replicas.

    Attributes
    ----------
    running, wanted : int
        How many replicas run, and how many should.
    min_replicas, max_replicas : int or None
        The bounds, at the target capacity of now; None if nothing scales the backend.
    policy : str
        What decides; empty if nothing does.
    group : str
        The group of backends that it decides about together; empty if it decides about this one alone.
    policy_wants : int or None
        What the policy wants within the bounds, delays aside; None before it was asked.
    is_dry_run : bool
        Whether nothing is done about it.
    reason : str
        What the policy said when it was asked last, and what is waited for.
    samples : tuple of LoadSample
        The last ones, oldest first.
    events : tuple of ScaleEvent
        The last changes of the wanted number, oldest first.
    waiting : str
        What replicas wait for, or fail with; empty if none does.
    is_external : bool
        Whether a scaler outside of the cluster may say how many there are.
    target_capacity, target_capacity_direction : float or None, str or None
        The percentage of its replicas that the instance is to have, and whether that went up or down last.
    """

    name: str
    running: int
    wanted: int
    min_replicas: int | None = None
    max_replicas: int | None = None
    policy: str = ""
    policy_wants: int | None = None
    is_dry_run: bool = False
    reason: str = ""
    samples: tuple[LoadSample, ...] = ()
    events: tuple[ScaleEvent, ...] = ()
    waiting: str = ""
    is_external: bool = False
    target_capacity: float | None = None
    target_capacity_direction: str | None = None
    group: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the explanation that a controller told in plain values."""
        samples = tuple(LoadSample(**each) for each in values["samples"])
        events = tuple(ScaleEvent(*each) for each in values["events"])
        return cls(**{**values, "samples": samples, "events": events})

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.running} of {self.wanted} wanted replicas run."]
        if self.is_external:
            lines.append("  An external scaler says how many there are, and num_replicas until it does.")
        elif not self.policy:
            lines.append("  Nothing scales it; num_replicas says how many there are.")
        else:
            wants = "was not asked yet" if self.policy_wants is None else f"wants {self.policy_wants}"
            policy = f"{self.policy}, of group '{self.group}'," if self.group else self.policy
            dry = " (dry run: nothing is done about it)" if self.is_dry_run else ""
            lines.append(
                f"  {policy} {wants}, of {self.min_replicas} to {self.max_replicas} allowed{dry}"
                f"{': ' + self.reason if self.reason else ''}"
            )
        if self.target_capacity is not None:
            direction = f", {self.target_capacity_direction}" if self.target_capacity_direction else ""
            lines.append(f"  The instance has a target capacity of {self.target_capacity:g} %{direction}.")
        if self.waiting:
            lines.append(f"  Waiting: {self.waiting}")
        if self.samples:
            lines.append("  Load, newest first:")
            lines += [
                f"    {each.ago_s:.0f} s ago: {each.ongoing:g} running, {each.queued:g} waiting, "
                f"{each.rate:.1f} per second{each.elsewhere}"
                for each in reversed(self.samples)
            ]
        if self.events:
            lines.append("  Changes, newest first:")
            lines += [
                f"    {datetime.fromtimestamp(each.at):%Y-%m-%d %H:%M:%S} {each.before} -> {each.after}: "
                f"{each.reason}"
                for each in reversed(self.events)
            ]
        return "\n".join(lines)
