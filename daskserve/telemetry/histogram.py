"""Counters of the request path: plain integers that take a fraction of a microsecond to increment.

This module does not know Prometheus; `daskserve.telemetry.collector` turns counters into metrics at a scrape.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from daskserve.common import settings
from daskserve.common.clock import wall_ns
from daskserve.common.formatting import shown
from daskserve.errors import (
    ActorLostError,
    BackPressureError,
    BadRequestError,
    BodyTooLargeError,
    NotFoundError,
    RequestTimeoutError,
    ServeError,
    UnavailableError,
    UserCodeError,
)

_DEFAULT_BUCKETS_S: Sequence[float] = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


@functools.cache
def latency_buckets_s() -> Sequence[float]:
    """Return the upper bounds of the buckets of durations, without the last bucket, which is unbounded.

    The bounds are read only once, because processes of a cluster add up each other's counts.
    """
    bounds = settings.metrics().latency_buckets_ms
    return _DEFAULT_BUCKETS_S if bounds is None else tuple(each / 1000 for each in bounds)


#: Upper bounds of the buckets of batch sizes.
SIZE_BUCKETS: Sequence[float] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

#: Upper bounds of the buckets of shares.
SHARE_BUCKETS: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
#: Upper bounds of the buckets of starts, changes and ends of replicas, in seconds.
LIFE_BUCKETS_S: Sequence[float] = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 240)

#: The cause of all errors that are not daskserve's own.
USER_CODE = "user_code"
TIMEOUT = "timeout"
#: Value of the label ``cause`` for each class of errors; the first matching class is used.
CAUSES: Mapping[type[BaseException], str] = {
    BackPressureError: "back_pressure",
    RequestTimeoutError: TIMEOUT,
    ActorLostError: "replica_lost",
    UnavailableError: "unavailable",
    NotFoundError: "not_found",
    BodyTooLargeError: "max_body_bytes",
    BadRequestError: "bad_request",
    UserCodeError: USER_CODE,
    ServeError: "internal",
}


class TracedValue(Protocol):
    """The span of a value that was counted."""

    @property
    def ids(self) -> str:
        """The ids of the trace and the span, ``TRACE-SPAN`` in hexadecimal."""


#: A value that was counted, its span, and its time in nanoseconds since the epoch.
Example: TypeAlias = tuple[float, TracedValue, int]


class HistogramCounts:
    """Counts values in buckets. One thread may write at a time, while others read.

    Parameters
    ----------
    bounds : sequence of float
        The largest value of each bucket except the last, in ascending order.
    """

    __slots__ = ("bounds", "counts", "examples", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        #: Number of values per bucket, not cumulative; the last bucket holds the values above all bounds.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        #: The latest value of a sampled request in each bucket: the value, its trace and its time.
        self.examples: dict[int, Example] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.count} values, sum {shown(self.sum)}>"

    @property
    def count(self) -> int:
        """Number of observed values."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count several values."""
        counts, bounds = self.counts, self.bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self.sum += value

    def note_trace(self, value: float, span: TracedValue) -> None:
        """Record the span of a value that was counted."""
        if self.examples is None:
            self.examples = {}
        self.examples[bisect_left(self.bounds, value)] = value, span, wall_ns()

    def add(self, counts: Iterable[int], total: float) -> None:
        """Add the counts of another histogram with the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, counts, strict=True)]
        self.sum += total

    def copy(self) -> HistogramCounts:
        """Return a copy of the histogram."""
        twin = HistogramCounts(self.bounds)
        twin.add(self.counts, self.sum)
        twin.examples = None if self.examples is None else dict(self.examples)
        return twin


class LatencyHistogram(HistogramCounts):
    """Counts durations in seconds, in `latency_buckets_s`."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(latency_buckets_s())


def cause_of(error: BaseException) -> str:
    """Return the cause of a failed request, one of the values of `CAUSES`."""
    for kind, cause in CAUSES.items():
        if isinstance(error, kind):
            return cause
    return USER_CODE


class VersionCounter:
    """The number of ended requests of one version, of failed ones, and their latencies."""

    __slots__ = ("failed", "latency", "requests")

    def __init__(self) -> None:
        self.requests = self.failed = 0
        self.latency = LatencyHistogram()

    def count(self, has_failed: bool, duration_s: float | None) -> None:
        """Count a request that has ended; ``duration_s`` is None for a WebSocket."""
        self.requests += 1
        self.failed += has_failed
        if duration_s is not None:
            self.latency.observe(duration_s)

    def plain(self) -> list[Any]:
        """Return the totals as plain values."""
        return [self.requests, self.failed, list(self.latency.counts)]
