"""Metrics of user code: declarations, the destination of values, and labels."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import cloudpickle
import pytest
from cases import for_each
from prometheus_client import CollectorRegistry, generate_latest

import daskserve as serve
from daskserve import metrics
from daskserve.context import ReplicaContext, RequestContext, current_replica, current_request
from daskserve.telemetry.collector import ProcessMetrics
from daskserve.telemetry.replica import ReplicaMetrics
from daskserve.telemetry.user import UserSample


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> ProcessMetrics:
    fresh = ProcessMetrics(CollectorRegistry())
    monkeypatch.setattr(metrics, "PROCESS", fresh)
    return fresh


def exported(process: ProcessMetrics) -> list[str]:
    text = generate_latest(process._registry).decode()
    return [line for line in text.splitlines() if not line.startswith(("#", "daskserve_build_info"))]


def in_replica(function: Callable[[], Any], replica_metrics: ReplicaMetrics, request: Any = None) -> Any:
    """Run a function as user code of a replica."""

    def run() -> Any:
        current_replica.set(ReplicaContext("i", "d", "d#1", metrics=replica_metrics))
        current_request.set(request)
        return function()

    return copy_context().run(run)


def values(replica_metrics: ReplicaMetrics) -> dict[str, float]:
    found = {}
    for sample in replica_metrics.user_samples(("i", "d", "d#1")):
        assert isinstance(sample.value, float)
        found[" ".join(f"{key}={value}" for key, value in sample.labels)] = sample.value
    return found


def test_metrics_are_public_names() -> None:
    assert serve.metrics.Counter is metrics.Counter
    assert serve.metrics.__all__ == ["Counter", "Gauge", "Histogram"]


def test_values_in_a_replica_get_its_labels_and_stay_in_its_metrics(process: ProcessMetrics) -> None:
    replica_metrics = ReplicaMetrics()
    hits = metrics.Counter("hits", "Hits.", tag_keys=("model",))
    in_replica(lambda: hits.inc(tags={"model": "a"}), replica_metrics)
    in_replica(lambda: hits.inc(2, tags={"model": "a"}), replica_metrics)
    assert values(replica_metrics) == {"serve_instance=i deployment=d replica=d#1 model=a": 3.0}
    assert exported(process) == []


def test_values_outside_a_replica_have_only_their_own_tags(process: ProcessMetrics) -> None:
    depth = metrics.Gauge("depth", "How deep.", ("tank",))
    depth.set(2, {"tank": "a"})
    depth.set(1, {"tank": "a"})
    metrics.Counter("dives_total").inc()
    assert exported(process) == ['depth{tank="a"} 1.0', "dives_total 1.0"]


def test_a_histogram_uses_its_own_buckets(process: ProcessMetrics) -> None:
    sizes = metrics.Histogram("sizes", "Sizes.", boundaries=[1, 10], tag_keys=("kind",))
    for value in (1, 5, 50):
        sizes.observe(value, {"kind": "a"})
    assert exported(process) == [
        'sizes_bucket{kind="a",le="1.0"} 1.0',
        'sizes_bucket{kind="a",le="10.0"} 2.0',
        'sizes_bucket{kind="a",le="+Inf"} 3.0',
        'sizes_count{kind="a"} 3.0',
        'sizes_sum{kind="a"} 56.0',
    ]


def test_default_tags_apply_unless_a_call_overrides_them(process: ProcessMetrics) -> None:
    hits = metrics.Counter("hits", tag_keys=("model", "zone")).set_default_tags({"zone": "eu"})
    hits.inc(tags={"model": "a"})
    hits.inc(tags={"model": "a", "zone": "us"})
    assert len(exported(process)) == 2
    assert hits.info["default_tags"] == {"zone": "eu"}


def test_a_declared_route_tag_gets_the_route_of_the_request() -> None:
    replica_metrics = ReplicaMetrics()
    hits = metrics.Counter("hits", tag_keys=("route",))
    in_replica(hits.inc, replica_metrics, RequestContext("r", "/a"))
    in_replica(hits.inc, replica_metrics)
    assert set(values(replica_metrics)) == {
        "serve_instance=i deployment=d replica=d#1 route=/a",
        "serve_instance=i deployment=d replica=d#1 route=",
    }


def test_a_user_thread_measures_for_the_replica_that_created_the_metric() -> None:
    replica_metrics = ReplicaMetrics()
    hits: metrics.Counter = in_replica(lambda: metrics.Counter("hits"), replica_metrics)
    thread = threading.Thread(target=hits.inc)
    thread.start()
    thread.join()
    assert list(values(replica_metrics).values()) == [1.0]


def test_threads_lose_no_counts() -> None:
    replica_metrics = ReplicaMetrics()
    hits = metrics.Counter("hits")

    def count() -> None:
        for _ in range(2000):
            in_replica(hits.inc, replica_metrics)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(values(replica_metrics).values()) == [8000.0]


@for_each("dumps", [pickle.dumps, cloudpickle.dumps])
def test_an_unpickled_metric_measures_where_it_is_used(dumps: Callable[[Any], bytes]) -> None:
    replica_metrics = ReplicaMetrics()
    sizes = metrics.Histogram("sizes", "Sizes.", [1.0], ("kind",)).set_default_tags({"kind": "a"})
    copy = pickle.loads(dumps(sizes))
    assert copy.info == sizes.info
    in_replica(lambda: copy.observe(2), replica_metrics)
    (sample,) = replica_metrics.user_samples(("i", "d", "d#1"))
    assert UserSample.from_plain(sample.plain()).plain() == sample.plain()
    assert sample.plain()[-1] == [[0, 1], 2.0]


@for_each("tag_keys", [["a"], "a", {"a": 1}, ("a", 1)])
def test_tag_keys_are_a_tuple_of_strings(tag_keys: Any) -> None:
    with pytest.raises(TypeError, match="tag_keys must be a tuple of strings"):
        metrics.Counter("hits", tag_keys=tag_keys)


@for_each("key", ["deployment", "replica", "application", "serve_instance", "instance", "le"])
def test_reserved_tags_are_refused_everywhere(key: str) -> None:
    with pytest.raises(ValueError, match="reserved"):
        metrics.Counter("hits", tag_keys=(key,))
    hits = metrics.Counter("hits", tag_keys=("model",))
    with pytest.raises(ValueError, match="reserved"):
        hits.set_default_tags({key: "x"})
    with pytest.raises(ValueError, match="reserved"):
        hits.inc(tags={"model": "a", key: "x"})


@for_each(
    ("use", "message"),
    [
        (lambda: metrics.Counter("1hits"), "use letters, digits"),
        (lambda: metrics.Counter(""), "use letters, digits"),
        (lambda: metrics.Counter("hits\n"), "use letters, digits"),
        (lambda: metrics.Gauge("daskserve_depth"), "prefix is reserved"),
        (lambda: metrics.Gauge("process_depth"), "prefix is reserved"),
        (lambda: metrics.Counter("hits", tag_keys=("a-b",)), "name of a tag"),
        (lambda: metrics.Counter("hits", tag_keys=("a", "a")), "duplicate"),
        (lambda: metrics.Counter("hits").inc(0), "give a number above 0"),
        (lambda: metrics.Counter("hits").inc(-1), "give a number above 0"),
        (lambda: metrics.Counter("hits").inc(float("nan")), "give a number above 0"),
        (lambda: metrics.Counter("hits", tag_keys=("a",)).inc(), "has no value for the tags: a"),
        (lambda: metrics.Counter("hits").inc(tags={"a": "b"}), "has no tag 'a'"),
        (lambda: metrics.Histogram("sizes"), "boundaries"),
        (lambda: metrics.Histogram("sizes", boundaries=[]), "boundaries"),
        (lambda: metrics.Histogram("sizes", boundaries=[0]), "boundaries"),
        (lambda: metrics.Histogram("sizes", boundaries=[2, 1]), "ascend"),
        (lambda: metrics.Histogram("sizes", boundaries=[1, float("inf")]), "boundaries"),
    ],
)
def test_an_invalid_metric_is_refused(use: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use()


def test_a_tag_value_must_be_a_string() -> None:
    with pytest.raises(TypeError, match="must be a string"):
        metrics.Counter("hits", tag_keys=("a",)).inc(tags={"a": 1})  # type: ignore[dict-item]
