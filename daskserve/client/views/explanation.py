"""The result of ``explain()``: the reasons for a backend's number of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from daskserve.common.formatting import shown


@dataclass(frozen=True, slots=True)
class LoadSample:
    """A load measurement: requests that ran, that were queued, and that ended per second.

    ``backlog`` is the length of the broker's queue of the policy ``queue``; None if it was unknown.
    """

    ago_s: float
    ongoing: float
    queued: float
    rate: float
    backlog: float | None = 0.0

    @property
    def elsewhere(self) -> str:
        """A phrase with the length of the broker's queue; an empty string if the length is 0."""
        if self.backlog == 0:
            return ""
        return f", {'unknown' if self.backlog is None else shown(self.backlog)} in the broker's queue"


@dataclass(frozen=True, slots=True)
class ScaleEvent:
    """One change of the target number: the time in seconds since the epoch, both numbers and the reason."""

    at: float
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons for a backend's number of replicas.

    Attributes
    ----------
    running, wanted : int
        Running and target number of replicas.
    min_replicas, max_replicas : int or None
        The bounds at the current target capacity; None without autoscaling.
    policy : str
        Name of the autoscaling policy; empty without autoscaling.
    group : str
        The group of backends that the policy scales together; empty if it scales this backend alone.
    policy_wants : int or None
        The policy's decision within the bounds, before delays; None before its first run.
    is_dry_run : bool
        Whether decisions are only recorded, not applied.
    reason : str
        The policy's reason for its last decision, and any delay in effect.
    samples : tuple of LoadSample
        The latest load samples, oldest first.
    events : tuple of ScaleEvent
        The latest changes of the target number, oldest first.
    waiting : str
        What replicas wait for or fail with; empty if none does.
    is_external : bool
        Whether a scaler outside the cluster may set the number.
    target_capacity, target_capacity_direction : float or None, str or None
        The target percentage of the instance's replicas, and whether it last went up or down.
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
        """Return the explanation from the controller's plain values."""
        samples = tuple(LoadSample(**each) for each in values["samples"])
        events = tuple(ScaleEvent(*each) for each in values["events"])
        return cls(**{**values, "samples": samples, "events": events})

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.running} of {self.wanted} wanted replicas run."]
        if self.is_external:
            lines.append("  An external scaler sets the number of replicas; until then, num_replicas does.")
        elif not self.policy:
            lines.append("  There is no autoscaling; num_replicas sets the number of replicas.")
        else:
            wants = "has not run yet" if self.policy_wants is None else f"wants {self.policy_wants}"
            policy = f"{self.policy}, of group '{self.group}'," if self.group else self.policy
            dry = " (dry run: decisions are not applied)" if self.is_dry_run else ""
            reason = f": {self.reason}" if self.reason else ""
            lines.append(
                f"  {policy} {wants}, of {self.min_replicas} to {self.max_replicas} allowed{dry}{reason}"
            )
        if self.target_capacity is not None:
            direction = f", {self.target_capacity_direction}" if self.target_capacity_direction else ""
            lines.append(
                f"  The instance has a target capacity of {shown(self.target_capacity)} %{direction}."
            )
        if self.waiting:
            lines.append(f"  Waiting: {self.waiting}")
        if self.samples:
            lines.append("  Load, newest first:")
            lines += [
                f"    {each.ago_s:.0f} s ago: {shown(each.ongoing)} running, {shown(each.queued)} waiting, "
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
