"""What autoscaling policies are given and what they return; its options are in `AutoscalingConfig`.

A policy is a plain function of an `AutoscalingContext`: no clock, no I/O, no memory but the state that it
returned the last time. The same function therefore runs in the controller, in the simulator and in a test.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from daskserve.options.bounds import Bounds
from daskserve.types import BackendTag, ReplicaTag

if TYPE_CHECKING:
    from daskserve.options.autoscaling import AutoscalingConfig

#: Sums of floats are off by their last digits; that must not be a replica more.
ROUNDING = 1e-9


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
        How many of these took how long, by the buckets of `AutoscalingContext.latency_bounds_s`: not
        cumulative, and one more than there are bounds.
    backlog : float or None
        Tasks that waited in the broker's queue of the policy ``queue``; None: that is not known at present.
    """

    at: float
    ongoing: float
    queued: float
    rate: float = 0.0
    latency_counts: Sequence[int] = ()
    backlog: float | None = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing ran, waited or ended: short requests show in the rate alone."""
        return self.ongoing <= 0 and self.queued <= 0 and self.rate <= 0 and self.backlog == 0

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits whom only a replica can answer."""
        return self.ongoing + self.queued + (self.backlog or 0.0) > 0


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
    custom : mapping
        What the backend's own code measures (``record_autoscaling_stats``): by name, the
        ``aggregated_metrics`` of its replicas, taken together by the config's ``aggregation_function``.
    queries : mapping
        The newest values of the config's PromQL expressions, by name; one that is too old is left out.
    state : mapping
        What the policy returned as its state the last time; plain values, and it may be lost.
    last_scale_up_time, last_scale_down_time : float or None
        When the wanted number changed last, on the clock of ``current_time``.
    idle_since : float or None
        Since when nothing runs and nothing waits; None if something does.
    latency_bounds_s : sequence of float
        The upper bounds of the buckets in which samples count latencies.
    raw_metrics : mapping
        The newest values of the backend's own metrics, by name and running replica; one that is too old is
        left out.
    aggregated_metrics : mapping
        The same, each over the time of the samples by the config's ``aggregation_function``.
    bounds : Bounds or None
        Between which numbers the answer will be held; None for those of the config.
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
    latency_bounds_s: Sequence[float] = ()
    raw_metrics: Mapping[str, Mapping[ReplicaTag, float]] = field(default_factory=dict)
    aggregated_metrics: Mapping[str, Mapping[ReplicaTag, float]] = field(default_factory=dict)
    bounds: Bounds | None = None

    @property
    def total_running_requests(self) -> float:
        """Requests that run, on average over the samples."""
        return math.fsum(each.ongoing for each in self.samples) / (len(self.samples) or 1)

    @property
    def total_queued_requests(self) -> float:
        """Requests that wait, on average over the samples."""
        return math.fsum(each.queued for each in self.samples) / (len(self.samples) or 1)

    @property
    def total_num_requests(self) -> float:
        """Requests that run or wait, on average over the samples."""
        return self.total_running_requests + self.total_queued_requests

    @property
    def min_replicas(self) -> int:
        """The fewest replicas that are allowed now, at the target capacity of the instance."""
        return (self.bounds or Bounds.of(self.config)).least

    @property
    def max_replicas(self) -> int:
        """The most replicas that are allowed now, at the target capacity of the instance."""
        return (self.bounds or Bounds.of(self.config)).most

    @property
    def capacity_adjusted_min_replicas(self) -> int:
        """The same as ``min_replicas``."""
        return self.min_replicas

    @property
    def capacity_adjusted_max_replicas(self) -> int:
        """The same as ``max_replicas``."""
        return self.max_replicas

    def whole_replicas(
        self, load: float, *, hysteresis: float | None = None, uncertainty: float = 0.0
    ) -> int:
        """Return ``load``, in replicas, as the number to have; the one there is if that is nearly right.

        Loads that waver about a whole number would otherwise ask for one more and one less in turn. The
        config's factors are applied as well: how much of a change to make at a time.

        Parameters
        ----------
        load : float
            How many replicas the load would keep exactly as busy as they should be.
        hysteresis : float, optional
            The share by which the load may pass the number there is, either way; None for the config's.
        uncertainty : float
            By how many replicas the load may be wrong; it may pass the number by so much more.
        """
        now = self.target_num_replicas
        if now <= 0:
            return math.ceil(load - ROUNDING)
        band = 1 + (self.config.hysteresis if hysteresis is None else hysteresis)
        if load > now:
            if load <= now * band + uncertainty + ROUNDING:
                return now
            return math.ceil(now + self.config.up_factor * (load - now) - ROUNDING)
        if math.ceil(load * band + uncertainty - ROUNDING) >= now:
            return now
        fewer = math.ceil(now + self.config.down_factor * (load - now) - ROUNDING)
        return max(0, min(fewer, now - 1))  # a factor above 1 may go below nothing


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas a policy wants, before the bounds are applied, and why, for people to read.

    Attributes
    ----------
    is_urgent : bool
        Go up without waiting for ``upscale_delay_s``.
    """

    replicas: int
    reason: str
    state: Mapping[str, Any] = field(default_factory=dict)
    is_urgent: bool = False


Policy: TypeAlias = Callable[[AutoscalingContext], Decision]
#: What users may write: a number of replicas, with the new state or without, or a whole `Decision`.
CustomPolicy: TypeAlias = Callable[..., Any] | Callable[..., Awaitable[Any]]
