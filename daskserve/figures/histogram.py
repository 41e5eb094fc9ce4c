"""Figures that are kept on the request path: plain integers, bumped in a fraction of a microsecond.

Nothing here knows Prometheus; `daskserve.figures.collector` turns figures into metrics when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from daskserve.errors import (
    ActorLostError,
    BackPressureError,
    BadRequestError,
    NotFoundError,
    RequestTimeoutError,
    ServeError,
    UnavailableError,
    UserCodeError,
)

#: The upper bounds, in seconds, of the buckets in which durations are counted; a last one has no bound.
LATENCY_BUCKETS_S: Sequence[float] = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
#: The same for the sizes of batches.
SIZE_BUCKETS: Sequence[float] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

#: What is not an error of ours is one of user code.
USER_CODE = "user_code"
TIMEOUT = "timeout"
#: Why requests fail, in words that metrics are labelled with; the first class that fits counts.
CAUSES: Mapping[type[BaseException], str] = {
    BackPressureError: "back_pressure",
    RequestTimeoutError: TIMEOUT,
    ActorLostError: "replica_lost",
    UnavailableError: "unavailable",
    NotFoundError: "not_found",
    BadRequestError: "bad_request",
    UserCodeError: USER_CODE,
    ServeError: "internal",
}


class Histogram:
    """Counts values by size. To be written by one thread at a time; any other may read it meanwhile.

    Parameters
    ----------
    bounds : sequence of float
        The largest value of each bucket but the last, in ascending order.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        #: How many values each bucket holds, the last one those above all bounds; not cumulative.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.count} values, sum {self.sum:g}>"

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, counts: Iterable[int], total: float) -> None:
        """Count what another histogram of the same bounds has counted."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, counts, strict=True)]
        self.sum += total

    def copy(self) -> Histogram:
        """Return another one with the same counts."""
        twin = Histogram(self.bounds)
        twin.add(self.counts, self.sum)
        return twin


class LatencyHistogram(Histogram):
    """Counts durations in seconds, in `LATENCY_BUCKETS_S`."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(LATENCY_BUCKETS_S)

    @property
    def sum_s(self) -> float:
        """The seconds of all of them together."""
        return self.sum


def cause_of(error: BaseException) -> str:
    """Return one of `CAUSES` for why a request failed."""
    for kind, cause in CAUSES.items():
        if isinstance(error, kind):
            return cause
    return USER_CODE
