"""An instance that takes over from another one listens when its replicas run; the other one drains."""

from __future__ import annotations

import asyncio

from control_harness import app_spec, backend, goal, replica, state_of
from controller_harness import ScriptedStore, Stage, play, staged

from daskserve.common.types import ReplicaState
from daskserve.control.observed.observed import Observed
from daskserve.control.proxies.take_over import all_run
from daskserve.options.http import HTTPOptions


def seen(*tags: str) -> Observed:
    observed = Observed()
    observed.ready.update({tag: {} for tag in tags})
    return observed


def test_replicas_count_when_this_controller_has_seen_them() -> None:
    """The records in the store may be those of another cluster."""
    state = state_of(backend(num_replicas=2), replica("b#1"), replica("b#2"))
    assert not all_run(state, seen())
    assert not all_run(state, seen("b#1"))
    assert all_run(state, seen("b#1", "b#2"))


def test_replicas_that_start_do_not_count() -> None:
    state = state_of(backend(), replica("b#1", ReplicaState.STARTING))
    assert not all_run(state, seen("b#1"))


def test_a_change_under_way_and_a_deletion_are_not_waited_for() -> None:
    assert all_run(state_of(backend(goal="g"), goal()), seen())
    assert all_run(state_of(backend(is_deleting=True)), seen())


def test_proxies_of_an_instance_that_takes_over_wait_for_its_replicas() -> None:
    store = ScriptedStore()

    async def first(stage: Stage) -> None:
        await stage.create(num_replicas=2)

    async def second(stage: Stage) -> None:
        stage.start_s = 3.0
        began = stage.clock.now()
        await stage.until(lambda: stage.proxies)
        assert len(stage.running) == 2
        assert began + 3 <= stage.clock.now() < began + 4, "soon, not at the next regular check"

    play(first, store=store)
    play(second, store=store, http=HTTPOptions(take_over=True))


@staged(http=HTTPOptions())
async def test_an_instance_that_was_taken_over_drains_although_it_is_idle(stage: Stage) -> None:
    """Its proxies share the port, so that requests may arrive at any time."""
    await stage.create()
    stage.drain_s = 2.0
    await stage.store.claim_epoch()  # by another cluster
    began = stage.clock.now()
    await asyncio.wait_for(stage.cluster.drain(), 60)
    assert stage.clock.now() >= began + 2
    assert not stage.running


@staged(http=HTTPOptions(), opens_with_route=True)
async def test_an_instance_may_listen_only_once_it_has_a_route(stage: Stage) -> None:
    """From then on it may always listen, even with a new controller, or without a route."""
    await stage.create()
    await stage.run("hidden", route=None)
    stage.start_s = 20.0
    goal = (await stage.deploy_apps(app_spec("shop", route="/shop")))["goals"]["shop"]
    await stage.clock.sleep(15.0)
    assert not stage.proxies
    began = stage.clock.now()
    await stage.calls.wait_for_goal(goal, None)
    assert await stage.call("wait_for_http", timeout_s=1.0)
    assert stage.clock.now() < began + 6, "soon, not at the next regular check"
    await stage.call("delete_application", name="shop")
    await stage.until(lambda: not stage.running_of("shop/front"))
    await stage.crash_controller()
    await stage.clock.sleep(15.0)
    assert len(stage.proxies) == 1
