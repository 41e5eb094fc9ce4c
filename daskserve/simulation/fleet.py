"""Simulate the replicas of a backend and its autoscaler over a whole trace."""

from __future__ import annotations

import logging
import math
import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from daskserve.autoscaling.autoscaler import Autoscaler, ScalingStep
from daskserve.autoscaling.context import Sample
from daskserve.common.clock import seeded_rng
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.simulation.events import EventQueue
from daskserve.simulation.queueing import FluidQueue, QueueLimits, SimulatedQueue
from daskserve.simulation.trace import Trace

TICK_S = 1.0
#: Upper bounds of the latency buckets in samples.
LATENCY_BOUNDS_S: Sequence[float] = tuple(
    base * 10**power for power in range(-4, 2) for base in (1, 2.5, 5) if base * 10**power <= 60
)
#: Number of equal parts into which the distribution of durations is split when it is added to waits.
PARTS = 100
#: Number of parts for the samples that policies receive each second.
COARSE_PARTS = 20

logger = logging.getLogger("daskserve.autoscaling")


@dataclass(frozen=True, slots=True)
class Service:
    """The behaviour of one replica.

    Attributes
    ----------
    concurrency : int
        Maximum number of concurrent requests.
    duration_s : float
        Mean duration of a request, if the trace has no durations.
    duration_cv : float
        Coefficient of variation of durations (standard deviation divided by mean), if the trace has none: 0
        for constant durations, 1 for exponential ones.
    start_up_s : float
        Time from the decision until the replica runs.
    limits : QueueLimits
        Limits of the queue in front of the replicas.
    """

    concurrency: int = 8
    duration_s: float = 0.1
    duration_cv: float = 1.0
    start_up_s: float = 10.0
    limits: QueueLimits = field(default_factory=QueueLimits)

    def __post_init__(self) -> None:
        wrong = None
        if self.concurrency < 1:
            wrong = f"concurrency is {self.concurrency}; give 1 or more"
        elif not 0 < self.duration_s < math.inf:
            wrong = f"duration_s is {self.duration_s}; give seconds above 0"
        elif not 0 <= self.duration_cv < math.inf:
            wrong = f"duration_cv is {self.duration_cv}; give 0 or more"
        elif not 0 <= self.start_up_s < math.inf:
            wrong = f"start_up_s is {self.start_up_s}; give seconds, 0 or more"
        elif not self.limits.max_queued >= 0 or not self.limits.deadline_s > 0:
            wrong = (
                f"max_queued is {self.limits.max_queued} and deadline_s is {self.limits.deadline_s}; give 0 "
                "or more, and a number above 0"
            )
        if wrong is not None:
            raise ValueError(wrong)


@dataclass(frozen=True, slots=True)
class TargetChange:
    """One change of the target number of replicas."""

    at: float
    before: int
    after: int
    reason: str


@dataclass(slots=True)
class FleetHistory:
    """The state at the end of every tick, and all changes."""

    running: array[float] = field(default_factory=lambda: array("d"))
    target: array[float] = field(default_factory=lambda: array("d"))
    queued: array[float] = field(default_factory=lambda: array("d"))
    wait_s: array[float] = field(default_factory=lambda: array("d"))
    changes: list[TargetChange] = field(default_factory=list)
    replica_seconds: float = 0.0


class Fleet:
    """The replicas of one backend. Scaling down first stops replicas that are starting, then running ones."""

    def __init__(self, replicas: int, start_up_s: float) -> None:
        self.target = replicas
        self.running = replicas
        self._start_up_s = start_up_s
        self._ready_at: list[float] = []

    @property
    def existing(self) -> int:
        """The number of running and starting replicas, all of which count as costs."""
        return self.running + len(self._ready_at)

    def scale(self, target: int, now: float) -> None:
        """Start or stop replicas until ``target`` of them run or start."""
        self.target = target
        self._ready_at += [now + self._start_up_s] * (target - self.existing)
        while self.existing > target and self._ready_at:
            self._ready_at.pop()
        self.running = min(self.running, target)

    def advance(self, now: float) -> None:
        """Mark the replicas that have started by ``now`` as running."""
        while self._ready_at and self._ready_at[0] <= now:
            self._ready_at.pop(0)
            self.running += 1


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of simulating a policy on a trace."""

    name: str
    trace: Trace
    history: FleetHistory
    queue: SimulatedQueue
    service: Service
    duration_cv: float

    @property
    def replica_hours(self) -> float:
        """The sum of the lifetimes of all replicas, in hours."""
        return self.history.replica_seconds / 3600

    def wait_quantile_s(self, share: float) -> float:
        """Return a quantile of the waiting times of requests that began."""
        return _quantile(self.queue.request_counts.waits_ms, share)

    def latency_quantile_s(self, share: float) -> float:
        """Return a quantile of latencies, which are waiting time plus duration."""
        parts = duration_parts_s(self.trace.mean_duration_s or self.service.duration_s, self.duration_cv)
        found: dict[int, float] = {}
        for wait_ms, count in self.queue.request_counts.waits_ms.items():
            for part_s in parts:
                key = wait_ms + round(1000 * part_s)
                found[key] = found.get(key, 0.0) + count / PARTS
        return _quantile(found, share)


def simulate(
    trace: Trace,
    config: AutoscalingConfig,
    service: Service,
    *,
    name: str = "",
    make: Callable[[AutoscalingConfig], Autoscaler] | None = None,
    is_exact: bool = False,
    wall_offset_s: float = 0.0,
    rng: random.Random | None = None,
) -> SimulationResult:
    """Simulate the autoscaler of ``config`` on ``trace``.

    Parameters
    ----------
    make : callable, optional
        Makes an autoscaler that differs from the controller's.
    is_exact : bool
        Whether to simulate single requests instead of a fluid.
    wall_offset_s : float
        Offset from the trace's timestamps to seconds since the epoch, for schedules.
    rng : random.Random, optional
        Source of randomness; by default, one with a fixed seed.
    """
    rng = seeded_rng(0) if rng is None else rng
    cv = service.duration_cv if trace.duration_cv is None else trace.duration_cv
    queue: SimulatedQueue
    if is_exact:
        queue = EventQueue(service.limits, rng, duration_cv=cv)
    else:
        queue = FluidQueue(service.limits, duration_cv=cv)
    scaler = _autoscaler(config) if make is None else make(config)
    fleet = Fleet(config.bounds().first, service.start_up_s)
    parts_s = duration_parts_s(1.0, cv, COARSE_PARTS)
    run = _Run(trace, config, service, queue, scaler, fleet, rng, parts_s, trace.starts_at + wall_offset_s)
    for second in range(len(trace.counts)):
        run.tick(second)
    return SimulationResult(name or str(config.policy), trace, run.history, queue, service, cv)


def _autoscaler(config: AutoscalingConfig) -> Autoscaler:
    if config.group is not None:
        raise ValueError(
            f"group={config.group!r} cannot be simulated, because the simulation has one deployment; omit "
            "group and give a policy that takes one context"
        )
    return Autoscaler("simulated", config, latency_bounds_s=LATENCY_BOUNDS_S)


@dataclass(slots=True)
class _Run:
    """A running simulation."""

    trace: Trace
    config: AutoscalingConfig
    service: Service
    queue: SimulatedQueue
    scaler: Autoscaler
    fleet: Fleet
    rng: random.Random
    parts_s: Sequence[float]
    #: Seconds since the epoch at the start of the trace.
    wall_s: float
    history: FleetHistory = field(default_factory=FleetHistory)
    looked_at: float = 0.0
    completed: float = 0.0
    #: The policy's last error; a lasting error is logged once.
    failure: str = ""

    @property
    def counts_latencies(self) -> bool:
        # Counting latencies takes as long as everything else, and most policies do not read them.
        return self.config.policy not in ("target_ongoing_requests", "classic", "promql")

    def tick(self, second: int) -> None:
        """Simulate one second, then run the autoscaler if it is due."""
        now, fleet, queue = second * TICK_S, self.fleet, self.queue
        fleet.advance(now)
        durations = self.trace.durations_s
        duration_s = max(durations[second] if durations else self.service.duration_s, 1e-6)
        slots = fleet.running * self.service.concurrency
        queue.advance(now, TICK_S, self.trace.counts[second], slots, duration_s)
        history = self.history
        history.replica_seconds += fleet.existing * TICK_S
        history.running.append(fleet.running)
        history.target.append(fleet.target)
        history.queued.append(queue.queued)
        history.wait_s.append(queue.request_counts.last_wait_s)
        end = now + TICK_S
        # The first request for a backend without replicas is reported to the controller at once.
        is_first = fleet.target == 0 and queue.queued > 0
        if end - self.looked_at >= self.config.metrics_interval_s - 1e-9 or is_first:
            self._check(end, slots, duration_s)

    def _check(self, now: float, slots: int, duration_s: float) -> None:
        queue, fleet = self.queue, self.fleet
        ended = queue.request_counts.completed - self.completed
        rate = ended / (now - self.looked_at)
        self.completed, self.looked_at = queue.request_counts.completed, now
        ongoing = queue.ongoing
        if isinstance(queue, FluidQueue) and 0 < ongoing < slots:
            # A sample contains the number of requests that happen to run at its time.
            ongoing = min(slots, max(0.0, self.rng.gauss(ongoing, math.sqrt(ongoing))))
        counts: Sequence[int] = ()
        if self.counts_latencies and ended > 0:
            counts = latency_counts(queue.request_counts.last_wait_s, ended, duration_s, self.parts_s)
        self.scaler.observe(Sample(now, ongoing, queue.queued, rate, counts))
        step: ScalingStep = self.scaler.step(
            now=now, wall=self.wall_s + now, current=fleet.running, target=fleet.target
        )
        if step.error is not None and repr(step.error) != self.failure:
            logger.error("The autoscaling policy failed", exc_info=step.error)
        self.failure = repr(step.error)
        if step.replicas != fleet.target:
            self.history.changes.append(TargetChange(now, fleet.target, step.replicas, step.reason))
            fleet.scale(step.replicas, now)


def duration_parts_s(mean_s: float, cv: float, parts: int = PARTS) -> list[float]:
    """Return the durations of equal parts of a gamma distribution (Wilson-Hilferty approximation)."""
    shape = 1 / max(cv, 1e-3) ** 2
    found = []
    for part in range(parts):
        normal = NormalDist().inv_cdf((part + 0.5) / parts)
        root = 1 - 1 / (9 * shape) + normal / math.sqrt(9 * shape)
        found.append(mean_s * max(0.0, root) ** 3)
    scale = mean_s * parts / (math.fsum(found) or 1.0)
    return [value * scale for value in found]


def latency_counts(wait_s: float, ended: float, duration_s: float, parts_s: Sequence[float]) -> list[int]:
    """Return the number of ended requests in each bucket of `LATENCY_BOUNDS_S`; ``parts_s`` is ascending."""
    counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
    # Visit only the bounds between the shortest and the longest latency, because this runs for each second of
    # a day.
    shortest = bisect_left(LATENCY_BOUNDS_S, wait_s + parts_s[0] * duration_s)
    longest = bisect_left(LATENCY_BOUNDS_S, wait_s + parts_s[-1] * duration_s)
    each, before = ended / len(parts_s), 0
    for bucket in range(shortest, longest):
        below = bisect_right(parts_s, (LATENCY_BOUNDS_S[bucket] - wait_s) / duration_s)
        counts[bucket] = round((below - before) * each)
        before = below
    counts[longest] = round((len(parts_s) - before) * each)
    return counts


def _quantile(counts: dict[int, float], share: float) -> float:
    rank, below = share * math.fsum(counts.values()), 0.0
    for key in sorted(counts):
        below += counts[key]
        if below >= rank - 1e-9:
            return key / 1000
    return 0.0
