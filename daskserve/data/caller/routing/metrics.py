"""The metrics that the routers of a process count, and their samples."""

from __future__ import annotations

import asyncio

from daskserve.errors import ReplicaBusyError
from daskserve.payload.packed_errors import known_of
from daskserve.telemetry.histogram import TIMEOUT, LatencyHistogram, cause_of
from daskserve.telemetry.table import MetricSample

#: Why a request was sent again.
BUSY, LOST = "busy", "lost"
#: The cause of errors of calls that their callers cancelled.
CANCELLED = "cancelled"


class ReplicaSetMetrics:
    """Metrics of the requests to one backend."""

    __slots__ = ("rejected", "retries", "sent", "waits")

    def __init__(self) -> None:
        #: Number of requests that have begun, and of those that were refused because the queue was full.
        self.sent = self.rejected = 0
        self.retries = {BUSY: 0, LOST: 0}
        #: Waiting times of the requests that had to wait for a replica.
        self.waits = LatencyHistogram()

    def note_retry(self, error: Exception) -> None:
        """Count a retry after a replica was full or lost."""
        self.retries[BUSY if isinstance(error, ReplicaBusyError) else LOST] += 1

    def samples(self, instance: str, backend: str, *, waiting: int, in_flight: int) -> list[MetricSample]:
        """Return the metric samples."""
        labels = (instance, backend)
        return [
            ("router_requests", labels, self.sent),
            ("router_rejections", labels, self.rejected),
            ("router_queue_wait_seconds", labels, self.waits),
            ("router_queued_requests", labels, waiting),
            ("router_ongoing_requests", labels, in_flight),
            *(("router_retries", (*labels, cause), count) for cause, count in self.retries.items()),
        ]


class CallMetrics:
    """Metrics of the handle calls to one endpoint."""

    __slots__ = ("argument_waits", "begun", "errors", "latency")

    def __init__(self) -> None:
        self.begun = 0
        #: Number of errors by cause; see `daskserve.telemetry.histogram.cause_of`.
        self.errors: dict[str, int] = {}
        self.latency = LatencyHistogram()
        #: How long calls waited for values among their arguments.
        self.argument_waits = LatencyHistogram()

    def fail(self, error: BaseException, *, is_late: bool = False) -> None:
        """Count a call that raised or was cancelled; ``is_late`` if its deadline had passed."""
        if isinstance(error, asyncio.CancelledError):
            cause = TIMEOUT if is_late else CANCELLED
        else:
            cause = cause_of(known_of(error))
        self.errors[cause] = self.errors.get(cause, 0) + 1

    @property
    def failed(self) -> int:
        """The number of calls that raised, without those that the caller cancelled."""
        return sum(self.errors.values()) - self.errors.get(CANCELLED, 0)

    def samples(self, instance: str, endpoint: str) -> list[MetricSample]:
        """Return the metric samples; none if there were no calls."""
        if not self.begun:
            return []
        labels = (instance, endpoint)
        return [
            ("handle_requests", labels, self.begun),
            ("handle_request_duration_seconds", labels, self.latency),
            ("handle_arguments_wait_seconds", labels, self.argument_waits),
            *(("handle_errors", (*labels, cause), count) for cause, count in list(self.errors.items())),
        ]
