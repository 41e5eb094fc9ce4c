"""The live metrics of an instance: rates over the last second, collected only while a client reads them.

While `LiveMetrics.is_watched`, the watch of the workers queries replicas and proxies, and routers add their
counts to their reports of load. Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from daskserve.autoscaling.latency import quantile_of
from daskserve.common.types import BackendTag, EndpointTag, ReplicaTag
from daskserve.telemetry.histogram import latency_buckets_s
from daskserve.telemetry.live import STALE_S, Counts, Meter, Rates

#: How long after a client's last call metrics are still collected.
WATCHED_S = 5.0
#: Maximum number of routers, and of pairs of caller and callee in one report; the rest is left out.
MAX_ROUTERS, MAX_CALLS = 10_000, 10_000
#: The key of the outputs of continuous batches, among the totals of a replica.
OUTPUTS = "outputs"
#: Significant digits of each number; a second of requests has no more precision.
DIGITS = 4

#: The calling backend and the called endpoint. The caller is "" for the ingress and programs.
Edge = tuple[BackendTag, EndpointTag]


@dataclass(slots=True)
class _Metered:
    """A replica or a proxy: its rates, and its running and queued requests."""

    meter: Meter[str] = field(default_factory=Meter)
    ongoing: int | None = None
    queued: int | None = None
    #: The load of its continuous batches; None if it has none.
    continuous: Mapping[str, Any] | None = None


@dataclass(slots=True)
class _Router:
    meter: Meter[Edge] = field(default_factory=Meter)
    at: float = float("-inf")
    queued: Mapping[BackendTag, int] = field(default_factory=dict)


class LiveMetrics:
    """The live metrics of an instance; see the module."""

    def __init__(self) -> None:
        self._looked_at = float("-inf")
        self._replicas: dict[ReplicaTag, _Metered] = {}
        self._proxies: dict[str, _Metered] = {}
        self._routers: dict[str, _Router] = {}

    # recording

    def check(self, now: float) -> None:
        """Record that a client has called."""
        self._looked_at = now

    def end(self, now: float) -> bool:
        """Drop all counts if no client has called recently; return whether this happened."""
        if self.is_watched(now) or self._looked_at == float("-inf"):
            return False
        self._looked_at = float("-inf")
        for each in (self._replicas, self._proxies, self._routers):
            each.clear()
        return True

    def is_watched(self, now: float) -> bool:
        """Return whether a client has called recently."""
        return now - self._looked_at <= WATCHED_S

    def replica(self, tag: ReplicaTag, metrics: Mapping[str, Any], now: float) -> None:
        """Record the counts of a replica."""
        _meter(self._replicas, tag, metrics, now)

    def proxy(self, tag: str, metrics: Mapping[str, Any], now: float) -> None:
        """Record the counts of a proxy, and those of each endpoint."""
        found = _meter(self._proxies, tag, metrics, now)
        endpoints = {
            name: Counts(int(each[0]), int(each[1])) for name, each in metrics.get("endpoints", {}).items()
        }
        router = self._routers.setdefault(f"proxy {tag}", _Router())
        if found.meter.at == now:
            router.meter.take({("", name): each for name, each in endpoints.items()}, now)
            router.at = now

    def router(self, name: str, reported: Mapping[str, Any], now: float) -> None:
        """Record the calls that a process has counted, and its queued requests."""
        router = self._routers.get(name)
        if router is None:
            self._forget_routers(now)
            if len(self._routers) >= MAX_ROUTERS:
                return
            router = self._routers[name] = _Router()
        totals: dict[Edge, Counts] = {}
        for caller, endpoint, begun, failed in reported["calls"][:MAX_CALLS]:
            totals[str(caller), str(endpoint)] = Counts(int(begun), int(failed))
        router.meter.take(totals, now)
        router.queued = {str(tag): int(each) for tag, each in reported["queued"].items()}
        router.at = now

    def _forget_routers(self, now: float) -> None:
        for name in [name for name, each in self._routers.items() if now - each.at > STALE_S]:
            del self._routers[name]

    def forget_replica(self, tag: ReplicaTag) -> None:
        """Drop the metrics of a removed replica."""
        self._replicas.pop(tag, None)

    def forget_proxy(self, tag: str) -> None:
        """Drop the metrics of a removed proxy."""
        self._proxies.pop(tag, None)
        self._routers.pop(f"proxy {tag}", None)

    # reading

    def is_measured(self, replicas: Iterable[ReplicaTag], proxies: Iterable[str], now: float) -> bool:
        """Return whether the rates of these replicas and proxies, and of all reporting routers, are known."""
        found = [self._replicas.get(tag) for tag in replicas] + [self._proxies.get(tag) for tag in proxies]
        return all(each is not None and each.meter.fresh(now) is not None for each in found) and all(
            each.meter.fresh(now) is not None for each in self._routers.values() if now - each.at <= STALE_S
        )

    def of_replica(self, tag: ReplicaTag, now: float) -> dict[str, Any]:
        """Return the metrics of a replica."""
        return _numbers([self._replicas.get(tag)], now)

    def of_deployment(self, tag: BackendTag, replicas: Iterable[ReplicaTag], now: float) -> dict[str, Any]:
        """Return the metrics of a deployment, given its replicas."""
        known = [self._replicas.get(each) for each in replicas]
        found = _numbers(known, now) if known else {**_numbers([None], now), **_IDLE}
        waiting = [
            each.queued.get(tag, 0)
            for each in self._routers.values()
            if each.queued and now - each.at <= STALE_S
        ]
        if waiting:  # routers also count the requests that are queued in replicas
            found["queued"] = max(sum(waiting), found["queued"] or 0)
        return {**found, "replicas": len(known)}

    def of_http(self, proxies: Iterable[str], now: float) -> dict[str, Any]:
        """Return the metrics of all proxies."""
        found = _numbers([self._proxies.get(each) for each in proxies], now)
        del found["queued"]
        return found

    def calls(
        self, targets_of: Callable[[EndpointTag], Mapping[BackendTag, float]], now: float
    ) -> list[dict[str, Any]]:
        """Return the rates from caller to callee; ``targets_of`` returns the shares of an endpoint."""
        found: dict[tuple[BackendTag, BackendTag], list[float]] = {}
        for router in self._routers.values():
            for (caller, endpoint), rates in (router.meter.fresh(now) or {}).items():
                for tag, share in targets_of(endpoint).items():
                    sums = found.setdefault((caller, tag), [0.0, 0.0])
                    sums[0] += share * rates.requests_per_s
                    sums[1] += share * rates.errors_per_s
        return [
            {"from": caller, "to": tag, "requests_per_s": _short(sums[0]), "errors_per_s": _short(sums[1])}
            for (caller, tag), sums in sorted(found.items())
        ]


#: The metrics of a deployment without replicas.
_IDLE: Mapping[str, Any] = {"requests_per_s": 0.0, "errors_per_s": 0.0, "ongoing": 0, "queued": 0}


def _meter(known: dict[str, _Metered], tag: str, metrics: Mapping[str, Any], now: float) -> _Metered:
    found = known.setdefault(tag, _Metered())
    totals = {"": Counts.of(metrics)}
    found.continuous = metrics.get("continuous")
    if found.continuous is not None:
        totals[OUTPUTS] = Counts(int(found.continuous["outputs"]))
    found.meter.take(totals, now)
    found.ongoing, found.queued = metrics.get("ongoing"), metrics.get("queued")
    return found


def _numbers(several: Iterable[_Metered | None], now: float) -> dict[str, Any]:
    """Return the combined metrics of several replicas or proxies; None for unknown values."""
    fresh = [each for each in several if each is not None and now - each.meter.at <= STALE_S]
    known = [found[""] for each in fresh if (found := each.meter.fresh(now)) is not None]
    rates = Rates.sum(known) if known else None
    ongoing = [each.ongoing for each in fresh if each.ongoing is not None]
    queued = [each.queued for each in fresh if each.queued is not None]
    return {
        "requests_per_s": None if rates is None else _short(rates.requests_per_s),
        "errors_per_s": None if rates is None else _short(rates.errors_per_s),
        "latency_p50_s": None if rates is None else _latency(rates, 0.5),
        "latency_p99_s": None if rates is None else _latency(rates, 0.99),
        "ongoing": sum(ongoing) if ongoing else None,
        "queued": sum(queued) if queued else None,
        **_continuous(fresh, now),
    }


def _continuous(fresh: Iterable[_Metered], now: float) -> dict[str, Any]:
    """Return the metrics of continuous batches; empty if there are none."""
    loads = [(each.continuous, each.meter.fresh(now)) for each in fresh if each.continuous is not None]
    if not loads:
        return {}
    rates = [rates[OUTPUTS].requests_per_s for _, rates in loads if rates is not None and OUTPUTS in rates]
    found = {name: sum(int(load[name]) for load, _ in loads) for name in ("active", "slots", "queued")}
    return {"continuous": {**found, "outputs_per_s": _short(sum(rates)) if rates else None}}


def _latency(rates: Rates, quantile: float) -> float | None:
    if not sum(rates.latency_counts):
        return None
    # The last bucket has no upper bound.
    buckets = latency_buckets_s()
    return _short(min(quantile_of(rates.latency_counts, buckets, quantile), buckets[-1]))


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
