"""What a replica counts, and what the samples of that are called."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from daskserve.errors import ReplicaBusyError
from daskserve.figures.histogram import SIZE_BUCKETS, Histogram, LatencyHistogram
from daskserve.figures.table import Sample
from daskserve.figures.user import UserFigures, UserSample
from daskserve.types import Load, ReplicaTag


class MeteredQueue(Protocol):
    """What is asked of a queue that user code calls into."""

    @property
    def queued(self) -> int:
        """How many calls wait; may be asked from any thread."""


class BatchFigures:
    """How large the batches of one method were, and how long their items waited."""

    __slots__ = ("sizes", "waits")

    def __init__(self) -> None:
        self.sizes = Histogram(SIZE_BUCKETS)
        self.waits = LatencyHistogram()

    def observe(self, waits_s: Sequence[float]) -> None:
        """Count one batch by how long each of its items waited for it."""
        self.sizes.observe(len(waits_s))
        for wait_s in waits_s:
            self.waits.observe(wait_s)


class ReplicaFigures:
    """What a replica counts of its requests; those that ended badly are counted in one place each."""

    __slots__ = (
        "batches",
        "cancelled",
        "failed",
        "handled",
        "latency",
        "refused",
        "start_failures",
        "started_at",
        "startup_s",
        "timed_out",
        "user",
        "user_queues",
    )

    def __init__(self) -> None:
        #: Requests that were begun.
        self.handled = 0
        #: Requests that user code answered with an error.
        self.failed = 0
        #: Requests that came while every slot was taken.
        self.refused = 0
        #: Requests that were given up by their callers or at their deadline.
        self.cancelled = 0
        #: Those of them that were given up at their deadline.
        self.timed_out = 0
        self.latency = LatencyHistogram()
        self.batches: dict[str, BatchFigures] = {}
        #: When it was up, in seconds since the epoch, and how long that took; 0 until then.
        self.started_at = self.startup_s = 0.0
        self.start_failures = 0
        #: What user code measures by itself.
        self.user = UserFigures()
        #: Where its calls of methods wait, by id; a queue that is dropped is gone from here as well.
        self.user_queues: weakref.WeakValueDictionary[int, MeteredQueue] = weakref.WeakValueDictionary()

    def batches_of(self, method: str) -> BatchFigures:
        """Return the figures of one method's batches, made on first use; from any thread."""
        found = self.batches.get(method)
        if found is None:
            found = self.batches.setdefault(method, BatchFigures())
        return found

    def watch_queue(self, queue: MeteredQueue) -> None:
        """Count what waits in a queue of user code's, as long as that is used; from any thread."""
        self.user_queues[id(queue)] = queue

    def _queued_calls(self) -> int:
        queues = [ref() for ref in self.user_queues.valuerefs()]
        return sum(queue.queued for queue in queues if queue is not None)

    def note_start(self, took_s: float, wall_time: float) -> None:
        """Note that the replica is up."""
        self.startup_s, self.started_at = took_s, wall_time

    def refusal(self, replica_tag: ReplicaTag, ongoing: int) -> ReplicaBusyError:
        """Count a request that found no free slot in time, and return what to raise."""
        self.refused += 1
        return ReplicaBusyError(f"Replica {replica_tag!r} runs {ongoing} requests already.", ongoing=ongoing)

    def give_up(self, *, is_late: bool) -> None:
        """Count a request that was cancelled, ``is_late`` if its time was over."""
        self.cancelled += 1
        self.timed_out += is_late

    def plain(self) -> dict[str, Any]:
        """Return all of it in plain values."""
        return {
            "handled_total": self.handled,
            "failed_total": self.failed,
            "refused_total": self.refused,
            "cancelled_total": self.cancelled,
            "timed_out_total": self.timed_out,
            "latency_counts": list(self.latency.counts),
            "latency_sum_s": self.latency.sum,
        }

    def brief(self, load: Callable[[], Load], more: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return how many requests run, how many have ended, how soon they did, and more; in plain values."""
        ongoing = load().ongoing
        return {
            "ongoing": ongoing,
            "ended": self.handled - ongoing,
            "latency_counts": list(self.latency.counts),
            **more(),
        }

    def samples(self, labels: tuple[str, str, str]) -> list[Sample]:
        """Return all of it but what user code measures; ``labels``: instance, deployment and replica."""
        deployment = labels[:2]
        found: list[Sample] = [
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
            found += [
                ("replica_requests", labels, self.handled),
                ("replica_errors", labels, self.failed),
                ("replica_request_duration_seconds", labels, self.latency),
                ("replica_start_time_seconds", labels, self.started_at),
                ("replica_startup_duration_seconds", labels, self.startup_s),
            ]
        for method, each in list(self.batches.items()):
            found.append(("batch_size", (*deployment, method), each.sizes))
            found.append(("batch_wait_seconds", (*deployment, method), each.waits))
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
    ) -> list[Sample]:
        """Return what others know of the replica; nothing of its state before it is up."""
        deployment = labels[:2]
        counts: list[Sample] = [
            ("deployment_loop_blocks", deployment, loop_blocks),
            ("deployment_health_check_failures", deployment, probe_failures),
        ]
        if not self.started_at:
            return counts
        return [
            *counts,
            ("replica_ongoing_requests", labels, load.ongoing),
            ("replica_queued_requests", labels, load.queued + self._queued_calls()),
            ("replica_abandoned_requests", labels, abandoned),
            ("replica_max_ongoing_requests", labels, concurrency),
            ("replica_healthy", labels, int(is_healthy)),
        ]

    def user_samples(self, labels: tuple[str, str, str]) -> list[UserSample]:
        """Return what user code measures; ``labels`` as for `samples`."""
        return self.user.samples(*zip(("serve_instance", "deployment", "replica"), labels, strict=True))
