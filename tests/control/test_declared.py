"""Declared configurations on a real controller in virtual time: building, deploying, removing, conflicts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from control_harness import app_spec, goal, state_of
from controller_harness import ScriptedReplica, Stage, boom, staged
from scripted_builder import config, instance_config
from tables import each_case

from daskserve.common.types import Location
from daskserve.control.declared.views import progress
from daskserve.control.observed.observed import Notes, Observed
from daskserve.control.records.declared import ConfigRecord
from daskserve.control.records.records import AppRecord, GoalState, Record
from daskserve.errors import (
    AlreadyRegisteredError,
    BadRequestError,
    ConfigFileError,
    DeployError,
    ExternalScalerDisabledError,
    NotFoundError,
    VersionConflictError,
)
from daskserve.options.http import HTTPOptions


async def declare(stage: Stage, *applications: Any, merge: bool = False, **message: Any) -> dict[str, Any]:
    """Declare applications, wait until they run or have failed, and return the progress of each."""
    options = message.pop("options", {})
    answer = await stage.call(
        "apply_config", config=instance_config(*applications, **options), merge=merge, **message
    )
    found: dict[str, Any] = {"is_done": False}
    while not found["is_done"]:
        found = await stage.call("wait_for_config", version=answer["version"])
    return {"version": answer["version"], "deleted": list(answer["deleted"]), **found["applications"]}


CONFIG = ConfigRecord("x", {}, 3, settled=3)
APP = AppRecord("x", "/x", {"front": "x/front"})


@each_case(
    ("records", "status", "message"),
    [
        ([], "DELETED", "It was deleted meanwhile."),
        ([replace(APP, is_deleting=True)], "DELETED", "It was deleted meanwhile."),
        ([replace(CONFIG, settled=2)], "BUILDING", "no worker"),
        ([replace(CONFIG, settled=2, error="of before"), APP], "BUILDING", "no worker"),
        ([replace(CONFIG, error="it is broken"), APP], "DEPLOY_FAILED", "it is broken"),
        ([CONFIG, replace(APP, goal="g"), goal("g")], "DEPLOYING", "no room"),
        ([CONFIG], "DEPLOY_FAILED", ""),
        ([CONFIG, replace(APP, last_error="it was lost")], "DEPLOY_FAILED", "it was lost"),
        ([replace(CONFIG, goal="g"), APP, goal("g", state=GoalState.FAILED)], "DEPLOY_FAILED", ""),
        ([replace(CONFIG, goal="g"), APP, goal("g", state=GoalState.DONE)], "RUNNING", ""),
        ([CONFIG, APP], "RUNNING", ""),
        ([APP], "RUNNING", ""),
    ],
)
def test_how_far_the_deploy_of_an_application_is(records: list[Record], status: str, message: str) -> None:
    observed = Observed()
    observed.learn("x/front", Notes(waiting="no room"))
    state = state_of(*records)
    found = progress(state, observed, 3, ["x"], {"x": "no worker"})
    assert found["applications"] == {"x": {"status": status, "message": message}}
    assert found["is_done"] == (status not in ("BUILDING", "DEPLOYING"))
    assert progress(state, observed, 2, None, {}) == {"is_done": True, "applications": {}}
    assert set(progress(state, observed, 3, None, {})["applications"]) == set(state.declared.configs)


def versions(stage: Stage) -> dict[str, str]:
    """Return the versions that serve, by application."""
    return {
        tag.rpartition("#")[0].partition("/")[0]: each.message.code.decode()
        for tag, each in stage.running.items()
    }


async def until_gone(stage: Stage, *names: str) -> None:
    await stage.until(lambda: {f"app/{name}" for name in names}.isdisjoint(stage.stored("app")))


@staged()
async def test_declared_applications_are_built_and_run(stage: Stage) -> None:
    found = await declare(stage, config("shop"), config("mail"))
    assert found["version"] == 1
    assert found["shop"] == found["mail"] == {"status": "RUNNING", "message": ""}
    assert stage.script.built == [["shop", "mail"]]
    assert versions(stage) == {"shop": "1", "mail": "1"}
    assert sorted(await stage.published("routes")) == ["/mail", "/shop"]


@staged(http=HTTPOptions(location=Location.EVERY_WORKER))
async def test_every_proxy_knows_what_is_declared_before_the_wait_returns(stage: Stage) -> None:
    await stage.call("wait_for_http", timeout_s=5)
    stage.cluster.topic.deliver = lambda message: [0.25]
    await declare(stage, config("shop"))
    assert {tuple(each.routes) for each in stage.proxies.values()} == {("/shop",)}
    await declare(stage, config("shop", route="/new"))
    assert {tuple(each.routes) for each in stage.proxies.values()} == {("/new",)}


@staged()
async def test_applications_missing_in_the_next_file_are_deleted_and_those_of_programs_stay(
    stage: Stage,
) -> None:
    await stage.run("own", {"front": ()}, route="/own")
    await declare(stage, config("shop"), config("mail"))
    found = await declare(stage, config("mail", "2"))
    assert found["deleted"] == ["shop"]
    await until_gone(stage, "shop")
    assert versions(stage) == {"own": "1", "mail": "2"}
    assert sorted((await stage.call("get_config"))["applications"]) == ["mail"]


@staged()
async def test_a_merge_updates_what_it_names_and_leaves_the_rest(stage: Stage) -> None:
    await declare(stage, config("shop"), config("mail"), options={"target_capacity": 50.0})
    found = await declare(stage, config("mail", "2"), config("news"), merge=True)
    assert found["deleted"] == []
    assert versions(stage) == {"shop": "1", "mail": "2", "news": "1"}
    assert (await stage.call("status"))["target_capacity"] == 50.0


@staged()
async def test_options_of_the_instance_may_be_variables(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERCENT", "50")
    options = {"target_capacity": "${PERCENT}", "references": {"target_capacity": "serve.yaml:1:18"}}
    plan = await stage.call("plan_config", config=instance_config(config(), **options))
    assert list(plan["options"]) == [{"option": "target_capacity", "old": None, "new": 50}]
    text = "target_capacity: 50\napplications:\n- {name: shop, route_prefix: /shop, import_path: shop:app}\n"
    of_text = await stage.call("plan_text", text=text, name="serve.yaml")
    assert (of_text["options"], of_text["warnings"]) == (plan["options"], ())
    await declare(stage, config(), options=options)
    assert (await stage.call("get_config"))["instance"]["target_capacity"] == "${PERCENT}"
    assert (await stage.call("status"))["target_capacity"] == 50
    for value, text in (("lots", "a percentage from 0 to 100"), (None, "serve.yaml:1:18: there is no env")):
        monkeypatch.setenv("PERCENT", value) if value else monkeypatch.delenv("PERCENT")
        with pytest.raises(ConfigFileError, match=text):
            await declare(stage, config(), options=options)


@staged()
async def test_the_same_file_again_changes_nothing_but_is_built_again_because_its_modules_may_have_changed(
    stage: Stage,
) -> None:
    await declare(stage, config("shop"))
    found = await declare(stage, config("shop"))
    assert (found["version"], found["shop"]["status"]) == (2, "RUNNING")
    assert (len(stage.script.built), len(stage.started)) == (2, 1)


@staged()
async def test_a_repeated_call_is_one_change_even_if_it_expects_the_version_before(stage: Stage) -> None:
    message = {"config": instance_config(config("shop")), "expected_version": 0, "request_id": "one"}
    answers = [await stage.call("apply_config", **message) for _ in range(2)]
    assert [each["version"] for each in answers] == [1, 1]


@staged()
async def test_a_caller_without_the_newest_version_gets_the_name_of_who_changed_it(stage: Stage) -> None:
    await declare(stage, config("shop"), by="ann")
    await declare(stage, config("shop", "2"), by="ben", expected_version=1)
    with pytest.raises(VersionConflictError, match=r"based on version 1 .* now 2, by ben at"):
        await declare(stage, config("shop", "3"), expected_version=1)
    assert versions(stage) == {"shop": "2"}


@staged()
async def test_a_failed_build_is_reported_and_the_previous_version_keeps_serving(stage: Stage) -> None:
    await declare(stage, config("shop"))

    async def refuse(name: str, worker: str) -> str | None:
        return f"{name} is broken"

    stage.script.before = refuse
    found = await declare(stage, config("shop", "2"), config("new"))
    assert found["shop"] == {"status": "DEPLOY_FAILED", "message": "shop is broken\nTraceback: line 1"}
    assert versions(stage) == {"shop": "1"}
    for name in ("shop", "new"):
        status = await stage.app_status(name)
        assert (status["status"], status["message"]) == (
            "DEPLOY_FAILED",
            f"{name} is broken\nTraceback: line 1",
        )
    await asyncio.sleep(300)
    assert len(stage.script.built) == 2
    stage.script.before = None
    found = await declare(stage, config("shop", "2"))
    assert (found["shop"]["status"], versions(stage)) == ("RUNNING", {"shop": "2"})
    await until_gone(stage, "new")


@staged()
async def test_a_version_that_does_not_come_up_is_rolled_back_and_is_not_deployed_again(stage: Stage) -> None:
    await declare(stage, config("shop"))
    stage.start = boom("no")
    found = await declare(stage, config("shop", "2"))
    assert found["shop"]["status"] == "DEPLOY_FAILED"
    assert "no" in found["shop"]["message"]
    started = len(stage.started)
    await asyncio.sleep(300)
    assert (len(stage.started), versions(stage)) == (started, {"shop": "1"})


@staged()
async def test_an_import_that_hangs_fails_alone_and_says_so(stage: Stage) -> None:
    async def hang(name: str, worker: str) -> str | None:
        if name == "slow":
            await asyncio.Event().wait()
        return None

    stage.script.before = hang
    found = await declare(stage, config("shop"), config("slow"))
    assert found["shop"]["status"] == "RUNNING"
    assert found["slow"]["status"] == "DEPLOY_FAILED"
    assert "uilding 'slow' from 'slow:app' did not end within 300 s" in found["slow"]["message"]


@staged()
async def test_a_builder_that_fails_itself_is_tried_again_with_pauses(stage: Stage) -> None:
    async def fail(name: str, worker: str) -> str | None:
        raise ValueError("no builder")

    stage.script.before = fail
    await stage.call("apply_config", config=instance_config(config("shop")))
    await stage.clock.sleep(10)
    assert 2 <= len(stage.script.built) <= 21
    stage.script.before = None
    await stage.until(lambda: versions(stage) == {"shop": "1"})


@staged()
async def test_a_result_that_cannot_be_written_is_named_and_built_again_with_longer_and_longer_pauses(
    stage: Stage,
) -> None:
    await stage.call("apply_config", config=instance_config(config("shop")))
    stage.store.failures = 10**6
    await stage.clock.sleep(120)
    assert 2 <= len(stage.script.built) <= 12
    found = (await stage.call("status"))["applications"]["shop"]
    assert found["message"] == (
        "It is built, but the result could not be written: the store cannot be reached"
    )
    stage.store.failures = 0
    await stage.until(lambda: versions(stage) == {"shop": "1"})


@staged(workers=4)
async def test_an_import_that_ends_its_worker_fails_after_some_workers(stage: Stage) -> None:
    lost: list[str] = []

    async def exit_worker(name: str, worker: str) -> str | None:
        if name == "fatal":
            lost.append(worker)
            stage.cluster.add_worker()
            stage.cluster.remove_worker(worker)
            await asyncio.Event().wait()
        return None

    stage.script.before = exit_worker
    found = await declare(stage, config("shop"), config("fatal"))
    assert found["shop"]["status"] == "RUNNING"
    assert found["fatal"]["status"] == "DEPLOY_FAILED"
    assert "ended" in found["fatal"]["message"]
    assert len(lost) == 5  # with the other application, and then alone


@staged()
async def test_a_program_takes_an_application_over_and_a_file_takes_it_back(stage: Stage) -> None:
    await declare(stage, config("shop"))
    await stage.run("shop", {"d": ()}, route="/shop", d={"version": "of the program"})
    assert (await stage.call("get_config"))["applications"] == {}
    assert (await stage.call("get_config"))["version"] == 2
    with pytest.raises(NotFoundError, match="deployed by a program"):
        await stage.call("get_config", name="shop")
    await declare(stage)
    assert versions(stage) == {"shop": "of the program"}
    found = await declare(stage, config("shop"))
    assert (found["shop"]["status"], versions(stage)) == ("RUNNING", {"shop": "1"})
    found = await declare(stage)
    assert found["deleted"] == ["shop"]


@staged()
async def test_a_deleted_application_is_no_longer_declared(stage: Stage) -> None:
    await declare(stage, config("shop"))
    await stage.change("delete_application", name="shop")
    assert (await stage.call("get_config"))["applications"] == {}
    await asyncio.sleep(60)
    assert versions(stage) == {}


@staged()
async def test_a_route_moves_from_one_application_to_another(stage: Stage) -> None:
    await declare(stage, config("a", route="/x"), config("b", route="/y"))
    found = await declare(stage, config("a", "2", route="/y"), config("b", "2", route="/z"))
    assert (found["a"]["status"], found["b"]["status"]) == ("RUNNING", "RUNNING")
    routes = await stage.published("routes")
    assert {route: each["application"] for route, each in routes.items()} == {"/y": "a", "/z": "b"}


def routed(routes: Mapping[str, Any]) -> dict[str, str]:
    return {route: each["application"] for route, each in routes.items()}


@staged()
async def test_applications_swap_their_routes_in_one_change(stage: Stage) -> None:
    await declare(stage, config("a", route="/x"), config("b", route="/y"), config("c", route="/z"))
    seen: list[dict[str, str]] = []

    async def look(replica: ScriptedReplica) -> None:
        seen.append(routed(await stage.published("routes")))

    stage.start = look
    found = await declare(
        stage, config("a", "2", route="/y"), config("b", "2", route="/z"), config("c", route="/x")
    )
    assert {name: each["status"] for name, each in found.items() if name in "abc"} == dict.fromkeys(
        "abc", "RUNNING"
    )
    assert routed(await stage.published("routes")) == {"/y": "a", "/z": "b", "/x": "c"}
    assert seen == 2 * [{"/x": "a", "/y": "b", "/z": "c"}]
    assert versions(stage) == {"a": "2", "b": "2", "c": "1"}


@staged()
async def test_routes_stay_if_one_of_those_that_swap_them_fails(stage: Stage) -> None:
    await declare(stage, config("a", route="/x"), config("b", route="/y"))
    stage.start = boom("broken")
    found = await declare(stage, config("a", route="/y"), config("b", "2", route="/x"))
    assert (found["a"]["status"], found["b"]["status"]) == ("DEPLOY_FAILED", "DEPLOY_FAILED")
    assert "The swap of routes with application 'b' was canceled" in found["a"]["message"]
    assert "broken" in found["b"]["message"]
    assert routed(await stage.published("routes")) == {"/x": "a", "/y": "b"}
    assert versions(stage) == {"a": "1", "b": "1"}
    stage.start = None
    await declare(stage, config("a", route="/y"), config("b", "3", route="/x"))
    assert routed(await stage.published("routes")) == {"/y": "a", "/x": "b"}


@staged()
async def test_a_route_that_is_being_swapped_is_not_given_away(stage: Stage) -> None:
    """A controller that takes over completes the swap for both applications at once."""
    await stage.run("a", {"a": ()}, route="/x")
    await stage.run("b", {"b": ()}, route="/y")
    stage.start_s = 5.0
    swap = app_spec("a", {"a": ()}, route="/y"), app_spec("b", {"b": ()}, route="/x", b={"version": "2"})
    answer = await stage.deploy_apps(*swap)
    await stage.clock.sleep(1.0)
    assert routed(await stage.published("routes")) == {"/x": "a", "/y": "b"}
    with pytest.raises(AlreadyRegisteredError, match="application 'b' is about to take it over"):
        await stage.run("a", {"a": ()}, route="/x")
    await stage.crash_controller()
    for pending in answer["goals"].values():
        await stage.calls.wait_for_goal(pending, None)
    assert routed(await stage.published("routes")) == {"/y": "a", "/x": "b"}


@staged()
async def test_a_configuration_with_a_route_of_a_program_or_with_a_name_twice_is_refused_whole(
    stage: Stage,
) -> None:
    await stage.run("own", {"front": ()}, route="/own")
    with pytest.raises(AlreadyRegisteredError, match="in use by application 'own'"):
        await declare(stage, config("shop"), config("other", route="/own/"))
    with pytest.raises(BadRequestError, match="'shop' is in the configuration twice"):
        await declare(stage, config("shop"), config("shop"))
    with pytest.raises(AlreadyRegisteredError, match="have the same route '/x'"):
        await declare(stage, config("shop", route="/x"), config("other", route="/x"))
    assert (await stage.call("get_config"))["version"] == 0


@staged()
async def test_while_it_is_built_the_status_says_so(stage: Stage) -> None:
    gate = asyncio.Event()

    async def wait(name: str, worker: str) -> str | None:
        await gate.wait()
        return None

    stage.script.before = wait
    await stage.call("apply_config", config=instance_config(config("shop")))
    await asyncio.sleep(1)
    status = await stage.app_status("shop")
    assert (status["status"], status["message"], status["route_prefix"]) == (
        "DEPLOYING",
        "It is being built.",
        "/shop",
    )
    gate.set()


@staged()
async def test_a_new_controller_builds_what_its_predecessor_has_not(stage: Stage) -> None:
    gate = asyncio.Event()

    async def wait(name: str, worker: str) -> str | None:
        await gate.wait()
        return None

    stage.script.before = wait
    answer = await stage.call("apply_config", config=instance_config(config("shop")))
    await asyncio.sleep(1)
    await stage.crash_controller()
    gate.set()
    found: dict[str, Any] = {"is_done": False}
    while not found["is_done"]:
        found = await stage.call("wait_for_config", version=answer["version"])
    assert (found["applications"]["shop"]["status"], versions(stage)) == ("RUNNING", {"shop": "1"})
    await stage.until(lambda: not [each for each in stage.cluster.actors() if "/builder/" in each.name])


@staged()
async def test_at_every_write_a_lost_controller_leaves_the_old_version_or_the_new_one(stage: Stage) -> None:
    await declare(stage, config("shop"), config("mail"))
    for crash_at in range(12):
        stage.store.commits = 0
        crashes: list[asyncio.Task[Any]] = []

        def after(records: Any, crash_at: int = crash_at, crashes: Any = crashes) -> None:
            if stage.store.commits == crash_at + 1 and not crashes:
                crashes.append(asyncio.create_task(stage.crash_controller()))

        stage.store.after_commit = after
        version = str(crash_at + 2)
        stage.cluster.add_worker()
        found = await declare(stage, config("shop", version), merge=True, request_id=version)
        stage.store.after_commit = None
        assert found["shop"]["status"] == "RUNNING", crash_at
        await stage.until(lambda version=version: versions(stage) == {"shop": version, "mail": "1"})
        if crashes:
            await crashes[0]


@staged()
async def test_a_rollback_gives_back_what_was_declared_and_nothing_undoes_it(stage: Stage) -> None:
    await declare(stage, config("shop"), by="ann", source="serve.yaml", version="abc")
    await declare(stage, config("shop", "2"), by="ann", source="serve.yaml")
    answer = await stage.call("rollback", app="shop", by="ben")
    await stage.calls.complete(answer)
    await asyncio.sleep(60)
    assert versions(stage) == {"shop": "1"}
    found = await stage.call("get_config", name="shop")
    assert found["version"] == 3
    assert found["applications"]["shop"]["config"] == config("shop")
    assert found["applications"]["shop"]["git_version"] == "abc"
    revisions = (await stage.call("history", app="shop"))["revisions"]
    assert [each["source"] for each in revisions] == ["file", "file", "rollback"]
    assert revisions[0]["origin"] == {"file": "serve.yaml", "version": "abc"}
    with pytest.raises(VersionConflictError, match="by ben"):
        await declare(stage, config("shop", "3"), expected_version=2)
    await declare(stage, config("shop", "2"))
    assert versions(stage) == {"shop": "2"}
    assert (await declare(stage))["deleted"] == ["shop"]


def goal_of_app(stage: Stage) -> str | None:
    app = stage.store.records()["app/shop"]
    assert isinstance(app, AppRecord)
    return app.goal


@staged()
async def test_a_restart_is_an_update_to_the_same_code_and_a_deploy_after_it_changes_nothing(
    stage: Stage,
) -> None:
    await declare(stage, config("shop", num_replicas=2))
    before = set(stage.running)
    answers = [
        await stage.call("restart", application="shop", request_id="once"),
        await stage.call("restart", application="shop", request_id="once"),
    ]
    assert answers[0] == answers[1]
    assert goal_of_app(stage) == answers[0]["goal"]
    await stage.calls.complete(answers[0])
    assert len(stage.running) == 2
    assert before.isdisjoint(stage.running)
    after = set(stage.running)
    await declare(stage, config("shop", num_replicas=2))
    assert set(stage.running) == after
    answer = await stage.call("restart", application="shop", deployment="d")
    assert goal_of_app(stage) is None
    await stage.calls.complete(answer)
    assert after.isdisjoint(stage.running)
    stage.start = boom("no")
    kept = set(stage.running)
    with pytest.raises(DeployError):
        await stage.calls.complete(await stage.call("restart", application="shop"))
    assert set(stage.running) == kept
    with pytest.raises(NotFoundError):
        await stage.call("restart", application="shop", deployment="none")


@staged()
async def test_all_applications_are_deleted_in_one_change(stage: Stage) -> None:
    await stage.run("own", {"front": ()}, route="/own")
    await declare(stage, config("shop"))
    with pytest.raises(VersionConflictError):
        await stage.call("delete_applications", expected_version=0)
    found = await stage.call("delete_applications", expected_version=1, by="ann")
    assert list(found["deleted"]) == ["own", "shop"]
    await until_gone(stage, "own", "shop")


@staged(http=HTTPOptions(location=Location.HEAD_ONLY, port=8000))
async def test_the_details_have_the_fields_of_ray_serve_and_no_secrets(stage: Stage) -> None:
    await stage.run("own", {"back": (), "front": ("back",)}, route="/own")
    secret = {**config("shop"), "env": {"env_vars": {"TOKEN": "hush", "KEY": "${KEY}"}}}
    await declare(stage, secret)
    found = await stage.call("details")
    assert found["version"] == 1
    details = found["details"]
    assert {name: each["source"] for name, each in details["applications"].items()} == {
        "own": "imperative",
        "shop": "declarative",
    }
    shop = details["applications"]["shop"]
    assert shop["deployed_app_config"]["runtime_env"]["env_vars"] == {"TOKEN": "***", "KEY": "${KEY}"}
    assert "env" not in shop["deployed_app_config"]
    assert shop["deployments"]["d"]["deployment_config"]["num_replicas"] == 1
    nodes = details["applications"]["own"]["deployment_topology"]["nodes"]
    assert list(nodes["front"]["outbound_deployments"]) == [{"name": "back", "app_name": "own"}]
    assert [each["status"] for each in details["proxies"].values()] == ["HEALTHY"]
    assert [each["route_prefix"] for each in details["target_groups"]] == ["/"]
    only = await stage.call("details", api_type="Imperative")
    assert list(only["details"]["applications"]) == ["own"]
    assert list((await stage.call("details", name="shop"))["details"]["applications"]) == ["shop"]
    assert "hush" not in str(await stage.call("get_config", is_masked=True))
    for message, error in (({"name": "none"}, NotFoundError), ({"api_type": "other"}, BadRequestError)):
        with pytest.raises(error):
            await stage.call("details", **message)
    # Ray Serve's classes refuse a number of replicas together with options that determine it.
    await declare(stage, config("shop", autoscaling_config={"min_replicas": 1, "max_replicas": 2}))
    deployments = (await stage.call("details"))["details"]["applications"]["shop"]["deployments"]
    assert "num_replicas" not in deployments["d"]["deployment_config"]


@staged()
async def test_an_operator_scales_what_is_not_autoscaled_until_its_code_or_options_change(
    stage: Stage,
) -> None:
    await declare(stage, config("shop"))
    with pytest.raises(ExternalScalerDisabledError):
        await stage.call("scale", name="", application="shop", number=3)
    assert await stage.call("scale", name="", application="shop", number=3, by="ann") == 3
    await stage.until(lambda: len(stage.running) == 3)
    await declare(stage, config("shop"))
    await stage.clock.sleep(10)
    assert len(stage.running) == 3
    await declare(stage, config("shop", "2"))
    await stage.until(lambda: len(stage.running) == 1)
    await declare(stage, config("shop", num_replicas=2))
    await stage.until(lambda: len(stage.running) == 2)
    auto = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}}
    await declare(stage, config("shop", **auto))
    with pytest.raises(BadRequestError, match="is autoscaled"):
        await stage.call("scale", name="d", application="shop", number=3, by="ann")


@staged(workers=3)
async def test_builds_avoid_a_worker_in_which_an_import_hangs(stage: Stage) -> None:
    workers: dict[str, str] = {}

    async def hang(name: str, worker: str) -> str | None:
        workers[name] = worker
        if name == "slow":
            await asyncio.Event().wait()
        return None

    stage.script.before = hang
    await declare(stage, config("slow"))
    for name in ("shop", "mail"):
        await declare(stage, config(name), merge=True)
    assert workers["slow"] not in (workers["shop"], workers["mail"])


@staged()
async def test_the_retry_of_a_delete_is_no_conflict(stage: Stage) -> None:
    await declare(stage, config("shop"))
    for _ in range(2):
        await stage.call("delete_application", name="shop", expected_version=1)
    await until_gone(stage, "shop")
    await stage.call("delete_application", name="shop", expected_version=1)
