"""Cost of metrics: per request, per measurement of user code, per scrape.

Pure: no cluster, no sockets, no event loop. Each value is the median process time of several rounds, minus an
empty loop. "A request" updates all metrics that the ingress, the router, a replica and two channels count for
one HTTP request. "by prometheus_client" counts the same with that library's objects, for comparison.

Run: ``python benchmarks/bench_metrics.py``. It exits with 1 if a case exceeds its bound.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from daskserve import metrics
from daskserve.cluster.channel.wire.transport import Traffic
from daskserve.common.clock import stopwatch
from daskserve.common.types import Load, ReplicaState
from daskserve.context import ReplicaContext, current_replica
from daskserve.control.observed.observed import Observed
from daskserve.control.records.records import BackendRecord, Change, ReplicaRecord
from daskserve.control.records.state import State
from daskserve.control.views.metrics import ControlMetrics
from daskserve.data.caller.routing.metrics import ReplicaSetMetrics
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.proxies.ingress.metrics import IngressMetrics
from daskserve.proxies.ingress.routes import Route
from daskserve.telemetry.collector import ProcessMetrics
from daskserve.telemetry.histogram import latency_buckets_s
from daskserve.telemetry.replica import ReplicaMetrics
from daskserve.telemetry.table import MetricSample

REQUESTS = 50_000
ROUNDS = 9
REQUEST_BOUND_US = 3.0
DEPLOYMENTS, REPLICAS = 1000, 10


def a_request() -> Callable[[], object]:
    ingress, router, replica, traffic = IngressMetrics(), ReplicaSetMetrics(), ReplicaMetrics(), Traffic()
    route = Route("/a", "e", frozenset(("GET",)))

    def count() -> None:
        started = stopwatch()
        router.sent += 1
        for _ in range(2):
            traffic.sent_bytes += 100
            traffic.received_bytes += 100
        replica.handled += 1
        began = stopwatch()
        replica.latency.observe(stopwatch() - began)
        ingress.observe(route, "GET", 200, stopwatch() - started, "")

    return count


def by_prometheus_client() -> Callable[[], object]:
    registry = CollectorRegistry()
    labels = ("deployment",)
    counters = [Counter(f"c{number}", "", labels, registry=registry) for number in range(6)]
    responses = Counter("responses", "", ("route", "method", "code"), registry=registry)
    latencies = [
        Histogram(f"h{number}", "", labels, registry=registry, buckets=latency_buckets_s())
        for number in range(3)
    ]

    def count() -> None:
        started = stopwatch()
        for counter in counters:
            counter.labels("d").inc()
        responses.labels("/a", "GET", "200").inc()
        for latency in latencies:
            latency.labels("d").observe(stopwatch() - started)

    return count


def a_users_count() -> Callable[[], object]:
    current_replica.set(ReplicaContext("i", "d", "d#1", metrics=ReplicaMetrics()))
    hits = metrics.Counter("hits", tag_keys=("model",))
    tags = {"model": "a"}
    return lambda: hits.inc(tags=tags)


class Worker:
    """The metrics of a worker with ten deployments of ten replicas each, and a proxy with their routes."""

    def __init__(self) -> None:
        self._ingress = IngressMetrics()
        self._replicas = {
            ("i", f"d{number}", f"d{number}#{other}"): ReplicaMetrics()
            for number in range(10)
            for other in range(10)
        }
        for number in range(10):
            for status in (200, 404, 500):
                self._ingress.observe(Route(f"/{number}", "e", frozenset()), "GET", status, 0.01, "")
        for replica_metrics in self._replicas.values():
            replica_metrics.record_start(1.0, 1.0)

    def samples(self) -> list[MetricSample]:
        found = self._ingress.samples("i")
        for labels, replica_metrics in self._replicas.items():
            found += replica_metrics.samples(labels)
            found += replica_metrics.states(
                labels,
                load=Load(),
                concurrency=8,
                abandoned=0,
                loop_blocks=0,
                probe_failures=0,
                is_healthy=True,
            )
        return found


class Controller:
    """The metrics of a controller of many deployments."""

    def __init__(self) -> None:
        self._state = State()
        self._metrics = ControlMetrics()
        for number in range(DEPLOYMENTS):
            tag = f"d{number}"
            backend = BackendRecord(
                tag=tag,
                version="1",
                config=BackendConfig(num_replicas=REPLICAS),
                config_id="1",
                actor_options=ActorOptions(),
                code_key="",
            )
            change: Change = {backend.key: backend}
            for other in range(REPLICAS):
                replica = ReplicaRecord(
                    tag=f"{tag}#{other}",
                    backend=tag,
                    version="1",
                    config_id="1",
                    state=ReplicaState.RUNNING,
                    demand={},
                )
                change[replica.key] = replica
            self._state.apply(change)

    def samples(self) -> list[MetricSample]:
        return self._metrics.counts("i") + self._metrics.states("i", 1, self._state, Observed())


def seconds(function: Callable[[], object], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        function()
    return time.process_time() - began


def cost_us(function: Callable[[], object], times: int) -> float:
    """Return the CPU time of a call in microseconds, minus the time of an empty call."""
    rounds = []
    for _ in range(ROUNDS):
        bare = seconds(lambda: None, times)
        rounds.append((seconds(function, times) - bare) / times * 1e6)
    return statistics.median(rounds)


def scrape_of(source: Worker | Controller) -> Callable[[], object]:
    registry = CollectorRegistry()
    process = ProcessMetrics(registry)
    process.add(source)
    return lambda: (generate_latest(registry), source, process)


def main() -> int:
    cases = (
        ("a request", a_request(), REQUESTS, REQUEST_BOUND_US),
        ("the same by prometheus_client", by_prometheus_client(), REQUESTS, None),
        ("a count of user code", a_users_count(), REQUESTS, REQUEST_BOUND_US),
        ("a scrape of a worker with 100 replicas", scrape_of(Worker()), 5, None),
        (f"a scrape of a controller of {DEPLOYMENTS} deployments", scrape_of(Controller()), 3, None),
    )
    is_beyond = False
    for name, function, times, bound in cases:
        cost = cost_us(function, times)
        is_beyond |= bound is not None and cost > bound
        print(f"{name}: {cost:.2f} us{f', bound {bound:g}' if bound is not None else ''}")
    return int(is_beyond)


if __name__ == "__main__":
    sys.exit(main())
