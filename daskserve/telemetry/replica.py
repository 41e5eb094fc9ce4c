"""The counters of a replica and the samples that it exports."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from daskserve.common.formatting import counted
from daskserve.common.types import Load, ReplicaTag
from daskserve.errors import ReplicaBusyError
from daskserve.telemetry.histogram import (
    LIFE_BUCKETS_S,
    SHARE_BUCKETS,
    SIZE_BUCKETS,
    HistogramCounts,
    LatencyHistogram,
)
from daskserve.telemetry.table import MetricSample
from daskserve.telemetry.user import UserMetrics, UserSample


class QueueLengths:
    """The lengths of queues of user code, each while its queue exists."""

    __slots__ = ("_lengths",)

    def __init__(self) -> None:
        self._lengths: list[weakref.WeakMethod[Callable[[], int]]] = []

    def watch(self, length: Callable[[], int]) -> None:
        """Include a queue; ``length`` is a method of it. Any thread may call this, and the method."""
        self._lengths.append(weakref.WeakMethod(length, self._lengths.remove))

    def total(self) -> int:
        """Return the sum of the lengths."""
        lengths = [each() for each in list(self._lengths)]
        return sum(length() for length in lengths if length is not None)


class BatchMetrics:
    """One method's batches: their sizes and durations, and the queue and the waiting times of their items."""

    __slots__ = ("_queues", "durations", "shares", "sizes", "waits")

    def __init__(self) -> None:
        self._queues = QueueLengths()
        self.sizes = HistogramCounts(SIZE_BUCKETS)
        self.shares = HistogramCounts(SHARE_BUCKETS)
        self.waits = LatencyHistogram()
        self.durations = LatencyHistogram()

    def observe(self, waits_s: Sequence[float], max_size: int = 0) -> None:
        """Count one batch, given the waiting times of its items and the maximum batch size."""
        self.sizes.observe(len(waits_s))
        if max_size:
            self.shares.observe(min(1.0, len(waits_s) / max_size))
        self.waits.observe_all(waits_s)

    def ended(self, took_s: float) -> None:
        """Count how long a batch ran."""
        self.durations.observe(took_s)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Include a queue in the queue length; see `QueueLengths.watch`."""
        self._queues.watch(length)

    def queued(self) -> int:
        """Return how many items wait for their batch."""
        return self._queues.total()


class StepMetrics:
    """The steps of one method's continuous batches, their outputs, and how often a request was preempted."""

    __slots__ = ("_loads", "durations", "outputs", "preemptions")

    def __init__(self) -> None:
        self.durations = LatencyHistogram()
        self.outputs = 0
        self.preemptions = 0
        self._loads: list[weakref.WeakMethod[Callable[[], Sequence[float]]]] = []

    def watch(self, load: Callable[[], Sequence[float]]) -> None:
        """Include a batch while it exists: its active and queued requests, their queued cost, and its slots.

        ``load`` is a method of the batch, which any thread may call.
        """
        self._loads.append(weakref.WeakMethod(load, self._loads.remove))

    def load(self) -> Sequence[float]:
        """Return the sums over all batches."""
        loads = [each() for each in list(self._loads)]
        totals = [load() for load in loads if load is not None]
        return [sum(each) for each in zip((0, 0, 0.0, 0), *totals, strict=True)]


class ReplicaMetrics:
    """The counters of a replica's requests."""

    __slots__ = (
        "batches",
        "cancelled",
        "failed",
        "handled",
        "latency",
        "probes",
        "reconfigurations",
        "refused",
        "shutdowns",
        "start_failures",
        "started_at",
        "startup_s",
        "steps",
        "timed_out",
        "user",
        "user_queues",
    )

    def __init__(self) -> None:
        #: Requests that began.
        self.handled = 0
        #: Requests that user code answered with an error.
        self.failed = 0
        #: Requests that arrived while every slot was taken.
        self.refused = 0
        #: Requests that were cancelled by their callers or at their deadline.
        self.cancelled = 0
        #: Requests that were cancelled at their deadline.
        self.timed_out = 0
        self.latency = LatencyHistogram()
        self.batches: dict[str, BatchMetrics] = {}
        #: The continuous batches, by method.
        self.steps: dict[str, StepMetrics] = {}
        #: When the replica's start was complete, in seconds since the epoch, and how long it took; 0 until
        #: then.
        self.started_at = self.startup_s = 0.0
        self.start_failures = 0
        #: The durations of health checks, reconfigurations and shutdowns.
        self.probes = LatencyHistogram()
        self.reconfigurations = HistogramCounts(LIFE_BUCKETS_S)
        self.shutdowns = HistogramCounts(LIFE_BUCKETS_S)
        #: The metrics of user code.
        self.user = UserMetrics()
        #: The queues of batched methods.
        self.user_queues = QueueLengths()

    def batches_of(self, method: str) -> BatchMetrics:
        """Return the counters of one method's batches, created on first use; any thread may call this."""
        return self.batches.get(method) or self.batches.setdefault(method, BatchMetrics())

    def steps_of(self, method: str) -> StepMetrics:
        """Return the counters of one method's continuous batches; see `batches_of`."""
        return self.steps.get(method) or self.steps.setdefault(method, StepMetrics())

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Include a queue of user code in the queue length; see `QueueLengths.watch`."""
        self.user_queues.watch(length)

    def record_start(self, took_s: float, wall_time: float) -> None:
        """Record that the replica has started."""
        self.startup_s, self.started_at = took_s, wall_time

    def refusal(self, replica_tag: ReplicaTag, ongoing: int) -> ReplicaBusyError:
        """Count a request that found no free slot in time, and return the error to raise."""
        self.refused += 1
        return ReplicaBusyError(
            f"Replica {replica_tag!r} runs {counted(ongoing, 'request')} already.", ongoing=ongoing
        )

    def give_up(self, *, is_late: bool) -> None:
        """Count a cancelled request; ``is_late`` if its deadline had passed."""
        self.cancelled += 1
        self.timed_out += is_late

    def plain(self) -> dict[str, Any]:
        """Return the counters as plain values."""
        return {
            "handled_total": self.handled,
            "failed_total": self.failed,
            "refused_total": self.refused,
            "cancelled_total": self.cancelled,
            "timed_out_total": self.timed_out,
            "latency_counts": list(self.latency.counts),
            "latency_sum_s": self.latency.sum,
            **({"continuous": self.continuous()} if self.steps else {}),
        }

    def brief(self, load: Callable[[], Load], more: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the running and ended requests, their latencies and the values of ``more`` as plain values.

        The queues of continuous batches are also custom metrics, unless user code has metrics of these names.
        """
        current = load()
        found = more()
        if self.steps:
            found["continuous"] = steps = self.continuous()
            own = {
                "continuous_queued_requests": steps["queued"],
                "continuous_queued_cost": steps["queued_cost"],
            }
            found["custom"] = {**own, **found.get("custom", {})}
        return {
            "ongoing": current.ongoing,
            "queued": current.queued,
            "ended": self.handled - current.ongoing,
            "failed": self.failed,
            "latency_counts": list(self.latency.counts),
            **found,
        }

    def continuous(self) -> dict[str, Any]:
        """Return the load of the continuous batches of all methods, and their number of outputs."""
        steps = list(self.steps.values())
        active, queued, cost, slots = map(sum, zip(*(each.load() for each in steps), strict=True))
        outputs = sum(each.outputs for each in steps)
        return {"active": active, "slots": slots, "queued": queued, "queued_cost": cost, "outputs": outputs}

    def samples(self, labels: tuple[str, str, str]) -> list[MetricSample]:
        """Return all samples except user metrics; ``labels`` are instance, deployment and replica."""
        deployment = labels[:2]
        found: list[MetricSample] = [
            ("deployment_requests", deployment, self.handled),
            ("deployment_errors", deployment, self.failed),
            ("deployment_cancellations", deployment, self.cancelled),
            ("deployment_timeouts", deployment, self.timed_out),
            ("deployment_rejections", deployment, self.refused),
            ("deployment_request_duration_seconds", deployment, self.latency),
            ("deployment_replica_start_failures", deployment, self.start_failures),
            ("deployment_replica_starts", deployment, int(self.started_at > 0)),
        ]
        if self.started_at:
            startup = HistogramCounts(LIFE_BUCKETS_S)
            startup.observe(self.startup_s)
            found += [
                ("deployment_replica_startup_seconds", deployment, startup),
                ("deployment_replica_shutdown_seconds", deployment, self.shutdowns),
                ("deployment_reconfigure_seconds", deployment, self.reconfigurations),
                ("deployment_health_check_seconds", deployment, self.probes),
                ("replica_requests", labels, self.handled),
                ("replica_errors", labels, self.failed),
                ("replica_request_duration_seconds", labels, self.latency),
                ("replica_start_time_seconds", labels, self.started_at),
                ("replica_startup_duration_seconds", labels, self.startup_s),
            ]
        for method, each in list(self.batches.items()):
            by_method = (*deployment, method)
            found += [
                ("batch_size", by_method, each.sizes),
                ("batch_wait_seconds", by_method, each.waits),
                ("batch_duration_seconds", by_method, each.durations),
                ("batch_utilization_ratio", by_method, each.shares),
            ]
        for method, steps in list(self.steps.items()):
            by_method = (*deployment, method)
            found += [
                ("continuous_step_duration_seconds", by_method, steps.durations),
                ("continuous_outputs", by_method, steps.outputs),
                ("continuous_preemptions", by_method, steps.preemptions),
            ]
        return found

    def states(
        self,
        labels: tuple[str, str, str],
        *,
        load: Load,
        concurrency: int,
        abandoned: int,
        loop_blocks: int,
        probe_failures: int,
        is_healthy: bool,
    ) -> list[MetricSample]:
        """Return the samples of state that other objects keep; before the replica runs, only counters."""
        deployment = labels[:2]
        counts: list[MetricSample] = [
            ("deployment_loop_blocks", deployment, loop_blocks),
            ("deployment_health_check_failures", deployment, probe_failures),
        ]
        if not self.started_at:
            return counts
        for method, batches in list(self.batches.items()):
            counts.append(("batch_queued_items", (*labels, method), batches.queued()))
        for method, steps in list(self.steps.items()):
            active, queued, cost, _ = steps.load()
            counts.append(("continuous_active_requests", (*labels, method), active))
            counts.append(("continuous_queued_requests", (*labels, method), queued))
            counts.append(("continuous_queued_cost", (*labels, method), cost))
        return [
            *counts,
            ("replica_ongoing_requests", labels, load.ongoing),
            ("replica_queued_requests", labels, load.queued + self.user_queues.total()),
            ("replica_abandoned_requests", labels, abandoned),
            ("replica_max_ongoing_requests", labels, concurrency),
            ("replica_healthy", labels, int(is_healthy)),
        ]

    def user_samples(self, labels: tuple[str, str, str]) -> list[UserSample]:
        """Return the samples of user metrics; for ``labels``, see `samples`."""
        return self.user.samples(*zip(("serve_instance", "deployment", "replica"), labels, strict=True))
