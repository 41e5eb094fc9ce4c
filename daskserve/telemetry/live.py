"""Rates from counters that are read once a second, while a client watches them.

Reports contain totals, as for Prometheus. So a lost or repeated report does no harm, and metrics that no
client watches cost nothing. Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

#: The key of the published flag that a client watches; while it is set, routers report their counters.
LIVE_METRICS: Final = "live_metrics"
#: Minimum time between two reports: a rate over a few milliseconds is meaningless.
LEAST_S = 0.7
#: Lifetime of a report; longer than three missed ones.
STALE_S = 3.5

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals of requests, of failed requests, and of their durations by bucket."""

    requests: int = 0
    errors: int = 0
    latency_counts: Sequence[int] = ()

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Counts:
        """Return the totals in a report of a replica or a proxy."""
        counts = tuple(int(each) for each in plain.get("latency_counts", ()))
        return cls(int(plain["ended"]), int(plain.get("failed", 0)), counts)

    def since(self, before: Counts) -> Counts:
        """Return the difference to earlier counts; counters that have restarted give 0."""
        old = before.latency_counts or (0,) * len(self.latency_counts)
        return Counts(
            max(0, self.requests - before.requests),
            max(0, self.errors - before.errors),
            tuple(max(0, new - one) for new, one in zip(self.latency_counts, old, strict=False)),
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second, and the number of durations in each bucket."""

    requests_per_s: float = 0.0
    errors_per_s: float = 0.0
    latency_counts: Sequence[int] = ()

    @classmethod
    def sum(cls, several: Iterable[Rates]) -> Rates:
        """Return the rates of several together."""
        found = list(several)
        most = max((len(each.latency_counts) for each in found), default=0)
        padded = [(*each.latency_counts, *(0,) * (most - len(each.latency_counts))) for each in found]
        return cls(
            sum(each.requests_per_s for each in found),
            sum(each.errors_per_s for each in found),
            tuple(map(sum, zip(*padded, strict=True))),
        )


@dataclass(slots=True)
class Meter(Generic[Key]):
    """The last report of one process or actor, and the rates since the previous report."""

    at: float = float("-inf")
    totals: Mapping[Key, Counts] = field(default_factory=dict)
    #: None until there are two reports.
    rates: Mapping[Key, Rates] | None = None

    def take(self, totals: Mapping[Key, Counts], now: float) -> None:
        """Record a report of all totals; a total that was not in the last report began at 0."""
        elapsed_s = now - self.at
        if elapsed_s < LEAST_S:
            return
        if elapsed_s <= STALE_S:
            self.rates = {
                key: _rates(each.since(self.totals.get(key, Counts())), elapsed_s)
                for key, each in totals.items()
            }
        else:
            self.rates = None
        self.at, self.totals = now, totals

    def fresh(self, now: float) -> Mapping[Key, Rates] | None:
        """Return the rates; None if there are none, or if they are stale."""
        return self.rates if now - self.at <= STALE_S else None


def _rates(counted: Counts, elapsed_s: float) -> Rates:
    return Rates(counted.requests / elapsed_s, counted.errors / elapsed_s, counted.latency_counts)
