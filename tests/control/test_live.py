"""Live metrics, while a client watches: rates are differences of recently reported totals."""

from __future__ import annotations

from typing import Any

import pytest
from control_harness import backend, endpoint, replica, state_of
from controller_harness import Stage, staged

from daskserve.common.types import ReplicaState
from daskserve.control.core import MAX_WAIT_S
from daskserve.control.observed.live import MAX_CALLS, MAX_ROUTERS, WATCHED_S, LiveMetrics
from daskserve.control.observed.observed import Observed
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.views.live import is_measured, live_metrics
from daskserve.telemetry.live import LEAST_S, LIVE_METRICS, STALE_S, Counts, Meter

FAST = 5  # the bucket up to 5 ms


def sample(ended: int, failed: int = 0, **more: Any) -> dict[str, Any]:
    counts = [0] * 19
    counts[FAST] = ended
    return {"ongoing": 2, "queued": 1, "ended": ended, "failed": failed, "latency_counts": counts, **more}


def test_a_rate_needs_two_reports_and_ends_with_them() -> None:
    live = LiveMetrics()
    live.replica("b#1", sample(1000), 10.0)
    first = live.of_replica("b#1", 10.0)
    assert (first["requests_per_s"], first["latency_p50_s"], first["ongoing"]) == (None, None, 2)
    live.replica("b#1", sample(1010, 5), 12.0)
    found = live.of_replica("b#1", 12.0)
    assert (found["requests_per_s"], found["errors_per_s"], found["queued"]) == (5.0, 2.5, 1)
    assert 0.0025 < found["latency_p50_s"] < found["latency_p99_s"] <= 0.005
    assert set(live.of_replica("b#1", 12.1 + STALE_S).values()) == {None}
    assert set(live.of_replica("another", 12.0).values()) == {None}


def test_a_deployment_adds_up_its_replicas_and_what_waits_in_routers() -> None:
    live = LiveMetrics()
    for at, ended in ((10.0, 0), (11.0, 10)):
        live.replica("b#1", sample(ended), at)
        live.replica("b#2", sample(3 * ended), at)
        live.router("r", {"calls": [], "queued": {"b": 7}}, at)
    found = live.of_deployment("b", ["b#1", "b#2", "b#3"], 11.0)
    assert (found["requests_per_s"], found["ongoing"], found["queued"], found["replicas"]) == (40.0, 4, 7, 3)
    none = live.of_deployment("idle", [], 11.0)
    assert (none["requests_per_s"], none["latency_p99_s"], none["replicas"]) == (0.0, None, 0)


def test_continuous_batches_have_slots_and_outputs_per_second() -> None:
    live = LiveMetrics()
    for at, outputs in ((10.0, 100), (12.0, 300)):
        for tag in ("b#1", "b#2"):
            load = {"active": 3, "slots": 8, "queued": 2, "queued_cost": 9.0, "outputs": outputs}
            live.replica(tag, sample(0, continuous=load), at)
        live.replica("b#3", sample(0), at)
        if at == 10.0:
            assert live.of_replica("b#1", at)["continuous"]["outputs_per_s"] is None
    assert live.of_replica("b#1", 12.0)["continuous"] == {
        "active": 3,
        "slots": 8,
        "queued": 2,
        "outputs_per_s": 100.0,
    }
    found = live.of_deployment("b", ["b#1", "b#2", "b#3"], 12.0)
    assert found["continuous"] == {"active": 6, "slots": 16, "queued": 4, "outputs_per_s": 200.0}
    assert found["requests_per_s"] == 0.0
    assert "continuous" not in live.of_replica("b#3", 12.0)


def test_calls_are_edges_from_callers_to_the_backends_of_an_endpoint() -> None:
    live = LiveMetrics()
    for at, begun in ((10.0, 100), (11.0, 120)):
        live.router("r1", {"calls": [["a", "e", begun, begun // 10]], "queued": {}}, at)
        live.proxy("p", sample(begun, endpoints={"a": [begun, 0]}), at)
    # If a router counts a pair for the first time, its total before was 0.
    live.router("r2", {"calls": [], "queued": {}}, 10.0)
    live.router("r2", {"calls": [["a", "e", 5, 0]], "queued": {}}, 11.0)
    shares = {"e": {"b": 0.75, "c": 0.25}, "a": {"a": 1.0}}
    found = live.calls(shares.__getitem__, 11.0)
    assert found == [
        {"from": "", "to": "a", "requests_per_s": 20.0, "errors_per_s": 0.0},
        {"from": "a", "to": "b", "requests_per_s": 18.75, "errors_per_s": 1.5},
        {"from": "a", "to": "c", "requests_per_s": 6.25, "errors_per_s": 0.5},
    ]
    assert live.of_http(["p"], 11.0)["requests_per_s"] == 20.0
    assert "queued" not in live.of_http(["p"], 11.0)
    assert live.calls(shares.__getitem__, 11.1 + STALE_S) == []


def test_reports_in_quick_succession_make_no_rates_of_their_own() -> None:
    meter: Meter[str] = Meter()
    for at, requests in ((10.0, 0), (11.0, 10), (11.0 + LEAST_S / 2, 500)):
        meter.take({"": Counts(requests)}, at)
    assert meter.rates is not None
    assert meter.rates[""].requests_per_s == 10
    meter.take({"": Counts(3)}, 12.0)  # the counter has restarted
    assert meter.rates[""].requests_per_s == 0
    meter.take({"": Counts(9)}, 12.1 + STALE_S)
    assert meter.rates is None


def test_live_metrics_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveMetrics()
    calls = [["", f"e{number}", 1, 0] for number in range(MAX_CALLS + 5)]
    live.router("r", {"calls": calls, "queued": {}}, 10.0)
    assert len(live._routers["r"].meter.totals) == MAX_CALLS
    monkeypatch.setattr("daskserve.control.observed.live.MAX_ROUTERS", 3)
    for number in range(10):
        live.router(f"r{number}", {"calls": [], "queued": {}}, 10.0)
    assert len(live._routers) == 3 < MAX_ROUTERS
    live.router("later", {"calls": [], "queued": {}}, 10.1 + STALE_S)
    assert list(live._routers) == ["later"]


def test_watching_ends_some_time_after_the_last_read() -> None:
    live = LiveMetrics()
    assert not live.is_watched(0.0)
    assert not live.end(0.0)
    live.check(10.0)
    live.replica("b#1", sample(0), 10.0)
    assert live.is_watched(10.0 + WATCHED_S)
    assert not live.end(10.0 + WATCHED_S)
    assert live.end(10.1 + WATCHED_S)
    assert not live._replicas
    assert not live.end(11.0 + WATCHED_S)


@staged()
async def test_replicas_are_asked_and_routers_notified_while_a_client_reads(stage: Stage) -> None:
    await stage.deploy()
    (replica,) = stage.running_of("b")
    asked = []

    def metrics() -> dict[str, Any]:
        asked.append(stage.clock.now())
        return sample(10 * len(asked))

    replica.metrics = metrics  # type: ignore[attr-defined]
    await stage.clock.sleep(3)
    assert (asked, await stage.published(LIVE_METRICS)) == ([], None)
    began = stage.clock.now()
    found = await stage.call("live_metrics", wait_s=30.0)
    assert stage.clock.now() - began < 4.0, "no longer than until all are measured"
    assert found["replicas"][replica.tag]["requests_per_s"] == 10.0
    assert found["replicas"][replica.tag]["worker"] == replica.worker
    assert found["deployments"]["b"]["requests_per_s"] == 10.0
    assert await stage.published(LIVE_METRICS) is True
    begun = len(asked)
    await stage.call("live_metrics")
    await stage.call("live_metrics")  # metrics of the same moment
    await stage.clock.sleep(WATCHED_S + 5)
    assert begun < len(asked) <= begun + WATCHED_S + 2
    assert await stage.published(LIVE_METRICS) is None
    assert (await stage.call("live_metrics"))["deployments"]["b"]["requests_per_s"] is None


@staged()
async def test_live_metrics_wait_for_measurements_up_to_the_limit(
    stage: Stage,
) -> None:
    await stage.deploy()
    (replica,) = stage.running_of("b")
    replica.metrics = dict  # type: ignore[attr-defined]  # nothing is measured

    async def duration_s(**options: float) -> float:
        began = stage.clock.now()
        found = await stage.call("live_metrics", **options)
        assert found["deployments"]["b"]["requests_per_s"] is None
        return stage.clock.now() - began

    assert await duration_s() == 0
    assert 5 <= await duration_s(wait_s=5.0) < 5.5
    assert MAX_WAIT_S <= await duration_s(wait_s=3600.0) < MAX_WAIT_S + 0.5


def test_calls_go_to_the_backends_that_have_traffic() -> None:
    state = state_of(
        backend("b"), backend("c"), backend("d"), endpoint("e", traffic={"b": 3.0, "c": 1.0, "d": 0.0})
    )
    observed = Observed()
    for at, begun in ((10.0, 0), (11.0, 40)):
        calls = [["b", name, begun, 0] for name in ("e", "d", "unknown")]
        observed.live.router("r", {"calls": calls, "queued": {}}, at)
    found = live_metrics(state, observed, 11.0, 99.0)
    assert {(each["to"], each["requests_per_s"]) for each in found["calls"]} == {
        ("b", 30.0),
        ("c", 10.0),
        ("d", 40.0),
    }
    assert (found["time"], set(found["deployments"]), found["replicas"]) == (99.0, {"b", "c", "d"}, {})


def test_the_metrics_are_measured_once_all_that_run_have_reported_twice() -> None:
    state = state_of(
        backend("b"),
        replica("b#1"),
        replica("b#2", ReplicaState.STARTING),
        ProxyRecord("p", "w1", "h", 1, 8000),
        ProxyRecord("q", "w1", "h", 1, 8000, is_leaving=True),
    )
    observed = Observed()
    assert not is_measured(state, observed, 11.0)
    for at in (10.0, 11.0):
        observed.live.proxy("p", sample(1), at)
        assert not is_measured(state, observed, at)
    for at in (10.0, 11.0):
        observed.live.replica("b#1", sample(1), at)
    assert is_measured(state, observed, 11.0)
