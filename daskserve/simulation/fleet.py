"""Replicas that start, run and go while an autoscaler looks at them, over a whole trace."""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from daskserve.autoscaling.autoscaler import Autoscaler, ScalingStep
from daskserve.autoscaling.context import Sample
from daskserve.clock import seeded_rng
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.bounds import Bounds
from daskserve.simulation.events import EventQueue
from daskserve.simulation.queueing import FluidQueue, Limits, Queue
from daskserve.simulation.trace import Trace

TICK_S = 1.0
#: Upper bounds of the buckets that policies see latencies in.
LATENCY_BOUNDS_S: Sequence[float] = tuple(
    base * 10**power for power in range(-4, 2) for base in (1, 2.5, 5) if base * 10**power <= 60
)
#: In so many equal parts is the distribution of durations put on top of waits.
PARTS = 100
#: The same for what policies see, each second.
COARSE_PARTS = 20


@dataclass(frozen=True, slots=True)
class Service:
    """What one replica does.

    Attributes
    ----------
    concurrency : int
        How many requests it runs at a time.
    duration_s : float
        How long one takes on average, where the trace does not say.
    duration_cv : float
        Their standard deviation by their mean: 0 for all the same, 1 for exponential ones.
    start_up_s : float
        From the decision until it runs.
    limits : Limits
        Of the queue before the replicas.
    """

    concurrency: int = 8
    duration_s: float = 0.1
    duration_cv: float = 1.0
    start_up_s: float = 10.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        wrong = None
        if self.concurrency < 1:
            wrong = f"concurrency is {self.concurrency}; a replica runs 1 request at least"
        elif not 0 < self.duration_s < math.inf:
            wrong = f"duration_s is {self.duration_s}; give seconds above 0"
        elif not 0 <= self.duration_cv < math.inf:
            wrong = f"duration_cv is {self.duration_cv}; give 0 or more"
        elif not 0 <= self.start_up_s < math.inf:
            wrong = f"start_up_s is {self.start_up_s}; give seconds, 0 or more"
        elif self.limits.max_queued < 0 or not self.limits.deadline_s > 0:
            wrong = "max_queued cannot be negative, and deadline_s has to be above 0"
        if wrong is not None:
            raise ValueError(wrong)


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the wanted number."""

    at: float
    before: int
    after: int
    reason: str


@dataclass(slots=True)
class History:
    """What was seen at the end of every tick, and every change."""

    running: array[float] = field(default_factory=lambda: array("d"))
    target: array[float] = field(default_factory=lambda: array("d"))
    queued: array[float] = field(default_factory=lambda: array("d"))
    wait_s: array[float] = field(default_factory=lambda: array("d"))
    changes: list[Change] = field(default_factory=list)
    replica_seconds: float = 0.0


class Fleet:
    """The replicas of one backend. Which ones are given up first: those that do not run yet."""

    def __init__(self, replicas: int, start_up_s: float) -> None:
        self.target = replicas
        self.running = replicas
        self._start_up_s = start_up_s
        self._ready_at: list[float] = []

    @property
    def existing(self) -> int:
        """How many run or start: what is paid for."""
        return self.running + len(self._ready_at)

    def scale(self, target: int, now: float) -> None:
        """Begin or give up replicas until so many are there or on their way."""
        self.target = target
        self._ready_at += [now + self._start_up_s] * (target - self.existing)
        while self.existing > target and self._ready_at:
            self._ready_at.pop()
        self.running = min(self.running, target)

    def advance(self, now: float) -> None:
        """Let run what is ready by now."""
        while self._ready_at and self._ready_at[0] <= now:
            self._ready_at.pop(0)
            self.running += 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy made of a trace."""

    name: str
    trace: Trace
    history: History
    queue: Queue
    service: Service
    duration_cv: float

    @property
    def replica_hours(self) -> float:
        """What was paid for."""
        return self.history.replica_seconds / 3600

    def wait_quantile_s(self, share: float) -> float:
        """Return how long so many of those who began had waited, at most."""
        return _quantile(self.queue.tally.waits_ms, share)

    def latency_quantile_s(self, share: float) -> float:
        """Return how long so many took, wait and work together, at most."""
        parts = duration_parts_s(self.trace.mean_duration_s or self.service.duration_s, self.duration_cv)
        found: dict[int, float] = {}
        for wait_ms, count in self.queue.tally.waits_ms.items():
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
) -> Outcome:
    """Return what the autoscaler of ``config`` makes of ``trace``.

    Parameters
    ----------
    make : callable, optional
        Makes the autoscaler, if it is to differ from the controller's.
    is_exact : bool
        Simulate request by request instead of as a fluid.
    wall_offset_s : float
        What to add to the trace's timestamps for the time of day, which schedules go by.
    rng : random.Random, optional
        What chance there is; without one every run is the same.
    """
    rng = seeded_rng(0) if rng is None else rng
    cv = service.duration_cv if trace.duration_cv is None else trace.duration_cv
    queue: Queue
    if is_exact:
        queue = EventQueue(service.limits, rng, duration_cv=cv)
    else:
        queue = FluidQueue(service.limits, duration_cv=cv)
    scaler = _autoscaler(config) if make is None else make(config)
    run = _Run(trace, config, service, queue, scaler, rng, cv, wall_offset_s)
    for second in range(len(trace.counts)):
        run.tick(second)
    return Outcome(name or str(config.policy), trace, run.history, queue, service, cv)


def _autoscaler(config: AutoscalingConfig) -> Autoscaler:
    if config.group is not None:
        raise ValueError(
            f"group={config.group!r} cannot be simulated, as one backend is alone here; leave it out, and "
            "give a policy of one context"
        )
    return Autoscaler("simulated", config, latency_bounds_s=LATENCY_BOUNDS_S)


class _Run:
    """One simulation on its way."""

    def __init__(
        self,
        trace: Trace,
        config: AutoscalingConfig,
        service: Service,
        queue: Queue,
        scaler: Autoscaler,
        rng: random.Random,
        cv: float,
        wall_offset_s: float,
    ) -> None:
        self.history = History()
        self._trace = trace
        self._service = service
        self._queue = queue
        self._scaler = scaler
        self._rng = rng
        self._parts_s = duration_parts_s(1.0, cv, COARSE_PARTS)
        self._wall_s = trace.starts_at + wall_offset_s
        self._fleet = Fleet(Bounds.of(config).first, service.start_up_s)
        self._interval_s = config.metrics_interval_s
        self._is_noisy = isinstance(queue, FluidQueue)
        # Most policies do not look at latencies, and to count them takes as long as all the rest.
        self._counts_latencies = config.policy not in ("target_ongoing_requests", "classic", "promql")
        self._looked_at = 0.0
        self._completed = 0.0

    def tick(self, second: int) -> None:
        """Let one second pass, then look, if it is time to."""
        now, fleet, queue = second * TICK_S, self._fleet, self._queue
        fleet.advance(now)
        durations = self._trace.durations_s
        duration_s = max(durations[second] if durations else self._service.duration_s, 1e-6)
        slots = fleet.running * self._service.concurrency
        queue.advance(now, TICK_S, self._trace.counts[second], slots, duration_s)
        history = self.history
        history.replica_seconds += fleet.existing * TICK_S
        history.running.append(fleet.running)
        history.target.append(fleet.target)
        history.queued.append(queue.queued)
        history.wait_s.append(queue.tally.last_wait_s)
        end = now + TICK_S
        # The first request for a backend without replicas is told to the controller at once.
        is_first = fleet.target == 0 and queue.queued > 0
        if end - self._looked_at >= self._interval_s - 1e-9 or is_first:
            self._look(end, slots, duration_s)

    def _look(self, now: float, slots: int, duration_s: float) -> None:
        queue, fleet = self._queue, self._fleet
        ended = queue.tally.completed - self._completed
        rate = ended / (now - self._looked_at)
        self._completed, self._looked_at = queue.tally.completed, now
        ongoing = queue.ongoing
        if self._is_noisy and 0 < ongoing < slots:
            # A look finds as many as just happen to run.
            ongoing = min(slots, max(0.0, self._rng.gauss(ongoing, math.sqrt(ongoing))))
        counts: Sequence[int] = ()
        if self._counts_latencies and ended > 0:
            counts = latency_counts(queue.tally.last_wait_s, ended, duration_s, self._parts_s)
        self._scaler.observe(Sample(now, ongoing, queue.queued, rate, counts))
        step: ScalingStep = self._scaler.step(
            now=now, wall=self._wall_s + now, current=fleet.running, target=fleet.target
        )
        if step.replicas != fleet.target:
            self.history.changes.append(Change(now, fleet.target, step.replicas, step.reason))
            fleet.scale(step.replicas, now)


def duration_parts_s(mean_s: float, cv: float, parts: int = PARTS) -> list[float]:
    """Return the durations of equal parts of the requests: a gamma distribution, by Wilson and Hilferty."""
    shape = 1 / max(cv, 1e-3) ** 2
    found = []
    for part in range(parts):
        normal = NormalDist().inv_cdf((part + 0.5) / parts)
        root = 1 - 1 / (9 * shape) + normal / math.sqrt(9 * shape)
        found.append(mean_s * max(0.0, root) ** 3)
    scale = mean_s * parts / (math.fsum(found) or 1.0)
    return [value * scale for value in found]


def latency_counts(wait_s: float, ended: float, duration_s: float, parts_s: Sequence[float]) -> list[int]:
    """Return how many of those that ended took how long, by `LATENCY_BOUNDS_S`; the parts ascend."""
    counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
    # Bounds between the shortest and the longest are few, and there is a look for each second of a day.
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
