"""A withdrawn change restores the state before it, and ends nothing that other programs have deployed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from control_harness import app_spec
from controller_harness import Stage, hang, staged
from tables import each_case

from daskserve.errors import AlreadyRegisteredError, DeployError, ReplicaStartError, SupersededError
from daskserve.options.specs import ApplicationSpec, BackendSpec

GRAPH: Mapping[str, tuple[str, ...]] = {"back": (), "front": ("back",)}


def version(number: str, request_id: str) -> ApplicationSpec:
    return app_spec(graph=GRAPH, request_id=request_id, back={"version": number}, front={"version": number})


async def begun(stage: Stage, spec: ApplicationSpec) -> str:
    """Deploy an application whose new replicas never finish starting; return the goal once one starts."""
    stage.start, count = hang, len(stage.started)
    goal: str = (await stage.deploy_apps(spec))["goals"][spec.name]
    await stage.until(lambda: len(stage.started) > count)
    stage.start = None
    return goal


def versions(stage: Stage) -> set[bytes]:
    return {each.message.code for each in stage.running.values()}


async def withdraw(stage: Stage, *requests: str) -> None:
    await stage.call("withdraw", requests=list(requests), by="a program")


@staged()
async def test_a_change_that_is_withdrawn_leaves_the_version_from_before(stage: Stage) -> None:
    await stage.run(graph=GRAPH, request_id="old")
    goal = await begun(stage, version("2", "new"))
    await withdraw(stage, "new")
    with pytest.raises(DeployError, match="undone: a program was interrupted"):
        await stage.calls.wait_for_goal(goal, None)
    status = await stage.app_status()
    assert (status["status"], status["message"], status["route_prefix"]) == ("RUNNING", "", "/")
    assert list(await stage.published("routes")) == ["/"]
    await stage.until(lambda: len(stage.stored("code")) == 2)
    assert versions(stage) == {b"1"}
    await stage.crash_controller()
    await withdraw(stage, "new")
    assert (await stage.call("get_application", name="default"))["request_id"] == "old"
    assert (await stage.app_status())["status"] == "RUNNING"


@staged()
async def test_a_first_deploy_that_is_withdrawn_leaves_nothing(stage: Stage) -> None:
    await begun(stage, version("1", "first"))
    await withdraw(stage, "first")
    await stage.until(lambda: not (stage.stored("app") or stage.stored("backend") or stage.stored("code")))
    assert (await stage.call("status"))["applications"] == {}
    await begun(stage, version("1", "second"))
    await withdraw(stage, "second")
    await stage.run(graph=GRAPH)  # at once, while its replicas still end
    assert (await stage.app_status())["status"] == "RUNNING"


@staged()
async def test_of_two_changes_the_newest_wins_whatever_becomes_of_the_other(stage: Stage) -> None:
    await stage.run(graph=GRAPH, request_id="old")
    loser = await begun(stage, version("2", "loser"))
    winner = (await stage.deploy_apps(version("3", "winner")))["goals"]["default"]
    with pytest.raises(SupersededError):
        await stage.calls.wait_until_reached(loser, None)
    await withdraw(stage, "loser")
    await stage.call("delete_application", name="default", request_id="loser")
    assert await stage.calls.wait_for_goal(winner, None)
    assert versions(stage) == {b"3"}
    # If a change superseded another one, its withdrawal restores the state before both.
    await begun(stage, version("4", "fourth"))
    await begun(stage, version("5", "fifth"))
    await withdraw(stage, "fifth")
    await stage.until(lambda: versions(stage) == {b"3"})
    assert (await stage.app_status())["status"] == "RUNNING"


@staged()
async def test_a_complete_change_is_not_withdrawn(stage: Stage) -> None:
    await stage.run(graph=GRAPH, request_id="done")
    commits = stage.store.commits
    await withdraw(stage, "done")
    assert stage.store.commits == commits
    assert (await stage.app_status())["status"] == "RUNNING"


@each_case("is_complete", [True, False])
@staged()
async def test_changes_by_other_programs_are_not_withdrawn_with_a_deploy(
    stage: Stage, is_complete: bool
) -> None:
    stage.start = None if is_complete else hang
    spec = stage.spec("b", request_id="new")
    answer = await stage.call("deploy", **spec, route="/", methods=["GET"], python_methods=[])
    if is_complete:
        await stage.calls.wait_for_goal(answer["goal"], None)
    stage.start_s, stage.start = 1.0, None
    scaling = await stage.call(
        "update_backend_config",
        tag="b",
        config={"num_replicas": 2},
        user_config=None,
        sets_user_config=False,
        timeout_s=60.0,
    )
    await withdraw(stage, "new")
    await stage.crash_controller()
    await withdraw(stage, "new")
    await stage.calls.wait_for_goal(scaling["goal"], None)
    assert len(stage.running_of("b")) == 2


@staged()
async def test_a_deletion_is_not_withdrawn_with_the_deploy_before(stage: Stage) -> None:
    await begun(stage, version("1", "first"))
    stage.drain_s = 5.0
    goal = (await stage.call("delete_application", name="default"))["goal"]
    await withdraw(stage, "first")
    assert await stage.calls.wait_until_reached(goal, None)
    assert not stage.stored("app")


@each_case("verb", ["deploy_applications", "deploy", "create_backend"])
@staged()
async def test_a_call_that_arrives_after_it_was_withdrawn_is_refused(stage: Stage, verb: str) -> None:
    """Each is sent over a separate connection, so the second may arrive first."""
    await withdraw(stage, "late")
    one = {"route": None, "methods": ["GET"], "python_methods": []} if verb == "deploy" else {}
    message: dict[str, Any] = {**stage.spec(request_id="late"), **one}
    if verb == "deploy_applications":
        message = {"apps": [version("1", "late").to_plain()]}
    with pytest.raises(DeployError, match="undone before it began"):
        await stage.call(verb, **message)
    assert not stage.stored("backend")


@each_case("verb", ["deploy", "create_backend"])
@staged()
async def test_backends_are_withdrawn_as_well(stage: Stage, verb: str) -> None:
    one = {"route": None, "methods": ["GET"], "python_methods": []} if verb == "deploy" else {}
    stage.start = hang
    await stage.call(verb, **stage.spec(request_id="new", code=b"2"), **one)
    await stage.until(lambda: stage.started)
    await withdraw(stage, "new")
    assert await stage.call("list_backends") == {}
    stage.start = None
    if verb == "deploy":
        await stage.deploy(code=b"1")
        stage.start, count = hang, len(stage.started)
        await stage.call(verb, **stage.spec(request_id="newer", code=b"3"), **one)
        await stage.until(lambda: len(stage.started) > count)
        await withdraw(stage, "newer")
        assert versions(stage) == {b"1"}


@staged()
async def test_an_application_belongs_to_the_last_call_that_has_deployed_it(stage: Stage) -> None:
    await stage.run(graph=GRAPH, request_id="first")
    await stage.deploy_apps(app_spec(graph=GRAPH, request_id="same"))
    await stage.call("delete_application", name="default", request_id="first")
    assert (await stage.app_status())["status"] == "RUNNING"
    # Also while the change is pending: one program withdraws a change that another program requested, too.
    goal = await begun(stage, version("2", "second"))
    again = (await stage.deploy_apps(version("2", "same second")))["goals"]["default"]
    assert again == goal
    await withdraw(stage, "second")
    assert (await stage.app_status())["status"] == "DEPLOYING"
    await stage.call("delete_application", name="default", request_id="same second")
    await stage.until(lambda: not stage.stored("app"))


@staged()
async def test_a_failed_change_leaves_the_application_to_who_has_deployed_it(stage: Stage) -> None:
    await stage.run(graph=GRAPH, request_id="old")

    async def fail(_: Any) -> None:
        raise ReplicaStartError("no")

    stage.start = fail
    with pytest.raises(ReplicaStartError):
        await stage.run(graph=GRAPH, request_id="new", back={"version": "2"})
    await stage.call("delete_application", name="default", request_id="new")
    assert versions(stage) == {b"1"}
    await stage.call("delete_application", name="default", request_id="old")
    await stage.until(lambda: not stage.stored("app"))


@staged()
async def test_a_call_may_say_what_it_replaces(stage: Stage) -> None:
    async def deploy(number: str, request_id: str, expected: str) -> dict[str, Any]:
        apps = [version(number, request_id).to_plain()]
        answer: dict[str, Any] = await stage.call(
            "deploy_applications", apps=apps, expected={"default": expected}, by=f"program {request_id}"
        )
        return answer

    goals = [(await deploy("1", "first", ""))["goals"] for _ in range(2)]  # a retry
    assert goals[0] == goals[1]
    with pytest.raises(AlreadyRegisteredError, match="runs already, deployed by program first"):
        await deploy("2", "second", "")
    await deploy("2", "second", "first")
    with pytest.raises(AlreadyRegisteredError, match="deployed by program second"):
        await deploy("3", "third", "first")


@staged()
async def test_an_application_can_be_deployed_again_as_it_was(stage: Stage) -> None:
    """With options that are part of the version, with endpoints, and with deployments that call others."""
    fields: dict[str, Any] = {
        "back": {"actor_options": {"num_cpus": 0.5}, "num_replicas": 2, "user_version": "named"},
        "front": {"user_config": b"config"},
    }
    await stage.run(graph=GRAPH, **fields)
    kept, started = await stage.call("stored_application", name="default"), list(stage.started)

    def again(number: int) -> dict[str, Any]:
        spec = ApplicationSpec.from_plain(kept["spec"])
        plain = {**spec.to_plain(), "request_id": f"again-{number}"}
        for each in plain["deployments"]:
            each["spec"]["request_id"] = f"again-{number}"
        return plain

    answer = await stage.call("deploy_applications", apps=[again(0)])
    assert answer["updating"] == {"default": False}
    assert stage.started == started
    await stage.run(graph={"other": (), "front": ("other",)}, front={"version": "2"})
    answer = await stage.call("deploy_applications", apps=[again(1)])
    await stage.calls.wait_for_goal(answer["goals"]["default"], None)
    assert await stage.call("stored_application", name="default") == {
        **kept,
        "spec": {**kept["spec"], "request_id": "again-1"},
    }
    assert {BackendSpec.from_plain(each["spec"]).version for each in kept["spec"]["deployments"]} == {"1"}
    await stage.until(lambda: len(stage.running_of("back")) == 2 and not stage.running_of("other"))
