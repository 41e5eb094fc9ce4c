"""What autoscaling policies are given and what they return; its options are in `AutoscalingConfig`.

A policy is a plain function of an `AutoscalingContext`: no clock, no I/O, no memory but the state that it
returned the last time. The same function therefore runs in the controller, in the simulator and in a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from daskserve.types import BackendTag, ReplicaTag


class AutoscalingConfig(BaseModel):
    """Between which bounds a backend's replicas are scaled, and by what."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, populate_by_name=True)

    min_replicas: int = Field(1, ge=0, description="Never fewer; 0 lets an idle backend have none.")
    max_replicas: int = Field(1, ge=1, description="Never more.")


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen of a backend at one time, over all of its replicas and all routers.

    Attributes
    ----------
    at : float
        When, in seconds on the clock of `AutoscalingContext.current_time`.
    ongoing : float
        Requests that replicas were running.
    queued : float
        Requests that waited in routers for a replica.
    rate : float
        Requests per second that have ended since the sample before.
    latency_counts : sequence of int
        How many of these took how long, by the buckets of `daskserve.figures.LATENCY_BUCKETS_S`.
    """

    at: float
    ongoing: float
    queued: float
    rate: float = 0.0
    latency_counts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class AutoscalingContext:
    """All that a policy decides by.

    Attributes
    ----------
    current_time : float
        In seconds, on a clock that only goes forward.
    wall_time : float
        In seconds since the epoch, for schedules.
    current_num_replicas, target_num_replicas : int
        How many replicas run, and how many are wanted since the last decision.
    samples : sequence of Sample
        Oldest first, over the look-back period, cut at the last change of the wanted number.
    replica_ongoing : mapping
        What each running replica was running at the last sample.
    queries : mapping
        The newest values of the config's PromQL expressions, by name; one that is too old is left out.
    state : mapping
        What the policy returned as its state the last time; plain values, and it may be lost.
    last_scale_up_time, last_scale_down_time : float or None
        When the wanted number changed last, on the clock of ``current_time``.
    idle_since : float or None
        Since when nothing runs and nothing waits; None if something does.
    """

    name: BackendTag
    config: AutoscalingConfig
    current_time: float
    wall_time: float
    current_num_replicas: int
    target_num_replicas: int
    samples: Sequence[Sample] = ()
    replica_ongoing: Mapping[ReplicaTag, float] = field(default_factory=dict)
    custom: Mapping[str, float] = field(default_factory=dict)
    queries: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    last_scale_up_time: float | None = None
    last_scale_down_time: float | None = None
    idle_since: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas a policy wants, before the bounds are applied, and why, for people to read."""

    replicas: int
    reason: str
    state: Mapping[str, Any] = field(default_factory=dict)


Policy: TypeAlias = Callable[[AutoscalingContext], Decision]
