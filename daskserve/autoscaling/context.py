"""The types that autoscaling policies take and return; the options are in `AutoscalingConfig`.

A policy is a plain function of an `AutoscalingContext`. It reads no clock, does no I/O and remembers only the
state that it returned last time. The same function therefore runs in the controller, the simulator and tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from daskserve.common.types import BackendTag, ReplicaTag
from daskserve.options.fields.bounds import Bounds

if TYPE_CHECKING:
    from daskserve.options.autoscaling import AutoscalingConfig

#: Tolerance of delays: without it, a tick that is early by a rounding error would cost a whole interval.
TOLERANCE_S = 1e-6
#: Tolerance for floating-point sums: a rounding error must not add a replica.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Sample:
    """The load of a backend at one time, over all of its replicas and all routers.

    Attributes
    ----------
    at : float
        Time of the sample, in seconds on the clock of `AutoscalingContext.current_time`.
    ongoing : float
        Requests in flight in replicas.
    queued : float
        Requests waiting in routers for a replica.
    rate : float
        Requests per second that have ended since the previous sample.
    latency_counts : sequence of int
        How many of these requests fell into each bucket of `AutoscalingContext.latency_bounds_s`. The counts
        are not cumulative, and there is one more count than there are bounds.
    backlog : float or None
        Tasks waiting in the broker's queue of the policy ``queue``; None if the length is unknown.
    """

    at: float
    ongoing: float
    queued: float
    rate: float = 0.0
    latency_counts: Sequence[int] = ()
    backlog: float | None = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no request ran, waited or ended. Short requests may show up only in the rate."""
        return self.ongoing <= 0 and self.queued <= 0 and self.rate <= 0 and self.backlog == 0

    @property
    def has_demand(self) -> bool:
        """Whether any request or task runs or waits, so that at least one replica is needed."""
        return self.ongoing + self.queued + (self.backlog or 0.0) > 0


@dataclass(frozen=True, slots=True)
class AutoscalingContext:
    """The input of a policy.

    Attributes
    ----------
    name : str
        The backend's name.
    config : AutoscalingConfig
        The backend's autoscaling options.
    current_time : float
        Time in seconds, on a monotonic clock.
    wall_time : float
        Time in seconds since the epoch, for schedules.
    current_num_replicas, target_num_replicas : int
        The number of running replicas, and the current target.
    samples : sequence of Sample
        The samples of the look-back period, oldest first. Samples from before the last change of the target
        are dropped.
    replica_ongoing : mapping
        The number of requests in flight in each running replica, at the last sample.
    custom : mapping
        The custom metrics of the backend (``record_autoscaling_stats``), by name. Each value combines the
        ``aggregated_metrics`` of the replicas with the config's ``aggregation_function``.
    queries : mapping
        The newest values of the config's PromQL expressions, by name, without stale ones.
    state : mapping
        The state that the policy returned last time: plain values, which may be lost.
    last_scale_up_time, last_scale_down_time : float or None
        When the target last went up and down, on the clock of ``current_time``.
    idle_since : float or None
        When the backend became idle: no request runs or waits; None if it is not idle.
    latency_bounds_s : sequence of float
        The upper bounds of the latency buckets of the samples, in seconds.
    raw_metrics : mapping
        The newest values of the backend's custom metrics, by name and running replica, without stale ones.
    aggregated_metrics : mapping
        The same metrics, each aggregated over the samples with the config's ``aggregation_function``.
    bounds : Bounds or None
        The bounds that the result is clamped to; None for the config's.
    is_waking : bool
        Whether the target was 0 until recently, and no replica runs yet.
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
    is_waking: bool = False

    def is_idle_for(self, delay_s: float) -> bool:
        """Return whether the backend was idle for this time: no request ran, waited or ended."""
        since = self.idle_since
        return since is not None and self.current_time - since >= delay_s - TOLERANCE_S

    @property
    def may_go_to_zero(self) -> bool:
        """Whether zero replicas are allowed and the backend was idle for ``downscale_to_zero_delay_s``."""
        return self.min_replicas == 0 and self.is_idle_for(self.config.zero_delay_s)

    @property
    def total_running_requests(self) -> float:
        """Number of running requests, averaged over the samples."""
        return math.fsum(each.ongoing for each in self.samples) / (len(self.samples) or 1)

    @property
    def total_queued_requests(self) -> float:
        """Number of queued requests, averaged over the samples."""
        return math.fsum(each.queued for each in self.samples) / (len(self.samples) or 1)

    @property
    def total_num_requests(self) -> float:
        """Number of running plus queued requests, averaged over the samples."""
        return self.total_running_requests + self.total_queued_requests

    @property
    def min_replicas(self) -> int:
        """Minimum number of replicas at the current target capacity of the instance."""
        return (self.bounds or self.config.bounds()).least

    @property
    def max_replicas(self) -> int:
        """Maximum number of replicas at the current target capacity of the instance."""
        return (self.bounds or self.config.bounds()).most

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
        """Round ``load`` to a whole number of replicas; return the current target if it is close enough.

        Without this tolerance, a load that varies around a whole number would alternately add and remove a
        replica. The config's smoothing factors are applied as well.

        Parameters
        ----------
        load : float
            The load divided by its target per replica.
        hysteresis : float, optional
            The share by which the load may differ from the current target; None for the config's.
        uncertainty : float
            The error of the load, in replicas, which widens the tolerance.
        """
        now = self.target_num_replicas
        if now <= 0 or (self.is_waking and load > now):
            return math.ceil(load - ROUNDING)
        band = 1 + (self.config.hysteresis if hysteresis is None else hysteresis)
        if load > now:
            if load <= now * band + uncertainty + ROUNDING:
                return now
            return math.ceil(now + self.config.up_factor * (load - now) - ROUNDING)
        if math.ceil(load * band + uncertainty - ROUNDING) >= now:
            return now
        fewer = math.ceil(now + self.config.down_factor * (load - now) - ROUNDING)
        return max(0, min(fewer, now - 1))  # a factor above 1 may give a negative number


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's result: how many replicas it wants, and why.

    Attributes
    ----------
    replicas : int
        The number of replicas, before the bounds are applied.
    reason : str
        A human-readable explanation.
    state : mapping
        Plain values that the policy receives next time as `AutoscalingContext.state`.
    is_urgent : bool
        Whether to scale up without waiting for ``upscale_delay_s``.
    """

    replicas: int
    reason: str
    state: Mapping[str, Any] = field(default_factory=dict)
    is_urgent: bool = False


Policy: TypeAlias = Callable[[AutoscalingContext], Decision]
#: A policy as users write it: a plain or async function that returns a number of replicas, a tuple of the
#: number and the state, or a `Decision`.
CustomPolicy: TypeAlias = Callable[..., Any]
