"""The load on each backend: reports that expire, and the samples made from them.

Routers report their queued requests and requests in flight once a second, unless there are none. The watch of
the workers queries replicas at the same interval. A report expires after `STALE_S`, so a process that died or
hangs neither adds load nor hides it. Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskserve.autoscaling.context import Sample
from daskserve.common.types import BackendTag, ReplicaTag

#: Lifetime of a report; longer than three missed reports.
STALE_S = 3.5


@dataclass(slots=True)
class _RouterLoad:
    at: float
    #: The number of queued requests and of requests in flight, by backend.
    loads: Mapping[BackendTag, tuple[int, int]]


@dataclass(slots=True)
class _ReplicaLoad:
    at: float
    ongoing: int
    ended: int
    latency_counts: Sequence[int]
    #: Metrics of user code for autoscaling.
    custom: Mapping[str, float]


@dataclass(slots=True)
class _Ended:
    """Requests that ended at a backend since its last sample."""

    since: float
    count: int = 0
    latency_counts: list[int] = field(default_factory=list)

    def add(self, count: int, latency_counts: Sequence[int]) -> None:
        self.count += count
        missing = len(latency_counts) - len(self.latency_counts)
        self.latency_counts += [0] * missing
        for place, each in enumerate(latency_counts):
            self.latency_counts[place] += each


class Loads:
    """The load on each backend; see the module."""

    def __init__(self) -> None:
        self._routers: dict[str, _RouterLoad] = {}
        self._routers_of: dict[BackendTag, dict[str, _RouterLoad]] = {}
        self._replicas: dict[ReplicaTag, _ReplicaLoad] = {}
        self._ended: dict[BackendTag, _Ended] = {}

    # recording

    def report(self, router: str, loads: Mapping[BackendTag, Sequence[int]], now: float) -> None:
        """Record a router's queued requests and requests in flight, by backend."""
        self._forget_router(router)
        for name in [name for name, each in self._routers.items() if now - each.at > STALE_S]:
            self._forget_router(name)
        if loads:
            entry = _RouterLoad(now, {tag: (int(load[0]), int(load[1])) for tag, load in loads.items()})
            self._routers[router] = entry
            for tag in loads:
                self._routers_of.setdefault(tag, {})[router] = entry

    def _forget_router(self, router: str) -> None:
        known = self._routers.pop(router, None)
        for tag in known.loads if known is not None else ():
            of_tag = self._routers_of[tag]
            del of_tag[router]
            if not of_tag:
                del self._routers_of[tag]

    def answered(
        self, backend: BackendTag, replica: ReplicaTag, metrics: Mapping[str, Any], now: float
    ) -> None:
        """Record a replica's report."""
        latency_counts = tuple(metrics.get("latency_counts", ()))
        custom = metrics.get("custom", {})
        current = _ReplicaLoad(now, int(metrics["ongoing"]), int(metrics["ended"]), latency_counts, custom)
        before = self._replicas.get(replica)
        self._replicas[replica] = current
        total = self._ended.get(backend)
        if before is None or total is None:
            # The first report counts all requests since the replica's start, not only those of this second.
            # Without autoscaling, no samples are taken.
            return
        old_counts = before.latency_counts or (0,) * len(latency_counts)
        total.add(
            max(0, current.ended - before.ended),
            [max(0, new - old) for new, old in zip(latency_counts, old_counts, strict=False)],
        )

    def forget_replica(self, replica: ReplicaTag) -> None:
        """Drop the report of a removed replica."""
        self._replicas.pop(replica, None)

    def forget_backend(self, backend: BackendTag) -> None:
        """Drop the counts of a backend that was removed or is no longer autoscaled."""
        self._ended.pop(backend, None)

    # sampling

    def queued(self, backend: BackendTag, now: float) -> int:
        """Return the number of requests queued in routers for a backend."""
        return sum(load[0] for load in self._fresh(backend, now))

    def _fresh(self, backend: BackendTag, now: float) -> list[tuple[int, int]]:
        routers = self._routers_of.get(backend, {})
        return [each.loads[backend] for each in routers.values() if now - each.at <= STALE_S]

    def ongoing(self, replicas: Iterable[ReplicaTag], now: float) -> dict[ReplicaTag, float]:
        """Return the number of running requests in each replica's last report, unless it has expired."""
        return {tag: float(known.ongoing) for tag, known in self._fresh_replicas(replicas, now)}

    def custom(self, replicas: Iterable[ReplicaTag], now: float) -> dict[str, dict[ReplicaTag, float]]:
        """Return the metrics of user code by name: the last value of each of these replicas."""
        found: dict[str, dict[ReplicaTag, float]] = {}
        for tag, known in self._fresh_replicas(replicas, now):
            for name, value in known.custom.items():
                found.setdefault(name, {})[tag] = value
        return found

    def _fresh_replicas(
        self, replicas: Iterable[ReplicaTag], now: float
    ) -> Iterator[tuple[ReplicaTag, _ReplicaLoad]]:
        for tag in replicas:
            known = self._replicas.get(tag)
            if known is not None and now - known.at <= STALE_S:
                yield tag, known

    def sample(self, backend: BackendTag, replicas: Iterable[ReplicaTag], now: float) -> Sample:
        """Return a backend's current load, and reset the count of ended requests."""
        fresh = self._fresh(backend, now)
        # A request may still be on its way to a replica that has just reported.
        in_flight = sum(load[1] for load in fresh)
        ended = self._ended.get(backend)
        self._ended[backend] = _Ended(now)
        elapsed_s = 0.0 if ended is None else now - ended.since
        return Sample(
            at=now,
            ongoing=max(sum(self.ongoing(replicas, now).values()), float(in_flight)),
            queued=float(sum(load[0] for load in fresh)),
            rate=ended.count / elapsed_s if ended is not None and elapsed_s > 0 else 0.0,
            latency_counts=() if ended is None else tuple(ended.latency_counts),
        )

    def queue_lengths(self) -> dict[str, dict[BackendTag, int]]:
        """Return each router's reported queue lengths."""
        return {
            name: {tag: load[0] for tag, load in each.loads.items()} for name, each in self._routers.items()
        }
