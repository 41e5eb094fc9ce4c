"""Applications on a real controller in virtual time: start order, one change, one rollback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from control_harness import app_spec, backend, replica, spec, state_of
from controller_harness import ScriptedReplica, Stage, boom, hang, staged
from tables import each_case

from daskserve.common.types import UNREADY, ReplicaState
from daskserve.control.backend.application import neighbours
from daskserve.control.decisions.applications import deploy
from daskserve.control.records.records import AppRecord, BackendRecord, GoalRecord
from daskserve.control.records.state import State
from daskserve.errors import (
    AlreadyRegisteredError,
    BadRequestError,
    DeletedError,
    NoCapacityError,
    NotFoundError,
    ReplicaStartError,
    RequestTimeoutError,
)
from daskserve.options.specs import ApplicationSpec

ONE = app_spec("x", route="/x")
CHAIN = {"back": (), "middle": ("back",), "front": ("middle",)}


def backend_of(tag: str) -> str:
    return tag.rpartition("#")[0]


def version_of(replica: ScriptedReplica) -> str:
    return replica.message.code.decode()


def fail_in(backend: str, version: str = "2") -> Callable[[ScriptedReplica], Awaitable[None]]:
    async def start(replica: ScriptedReplica) -> None:
        if replica.message.backend_tag == backend and version_of(replica) == version:
            await boom(f"{backend} is broken")(replica)

    return start


@staged()
async def test_an_application_starts_by_dependency_and_gets_its_route_last(stage: Stage) -> None:
    pending: list[dict[str, bool]] = []

    async def look(replica: ScriptedReplica) -> None:
        pending.append({route: each["pending"] for route, each in (await stage.published("routes")).items()})

    stage.start = look
    await stage.run(graph=CHAIN)
    assert [backend_of(tag) for tag in stage.started] == ["back", "middle", "front"]
    assert pending == 3 * [{"/": True}]
    published = await stage.published("routes")
    assert (list(published), "pending" in published["/"]) == (["/"], False)
    assert (published["/"]["endpoint"], published["/"]["application"]) == ("front", "default")
    assert await stage.call("get_application", name="default") == {
        "name": "default",
        "route": "/",
        "ingress": "front",
        "deployments": {"back": "back", "middle": "middle", "front": "front"},
        "request_id": "request-0",
    }


@staged()
async def test_only_the_first_deploy_of_an_application_has_a_pending_route(stage: Stage) -> None:
    seen: list[dict[str, bool]] = []

    async def look(replica: ScriptedReplica) -> None:
        routes = await stage.published("routes")
        seen.append({route: each.get("pending", False) for route, each in routes.items()})
        if version_of(replica) == "broken":
            await boom("broken")(replica)

    stage.start = look
    with pytest.raises(ReplicaStartError):
        await stage.run(graph={"front": ()}, front={"version": "broken"})
    assert (seen[-1], await stage.published("routes")) == ({"/": True}, {})
    stage.start_s = 1.0
    first = asyncio.create_task(stage.run(graph={"front": ()}, route="/first", front={"version": "1"}))
    await stage.clock.sleep(0.5)
    assert list(await stage.published("routes")) == ["/first"]
    first.cancel()
    stage.start_s = 0.01
    await stage.run(graph={"front": ()}, front={"version": "1"})
    await stage.run(graph={"front": ()}, route="/moved", front={"version": "2"})
    assert seen[-2:] == [{"/": True}, {"/": False}]
    assert list(await stage.published("routes")) == ["/moved"]


@staged(workers=4)
async def test_applications_that_come_up_together_complete_in_few_transactions(stage: Stage) -> None:
    """A transaction takes much longer than a decision, so a large file must not need one per application."""
    before = stage.store.commits
    names = [f"a{number:02d}" for number in range(16)]
    graph = {"{}-back": (), "{}-front": ("{}-back",)}
    specs = [
        app_spec(
            name,
            {tag.format(name): tuple(need.format(name) for need in needs) for tag, needs in graph.items()},
            route=f"/{name}",
        )
        for name in names
    ]
    answer = await stage.deploy_apps(*specs)
    for goal in answer["goals"].values():
        await stage.call("wait_for_goal", goal_id=goal, timeout_s=60.0)
    assert stage.store.commits - before < len(names)
    published = await stage.published("routes")
    assert {route for route, each in published.items() if "pending" not in each} == {f"/{n}" for n in names}
    assert len(stage.started) == 2 * len(names)


@staged(workers=4)
async def test_backends_without_a_replica_are_published_as_unready(stage: Stage) -> None:
    assert await stage.published(UNREADY) == ()
    stage.start_s = 1.0
    idle = {"min_replicas": 0, "initial_replicas": 0, "max_replicas": 2}
    sleeper = {"autoscaling_config": idle}
    running = asyncio.create_task(
        stage.run("shop", {"idle": (), "back": (), "front": ("back", "idle")}, idle=sleeper)
    )
    await stage.clock.sleep(0.5)
    assert await stage.published(UNREADY) == ("shop/back", "shop/front")
    await stage.clock.sleep(1)
    assert await stage.published(UNREADY) == ("shop/front",)
    await running
    assert await stage.published(UNREADY) == ()
    (lost,) = {each.worker for each in stage.running_of("shop/back")}
    stage.cluster.remove_worker(lost)
    await stage.until(lambda: not stage.running_of("shop/back"))
    assert "shop/back" in await stage.published(UNREADY)
    await stage.until(lambda: stage.running_of("shop/back"))
    await stage.clock.sleep(0.1)
    assert await stage.published(UNREADY) == ()


@staged()
async def test_independent_deployments_start_in_parallel(stage: Stage) -> None:
    stage.start_s = 1.0
    began = stage.clock.now()
    await stage.run(graph={"a": (), "b": (), "c": (), "front": ("a", "b", "c")})
    assert stage.clock.now() - began < 2.5


@staged()
async def test_a_deploy_is_one_transaction(stage: Stage) -> None:
    written: list[Mapping[str, bytes | None]] = []
    stage.store.after_commit = written.append
    graph: dict[str, tuple[str, ...]] = {f"d{n}": () for n in range(10)}
    await stage.deploy_apps(app_spec("x", graph), app_spec("y", graph, route="/y"))
    assert {key for key in written[0] if key.startswith(("app/", "backend/"))} == {
        "app/x",
        "app/y",
        *(f"backend/{name}/d{n}" for name in "xy" for n in range(10)),
    }


@staged()
async def test_each_level_of_a_chain_is_one_transaction(stage: Stage) -> None:
    """One transaction records that a deployment is up, and starts the deployment that waited for it."""
    written: list[Mapping[str, bytes | None]] = []
    stage.store.after_commit = written.append
    await stage.run(graph=CHAIN)
    levels = [sorted(backend_of(key) for key in keys if key.startswith("replica/")) for keys in written]
    assert levels == [
        [],
        ["replica/back"],
        ["replica/back", "replica/middle"],
        ["replica/front", "replica/middle"],
        ["replica/front"],
    ]


@staged()
async def test_the_same_application_again_restarts_nothing_and_keeps_traffic(stage: Stage) -> None:
    await stage.run(graph=CHAIN)
    await stage.create("other")
    await stage.call("set_traffic", name="front", traffic={"front": 0.5, "other": 0.5})
    await stage.call("shadow_traffic", name="back", backend="other", proportion=0.25)
    commits, started = stage.store.commits, list(stage.started)
    answer = await stage.deploy_apps(app_spec(graph=CHAIN, request_id="again"))
    assert (answer["goals"], answer["updating"]) == ({"default": None}, {"default": False})
    assert stage.store.commits == commits + 1, "only that the last call has deployed it"
    await stage.run(graph=CHAIN, middle={"version": "2"})
    assert [backend_of(tag) for tag in stage.started[len(started) :]] == ["middle"]
    assert (await stage.published("endpoint/front"))["traffic"] == {"front": 0.5, "other": 0.5}
    assert (await stage.published("endpoint/back"))["shadows"] == {"other": 0.25}


@staged()
async def test_a_failed_update_takes_back_the_whole_application(stage: Stage) -> None:
    await stage.run(graph={"back": (), "old": (), "front": ("back", "old")}, route="/v1")
    before = dict(await stage.published("endpoint/front"))
    stage.start = fail_in("front")
    with pytest.raises(ReplicaStartError, match="front is broken"):
        await stage.run(
            graph={"back": (), "new": (), "front": ("back", "new")},
            route="/v2",
            back={"version": "2"},
            front={"version": "2"},
        )
    await stage.until(lambda: not stage.running_of("new"))
    assert {version_of(each) for each in stage.running_of("front")} == {"1"}
    await stage.until(lambda: [version_of(each) for each in stage.running_of("back")] == ["1"])
    assert stage.running_of("old")
    assert list(await stage.published("routes")) == ["/v1"]
    assert await stage.published("endpoint/front") == before
    assert await stage.published("endpoint/new") is None
    status = await stage.app_status()
    assert status["status"] == "DEPLOY_FAILED"
    assert "front is broken" in status["message"]
    stage.start = None
    await stage.run(graph={"back": (), "old": (), "front": ("back", "old")}, route="/v1")
    assert (await stage.app_status())["status"] == "RUNNING"


@staged()
async def test_a_failed_first_deploy_leaves_only_the_reason(stage: Stage) -> None:
    stage.start = fail_in("front", "1")
    with pytest.raises(ReplicaStartError):
        await stage.run()
    await stage.until(lambda: not stage.stored("backend"))
    assert not stage.stored("endpoint")
    status = await stage.app_status()
    assert (status["status"], status["route_prefix"]) == ("DEPLOY_FAILED", None)
    assert status["deployments"]["front"]["status"] == "DEPLOY_FAILED"
    with pytest.raises(NotFoundError, match="front is broken"):
        await stage.call("get_application", name="default")
    stage.start = None
    await stage.run("other")  # the route is free
    await stage.change("delete_application", name="default")
    assert list(stage.stored("app")) == ["app/other"]


@staged()
async def test_an_application_without_room_fails_as_a_whole(stage: Stage) -> None:
    with pytest.raises(NoCapacityError, match="Cannot scale deployment 'front'"):
        await stage.run(front={"actor_options": {"num_gpus": 1}}, timeout_s=5.0)
    await stage.until(lambda: not stage.stored("backend"))


@staged()
async def test_dropped_deployments_stop_after_the_new_ingress_is_up(stage: Stage) -> None:
    await stage.run(graph={"deep": (), "old": ("deep",), "front": ("old",)})
    stage.stopped.clear()

    async def look(replica: ScriptedReplica) -> None:
        assert not stage.stopped

    stage.start = look
    stage.drain_s = 1.0
    await stage.run(graph={"front": ()}, front={"version": "2"})
    await stage.until(lambda: not stage.stored("replica") or len(stage.stored("backend")) == 1)
    assert [backend_of(tag) for tag, _ in stage.stopped] == ["front", "old", "deep"]
    assert len(stage.stored("endpoint")) == 1


@staged()
async def test_a_dropped_deployment_stays_while_an_endpoint_uses_it(stage: Stage) -> None:
    await stage.run(graph={"old": (), "front": ("old",)})
    endpoint: dict[str, Any] = {"route": "/e", "methods": ["GET"], "backend": "old", "request_id": "r"}
    await stage.change("create_endpoint", name="e", **endpoint)
    await stage.run(graph={"front": ()}, front={"version": "2"})
    used = stage.stored("backend")["backend/old"]
    assert isinstance(used, BackendRecord)
    assert not used.is_deleting
    await stage.change("delete_endpoint", name="e")
    await stage.until(lambda: set(stage.stored("backend")) == {"backend/front"})


@staged()
async def test_deletion_drains_the_ingress_first_and_what_it_calls_after(stage: Stage) -> None:
    await stage.run("x", CHAIN)
    await stage.run("y", CHAIN, route="/y")
    stage.drain_s = 2.0
    answer = await stage.call("delete_application", name="x")
    assert list(await stage.published("routes")) == ["/y"]
    assert await stage.published("endpoint/x/front") is None
    assert await stage.published("endpoint/x/middle") is not None
    assert (await stage.app_status("x"))["status"] == "DELETING"
    with pytest.raises(NotFoundError, match="there are: y"):
        await stage.call("get_application", name="x")
    await stage.calls.wait_for_goal(answer["goal"], None)
    assert [backend_of(tag) for tag, _ in stage.stopped] == ["x/front", "x/middle", "x/back"]
    assert list(stage.stored("app")) == ["app/y"]
    assert len(stage.stored("backend")) == len(stage.stored("endpoint")) == 3
    assert (await stage.call("delete_application", name="x"))["goal"] is None


@staged()
async def test_a_deployment_without_replicas_waits_for_its_callers_too(stage: Stage) -> None:
    await stage.run()
    await stage.call("set_target_capacity", percent=0)
    await stage.until(lambda: not stage.running)
    answer = await stage.call("delete_application", name="default")
    await stage.calls.wait_for_goal(answer["goal"], None)
    assert not {**stage.stored("backend"), **stage.stored("endpoint"), **stage.stored("app")}


@staged()
async def test_names_and_routes_in_use_are_refused_before_anything_is_written(stage: Stage) -> None:
    await stage.run("x", route="/x")
    await stage.create("back")
    await stage.endpoint("e", "/e", "back")
    commits = stage.store.commits
    with pytest.raises(AlreadyRegisteredError, match="route '/x': it is in use by application 'x'"):
        await stage.run("y", route="/x/")
    with pytest.raises(AlreadyRegisteredError, match="in use by endpoint 'e'"):
        await stage.run("y", route="/e")
    with pytest.raises(AlreadyRegisteredError, match="a backend of that name"):
        await stage.run(route="/new")
    with pytest.raises(AlreadyRegisteredError, match="in use by application 'p'"):
        await stage.deploy_apps(app_spec("p", route="/p"), app_spec("q", route="/p"))
    with pytest.raises(AlreadyRegisteredError, match="in use by application 'x'"):
        await stage.endpoint("f", "/x", "back")
    with pytest.raises(AlreadyRegisteredError, match="in use by application 'x'"):
        await stage.deploy("d", route="/x")
    with pytest.raises(BadRequestError, match="a deployment of application 'x'"):
        await stage.delete("x/back")
    with pytest.raises(BadRequestError, match="a deployment of application 'x'"):
        await stage.change("delete_deployment", name="x/front")
    for name in ("x/front", "x/back"):
        with pytest.raises(BadRequestError, match="a part of application 'x' and cannot be deleted alone"):
            await stage.change("delete_endpoint", name=name)
    with pytest.raises(AlreadyRegisteredError, match="'x/front' is already registered"):
        await stage.endpoint("x/front", "/other", "back")
    with pytest.raises(BadRequestError, match=r"needs \['z/back'\], which must come before it"):
        await stage.deploy_apps(app_spec("z", {"front": ("back",)}, route="/z"))
    assert stage.store.commits == commits
    await stage.change("delete_endpoint", name="e")  # an endpoint without an application
    assert list(await stage.published("routes")) == ["/x"]


@staged()
async def test_a_newer_deploy_supersedes_a_pending_one_and_falls_back_to_what_was_complete(
    stage: Stage,
) -> None:
    await stage.run(route="/one")
    stage.start_s = 5.0
    second = {"back": (), "extra": (), "front": ("back", "extra")}
    answer = await stage.deploy_apps(
        app_spec(graph=second, route="/two", request_id="r2", front={"version": "2"})
    )
    await stage.clock.sleep(1.0)
    stage.start = fail_in("front", "3")
    with pytest.raises(ReplicaStartError):
        await stage.run(route="/three", front={"version": "3"})
    first = stage.store.records()[f"goal/{answer['goals']['default']}"]
    assert isinstance(first, GoalRecord)
    assert first.state == "DONE"
    await stage.until(lambda: len(stage.stored("backend")) == 2)
    app = stage.store.records()["app/default"]
    assert isinstance(app, AppRecord)
    assert (app.route, list(app.deployments)) == ("/one", ["back", "front"])
    assert {version_of(each) for each in stage.running_of("front")} == {"1"}


@staged()
async def test_a_failed_deploy_brings_back_the_version_of_what_it_dropped(stage: Stage) -> None:
    """Even if a superseded deploy was updating the dropped deployment."""
    await stage.run()
    stage.start = hang
    await stage.deploy_apps(
        app_spec(
            graph={"back": (), "front": ("back",)},
            request_id="r2",
            back={"version": "2"},
            front={"version": "2"},
        )
    )
    await stage.clock.sleep(1.0)
    stage.start, stage.start_s = fail_in("front", "3"), 5.0  # long enough to check the state
    with pytest.raises(ReplicaStartError):
        await stage.run(graph={"front": ()}, front={"version": "3"})
    await stage.until(lambda: sorted(stage.stored("code")) == ["code/back@1", "code/front@1"])
    assert [version_of(each) for each in stage.running_of("back")] == ["1"]
    assert (await stage.app_status())["status"] == "DEPLOY_FAILED"


@staged(workers=6)
async def test_a_controller_that_takes_over_completes_the_change(stage: Stage) -> None:
    stage.start_s = 1.0
    app = app_spec(graph=CHAIN)
    answer = await stage.deploy_apps(app)
    for _ in range(3):
        await stage.clock.sleep(0.7)
        await stage.crash_controller()
    assert (await stage.deploy_apps(app))["goals"] in (answer["goals"], {"default": None})
    await stage.calls.wait_for_goal(answer["goals"]["default"], None)
    assert (await stage.app_status())["status"] == "RUNNING"


@staged()
async def test_an_update_of_one_deployment_during_a_deploy_becomes_part_of_it(stage: Stage) -> None:
    await stage.run()
    stage.start = fail_in("front")
    stage.start_s = 2.0
    await stage.deploy_apps(
        app_spec(graph={"back": (), "front": ("back",)}, request_id="r2", front={"version": "2"})
    )
    with pytest.raises(ReplicaStartError):
        await stage.update("back", num_replicas=2)
    await stage.until(lambda: len(stage.running_of("back")) == 1)
    assert (await stage.app_status())["status"] == "DEPLOY_FAILED"


@staged()
async def test_a_change_of_a_deployment_that_the_new_version_drops_ends_with_it(stage: Stage) -> None:
    await stage.run()
    stage.start_s = 2.0
    await stage.deploy_apps(app_spec(graph={"front": ()}, request_id="r2", front={"version": "2"}))
    with pytest.raises(DeletedError, match="'back' was deleted"):
        await stage.update("back", num_replicas=200)  # more than the workers can run
    await stage.until(lambda: list(stage.stored("backend")) == ["backend/front"])


@staged()
async def test_a_called_deployment_takes_requests_until_its_callers_have_drained(stage: Stage) -> None:
    await stage.run(graph=CHAIN)
    stage.drain_s = 5.0
    await stage.call("delete_application", name="default")
    await stage.until(lambda: len(stage.stopped) == 1)
    assert "ending" in await stage.published("backend/front")
    assert "ending" not in await stage.published("backend/middle")
    await stage.until(lambda: len(stage.stopped) == 2)
    assert "ending" in await stage.published("backend/middle")
    assert "ending" not in await stage.published("backend/back")


# ---- whom a change wakes


def chain_of(front: ReplicaState) -> State:
    return state_of(
        AppRecord("a", "/", {name: name for name in CHAIN}, goal="g"),
        *(backend(tag, application="a", goal="g", needs=needs) for tag, needs in CHAIN.items()),
        replica("front#1", front),
    )


def test_a_deployment_that_comes_up_wakes_those_that_call_it() -> None:
    up = replica("back#1")
    state = chain_of(ReplicaState.STARTING)
    wakes = partial(neighbours, state, state.backends["back"])
    assert wakes({up.key: up}) == ["middle"]
    assert wakes({up.key: up}, {"middle"}) == []
    assert wakes({up.key: replica("back#1", ReplicaState.STARTING)}) == []
    assert wakes({up.key: replica("back#1", ReplicaState.SHOULD_START)}) == ["middle"]
    assert wakes({up.key: None}) == ["middle"]


def test_the_ingress_checks_whether_a_change_is_complete_once_it_is_up() -> None:
    state = chain_of(ReplicaState.RUNNING)
    up = replica("back#1")
    assert neighbours(state, state.backends["back"], {up.key: up}, {"front", "middle"}) == ["front"]


@staged()
async def test_a_change_whose_replica_never_learns_its_rank_ends_with_its_time(stage: Stage) -> None:
    """The new replica starts with rank 1 beside the old one, and must get rank 0 once the old one is gone."""
    await stage.run(front={"version": "1"})
    stage.reconfigure = hang
    with pytest.raises(RequestTimeoutError, match="within 5 s"):
        await stage.run(front={"version": "2"}, timeout_s=5.0)


@each_case(
    ("specs", "kind", "message"),
    [
        ([app_spec("x"), app_spec("x")], BadRequestError, "Application 'x' is given twice; deploy it once"),
        ([app_spec("x", {})], BadRequestError, "Application 'x' has no deployments"),
        (
            [replace(ONE, deployments=ONE.deployments * 2)],
            BadRequestError,
            "Application 'x' has two deployments named 'front'",
        ),
        (
            [replace(ONE, deployments=(*ONE.deployments, replace(ONE.deployments[0], spec=spec("other"))))],
            BadRequestError,
            "Application 'x' has two deployments named 'front'",
        ),
        (
            [ONE, replace(ONE, name="y", route="/y")],
            AlreadyRegisteredError,
            "'front' of application 'x' is in two applications of this call",
        ),
        (
            [ONE, app_spec("y", route="/x/")],
            AlreadyRegisteredError,
            "application 'y' at route '/x': it is in use by application 'x', which is deployed by the same",
        ),
        (
            [app_spec("x", {"front": ("back",), "back": ()})],
            BadRequestError,
            r"'front' of application 'x' needs \['x/back'\], which must come before it",
        ),
    ],
)
def test_conflicting_deployments_are_refused(
    specs: list[ApplicationSpec], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        deploy(State(), specs, new_goal=lambda: "g", now=0.0)


def test_an_application_that_is_not_the_expected_one_is_kept() -> None:
    state = State()
    first = app_spec("x", request_id="first")
    deployed = deploy(state, [first], new_goal=lambda: "g", now=0.0, expected={"x": ""}, by="the one program")
    state.apply(deployed.change)
    again = deploy(state, [first], new_goal=lambda: "g2", now=1.0, expected={"x": ""})
    assert not again.change, "the retry of the call itself"
    second = app_spec("x", request_id="second")
    with pytest.raises(AlreadyRegisteredError, match="'x' runs already, deployed by the one program"):
        deploy(state, [second], new_goal=lambda: "g2", now=1.0, expected={"x": ""})
    with pytest.raises(AlreadyRegisteredError, match="'x' runs already"):
        deploy(state, [second], new_goal=lambda: "g2", now=1.0, expected={"x": "zero"})
    assert deploy(state, [second], new_goal=lambda: "g2", now=1.0, expected={"x": "first"}).change
    assert deploy(state, [second], new_goal=lambda: "g2", now=1.0).change
