"""What is known of the load on each backend: levels that go stale, and the samples that are drawn from them.

Routers tell what waits in them and what they have in flight, once a second while that is not nothing.
Replicas are asked by the watch of the workers, in the same rhythm. What was not told anew for `STALE_S`
counts no more: a process that died or hangs neither pins load nor hides it. Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskserve.autoscaling.context import Sample
from daskserve.types import BackendTag, ReplicaTag

#: Longer than three reports that did not come.
STALE_S = 3.5


@dataclass(slots=True)
class _RouterLoad:
    at: float
    #: By backend: how many requests wait, and how many are in flight.
    loads: Mapping[BackendTag, tuple[int, int]]


@dataclass(slots=True)
class _ReplicaLoad:
    at: float
    ongoing: int
    ended: int
    latency_counts: Sequence[int]
    #: What the user's code measures for autoscaling.
    custom: Mapping[str, float]


@dataclass(slots=True)
class _Ended:
    """What has ended at a backend since its last sample."""

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
    """See the module."""

    def __init__(self) -> None:
        self._routers: dict[str, _RouterLoad] = {}
        self._routers_of: dict[BackendTag, dict[str, _RouterLoad]] = {}
        self._replicas: dict[ReplicaTag, _ReplicaLoad] = {}
        self._ended: dict[BackendTag, _Ended] = {}

    # taking in

    def report(self, router: str, loads: Mapping[BackendTag, Sequence[int]], now: float) -> None:
        """Take note of what a router has: by backend, how many requests wait and how many are in flight."""
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
        self, backend: BackendTag, replica: ReplicaTag, figures: Mapping[str, Any], now: float
    ) -> None:
        """Take note of what a replica says of itself."""
        latency_counts = tuple(figures.get("latency_counts", ()))
        custom = figures.get("custom", {})
        current = _ReplicaLoad(now, int(figures["ongoing"]), int(figures["ended"]), latency_counts, custom)
        before = self._replicas.get(replica)
        self._replicas[replica] = current
        total = self._ended.get(backend)
        if before is None or total is None:
            # All that it has done since it started, be it for an older controller, is not of this second; and
            # of backends that are not autoscaled nobody draws samples.
            return
        old_counts = before.latency_counts or (0,) * len(latency_counts)
        total.add(
            max(0, current.ended - before.ended),
            [max(0, new - old) for new, old in zip(latency_counts, old_counts, strict=False)],
        )

    def forget_replica(self, replica: ReplicaTag) -> None:
        """Drop a replica that is gone."""
        self._replicas.pop(replica, None)

    def forget_backend(self, backend: BackendTag) -> None:
        """Drop what ended at a backend that is gone, or not autoscaled any more."""
        self._ended.pop(backend, None)

    # drawing

    def queued(self, backend: BackendTag, now: float) -> int:
        """Return how many requests wait in routers for a backend."""
        return sum(load[0] for load in self._fresh(backend, now))

    def _fresh(self, backend: BackendTag, now: float) -> list[tuple[int, int]]:
        routers = self._routers_of.get(backend, {})
        return [each.loads[backend] for each in routers.values() if now - each.at <= STALE_S]

    def ongoing(self, replicas: Iterable[ReplicaTag], now: float) -> dict[ReplicaTag, float]:
        """Return what each of these replicas was running when it last said so, not too long ago."""
        return {tag: float(known.ongoing) for tag, known in self._fresh_replicas(replicas, now)}

    def custom(self, replicas: Iterable[ReplicaTag], now: float) -> dict[str, dict[ReplicaTag, float]]:
        """Return what the user's code in these replicas measures: by name, what each said last of itself."""
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
        """Return a backend's load now, and begin to count anew what ends."""
        fresh = self._fresh(backend, now)
        # A request may be on its way to a replica that was asked a moment before.
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
        """Return what each router told of its queues."""
        return {
            name: {tag: load[0] for tag, load in each.loads.items()} for name, each in self._routers.items()
        }
