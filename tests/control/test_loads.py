"""Reported loads: when they are stale, and how samples are computed from them."""

from __future__ import annotations

import pytest

from daskserve.control.observed.loads import STALE_S, Loads


def test_a_sample_adds_up_what_routers_and_replicas_say() -> None:
    loads = Loads()
    loads.sample("b", [], 9.0)
    loads.report("r1", {"b": [3, 1], "c": [9, 9]}, 10.0)
    loads.report("r2", {"b": [1, 1]}, 10.0)
    for at, ended in ((9.0, 100), (10.0, 110)):
        loads.answered("b", "b#1", {"ongoing": 3, "ended": ended}, at)
        loads.answered("b", "b#2", {"ongoing": 2, "ended": 2 * ended}, at)
    sample = loads.sample("b", ["b#1", "b#2"], 11.0)
    assert (sample.at, sample.queued, sample.ongoing) == (11.0, 4.0, 5.0)
    assert sample.rate == pytest.approx(30 / 2)
    assert loads.ongoing(["b#1", "b#3"], 11.0) == {"b#1": 3.0}
    assert loads.sample("b", ["b#1", "b#2"], 12.0).rate == 0.0


def test_a_request_that_is_on_its_way_counts_as_running() -> None:
    loads = Loads()
    loads.report("r1", {"b": [0, 8]}, 10.0)
    loads.answered("b", "b#1", {"ongoing": 0, "ended": 0}, 10.0)
    assert loads.sample("b", ["b#1"], 10.0).ongoing == 8.0


def test_requests_before_the_first_report_do_not_count_in_the_rate() -> None:
    loads = Loads()
    loads.answered("b", "b#1", {"ongoing": 0, "ended": 1000}, 10.0)
    assert loads.sample("b", ["b#1"], 10.5).rate == 0.0


def test_nothing_is_counted_for_backends_without_samples() -> None:
    loads = Loads()
    for at in range(10):
        loads.answered("b", "b#1", {"ongoing": 0, "ended": 100 * at, "latency_counts": [100 * at]}, float(at))
    first = loads.sample("b", ["b#1"], 10.0)
    assert (first.rate, first.latency_counts) == (0.0, ())
    loads.answered("b", "b#1", {"ongoing": 0, "ended": 910, "latency_counts": [910]}, 10.5)
    assert loads.sample("b", ["b#1"], 11.0).latency_counts == (10,)


def test_latencies_are_counted_between_samples() -> None:
    loads = Loads()
    loads.sample("b", [], 9.0)
    loads.answered("b", "b#1", {"ongoing": 0, "ended": 3, "latency_counts": [1, 2, 0]}, 10.0)
    loads.answered("b", "b#1", {"ongoing": 0, "ended": 6, "latency_counts": [1, 3, 2]}, 11.0)
    loads.answered("b", "b#2", {"ongoing": 0, "ended": 0, "latency_counts": [0, 0, 0]}, 10.0)
    loads.answered("b", "b#2", {"ongoing": 0, "ended": 1, "latency_counts": [1, 0, 0]}, 11.0)
    assert loads.sample("b", ["b#1", "b#2"], 11.0).latency_counts == (1, 1, 2)


def test_reports_expire() -> None:
    loads = Loads()
    loads.report("dead", {"b": [5, 5]}, 10.0)
    loads.answered("b", "b#1", {"ongoing": 5, "ended": 0}, 10.0)
    assert loads.queued("b", 10.0 + STALE_S) == 5
    later = 10.1 + STALE_S
    sample = loads.sample("b", ["b#1"], later)
    assert (sample.queued, sample.ongoing) == (0.0, 0.0)
    loads.report("alive", {"c": [1, 0]}, later)
    assert loads.queue_lengths() == {"alive": {"c": 1}}


def test_an_idle_router_is_removed_immediately() -> None:
    loads = Loads()
    loads.report("r", {"b": [5, 0]}, 10.0)
    loads.report("r", {}, 10.1)
    assert loads.queued("b", 10.1) == 0
    assert loads.queue_lengths() == {}
