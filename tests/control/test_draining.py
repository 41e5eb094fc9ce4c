"""When an instance ends, requests complete, callers stop first, and the records stay."""

from __future__ import annotations

import asyncio

import pytest
from control_harness import backend, endpoint, replica, state_of
from controller_harness import Stage, staged

from daskserve.control.proxies import shutdown_order as departure
from daskserve.control.records.records import AppRecord
from daskserve.errors import NotRunningError
from daskserve.options.http import HTTPOptions

CHAIN = {"back": (), "middle": ("back",), "front": ("middle",)}


def config(grace_s: float) -> dict[str, float]:
    return {"experimental_graceful_shutdown_timeout_s": grace_s}


def test_backends_drain_one_after_another_only_where_one_calls_another() -> None:
    state = state_of(
        backend("a", config=config(5), application="x"),
        backend("b", config=config(3), application="x", needs=("a",)),
        backend("c", config=config(1), application="x"),
        backend("d", config=config(2), application="x", needs=("b", "c")),
        backend("e", config=config(8)),
        backend("f", config=config(100), is_forced=True),
        AppRecord("x", "/x", {each: each for each in "abcd"}),
    )
    assert departure.grace_s(state) == 8
    assert departure.limit_s(state) == 10
    assert departure.limit_s(state_of()) == 0


def test_requests_under_way_are_counted_by_application() -> None:
    state = state_of(
        *(backend(each, application="x") for each in ("a", "b")),
        *(backend(each, application="y") for each in ("c", "d")),
        backend("e"),
        AppRecord("x", "/x", {"a": "a", "b": "b"}),
        AppRecord("y", "/y", {"c": "c", "d": "d"}),
        *(replica(f"{each}#{number}") for each in "abcde" for number in (1, 2)),
    )

    def count(**ongoing: int) -> dict[str, int]:
        replicas = [{"name": f"i/replica/{each}#1", "ongoing": n} for each, n in ongoing.items()]
        return departure.requests_under_way(
            state, [*replicas, {"name": "i/proxy/head", "ongoing": 7}, {"name": "i/replica/gone#1"}]
        )

    assert count(a=5, b=2, c=1, d=0, e=3) == {"x": 2, "y": 1, "e": 3}
    assert count() == {"": 7}, "they wait for a replica"


def test_an_endpoint_stays_while_another_deployment_may_call_it() -> None:
    state = state_of(
        backend("a", application="x", goal="g"),
        backend("b", application="x", needs=("a",)),
        backend("old"),
        *(endpoint(each, None, is_legacy=False) for each in "ab"),
        endpoint("old", traffic={"old": 1.0}),
        AppRecord("x", "/x", {"a": "a", "b": "b"}, goal="g"),
    )
    change = departure.leaving(state)
    assert {key for key, record in change.items() if record is None} == {"endpoint/b", "endpoint/old"}
    leaving = [record for record in change.values() if record is not None]
    assert len(leaving) == 4
    assert all(each.is_deleting and each.goal is None for each in leaving)  # type: ignore[union-attr]


@staged()
async def test_the_callers_drain_first_and_the_store_keeps_all_records_but_those_of_replicas(
    stage: Stage,
) -> None:
    await stage.run(graph=CHAIN)
    await stage.deploy("alone", route="/alone")
    stage.ongoing, stage.drain_s = 1, 4.0
    stored, began = stage.store.records(), stage.clock.now()
    await stage.cluster.drain()
    stopped = [tag.rpartition("#")[0] for tag, _ in stage.stopped]
    assert [each for each in stopped if each != "alone"] == ["front", "middle", "back"]
    assert stopped.index("alone") < 2  # no deployment calls it
    assert {grace_s for _, grace_s in stage.stopped} == {20.0}
    assert 12.0 <= stage.clock.now() - began < 13.0
    assert not stage.running
    assert stage.store.records() == {
        key: each for key, each in stored.items() if not key.startswith("replica/")
    }
    with pytest.raises(NotRunningError, match="is being shut down"):
        await stage.cluster.program.call(
            await stage.cluster.program.controller(), "delete_application", name="default"
        )


@staged()
async def test_an_idle_instance_does_not_drain(stage: Stage) -> None:
    await stage.run(graph=CHAIN)
    began = stage.clock.now()
    await stage.cluster.drain()
    assert stage.clock.now() == began
    assert not stage.stopped
    assert len(stage.running) == 3
    assert not stage.stored("replica"), "an instance that starts on the store later does not miss them"
    await stage.run(graph=CHAIN, version="2")  # until the end, it works as before


@staged(http=HTTPOptions())
async def test_proxies_close_before_replicas_and_do_not_return(stage: Stage) -> None:
    await stage.run(graph=CHAIN)
    await stage.until(lambda: stage.proxies)
    stage.ongoing, stage.drain_s = 1, 8.0
    draining = asyncio.create_task(stage.cluster.drain())
    await stage.until(lambda: not stage.proxies)
    assert not stage.stopped
    await draining
    assert not stage.proxies
    assert len(stage.stopped) == 3


@staged()
async def test_a_controller_that_dies_does_not_hold_up_the_end(stage: Stage) -> None:
    await stage.run(graph=CHAIN)
    stage.ongoing, stage.drain_s = 1, 15.0
    began = stage.clock.now()
    draining = asyncio.create_task(stage.cluster.drain())
    await stage.until(lambda: stage.stopped)
    await stage.crash_controller()
    await draining
    assert stage.clock.now() - began < 1
    assert set(stage.stored("app")) == {"app/default"}


@staged()
async def test_a_worker_that_does_not_answer_is_not_waited_for(stage: Stage) -> None:
    await stage.run(graph={"front": ()})
    stage.ongoing = 1
    (worker,) = stage.replica_workers()
    assert worker != (await stage.cluster.program.controller()).worker
    stage.cluster.suspend_worker(worker)
    began = stage.clock.now()
    await stage.cluster.drain()
    assert stage.clock.now() - began <= 1
    stage.cluster.suspend_worker(worker, is_suspended=False)
