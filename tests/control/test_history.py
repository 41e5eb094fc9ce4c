"""The history of applications: revisions, and rollbacks to them."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import pytest
from controller_harness import CrashingStore, ScriptedReplica, Stage, staged
from tables import each_case

from daskserve.control.decisions.history import revisions as history_revisions
from daskserve.control.records.records import AppRecord, CodeRecord
from daskserve.errors import BadRequestError, NotFoundError, ReplicaStartError
from daskserve.options.backend import BackendMetadata
from daskserve.testing import run_virtual

GRAPH = {"back": (), "front": ("back",)}


async def run(stage: Stage, version: str, **fields: Any) -> None:
    both = {"version": version, "user_version": version, **fields.pop("both", {})}
    await stage.run(graph=fields.pop("graph", GRAPH), back=both, front=both, **fields)


async def revisions(stage: Stage, app: str = "default") -> dict[int, dict[str, Any]]:
    found = await stage.call("history", app=app)
    return {each["number"]: each for each in found["revisions"]}


async def states(stage: Stage, app: str = "default") -> dict[int, str]:
    return {number: each["state"] for number, each in (await revisions(stage, app)).items()}


async def roll_back(stage: Stage, app: str = "default", revision: int | None = None, **fields: Any) -> int:
    answer = await stage.call("rollback", app=app, revision=revision, by="prog.py", **fields)
    if answer["goal"] is not None:
        await stage.calls.wait_for_goal(answer["goal"], None)
    return int(answer["rollback_of"])


def versions(stage: Stage) -> list[str]:
    return sorted(each.message.code.decode() for each in stage.running.values())


def fail(_: ScriptedReplica) -> Any:
    raise ReplicaStartError("the constructor raised", user_traceback="Traceback ...")


async def failing(replica: ScriptedReplica) -> None:
    fail(replica)


@staged()
async def test_each_version_of_an_application_is_a_revision(stage: Stage) -> None:
    await run(stage, "1")
    await run(stage, "2", both={"num_replicas": 2})
    found = await revisions(stage)
    assert {number: each["state"] for number, each in found.items()} == {1: "SUPERSEDED", 2: "RUNNING"}
    assert found[1]["reason"] == "replaced by revision 2"
    assert [(each["deployment"], each["what"]) for each in found[1]["changes"]] == [
        ("back", "created"),
        ("front", "created"),
    ]
    assert [tuple(each.values()) for each in found[2]["changes"]] == [
        ("back", "code", "1", "2"),
        ("back", "num_replicas", "1", "2"),
        ("front", "code", "1", "2"),
        ("front", "num_replicas", "1", "2"),
    ]
    assert (await stage.call("history", app="default"))["current"] == 2


@staged()
async def test_a_deploy_that_changes_nothing_is_no_revision(stage: Stage) -> None:
    await run(stage, "1")
    await run(stage, "1")
    assert await states(stage) == {1: "RUNNING"}


@staged()
async def test_facts_that_replicas_report_make_no_revision(stage: Stage) -> None:
    await run(stage, "1")
    facts = BackendMetadata(class_name="Model")
    await run(stage, "1", both={"internal_metadata": facts})
    assert await states(stage) == {1: "RUNNING"}
    await run(stage, "2")
    assert await states(stage) == {1: "SUPERSEDED", 2: "RUNNING"}


@staged()
async def test_a_rollback_is_a_new_revision_and_can_be_rolled_back(stage: Stage) -> None:
    await run(stage, "1")
    await run(stage, "2")
    assert await roll_back(stage) == 1
    await stage.until(lambda: versions(stage) == ["1", "1"])
    assert await states(stage) == {1: "SUPERSEDED", 2: "ROLLED_BACK", 3: "RUNNING"}
    found = (await revisions(stage))[3]
    assert (found["source"], found["rollback_of"], found["by"]) == ("rollback", 1, "prog.py")
    assert await roll_back(stage) == 2
    await stage.until(lambda: versions(stage) == ["2", "2"])
    assert await roll_back(stage, revision=1) == 1
    await stage.until(lambda: versions(stage) == ["1", "1"])


@staged()
async def test_a_rollback_to_what_already_runs_changes_nothing(stage: Stage) -> None:
    await run(stage, "1")
    await run(stage, "2")
    await roll_back(stage)
    before = await revisions(stage)
    assert (await stage.call("rollback", app="default", revision=1, by=""))["goal"] is None
    assert await revisions(stage) == before


@staged()
async def test_a_rollback_brings_back_deployments_routes_and_options(stage: Stage) -> None:
    await run(stage, "1", both={"num_replicas": 2})
    await run(stage, "2", graph={"front": ()}, route="/new")
    await stage.until(lambda: versions(stage) == ["2"])
    await roll_back(stage)
    await stage.until(lambda: versions(stage) == ["1"] * 4)
    assert list(await stage.published("routes")) == ["/"]


@staged()
async def test_the_retry_of_a_rollback_rolls_back_once(stage: Stage) -> None:
    await run(stage, "1")
    await run(stage, "2")
    await roll_back(stage, request_id="one")
    assert await roll_back(stage, request_id="one") == 1
    assert len(await states(stage)) == 3


@staged()
async def test_a_rollback_during_a_change_returns_to_what_runs(stage: Stage) -> None:
    await run(stage, "1")
    await run(stage, "2")
    stage.start = lambda _: asyncio.Event().wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await run(stage, "3")
    stage.start = None
    assert await roll_back(stage) == 2
    await stage.until(lambda: versions(stage) == ["2", "2"])
    assert list((await states(stage)).values()) == ["SUPERSEDED", "SUPERSEDED", "SUPERSEDED", "RUNNING"]


@staged()
async def test_a_failed_deploy_is_in_the_history_with_its_reason_and_without_its_code(stage: Stage) -> None:
    await run(stage, "1")
    stage.start = failing
    with pytest.raises(ReplicaStartError):
        await run(stage, "2")
    found = (await revisions(stage))[2]
    assert found["state"] == "FAILED"
    assert "the constructor raised" in found["reason"]
    assert not found["can_return"]
    await stage.until(lambda: sorted(stage.stored("code")) == ["code/back@1", "code/front@1"])
    with pytest.raises(BadRequestError, match=r"has never run \(FAILED\)"):
        await roll_back(stage, revision=2)
    with pytest.raises(NotFoundError, match="no earlier revision that ran"):
        await roll_back(stage)


@staged()
async def test_a_rollback_that_fails_leaves_what_ran(stage: Stage) -> None:
    await run(stage, "1")
    await run(stage, "2")
    stage.start = failing
    with pytest.raises(ReplicaStartError):
        await roll_back(stage)
    assert versions(stage) == ["2", "2"]
    assert await states(stage) == {1: "SUPERSEDED", 2: "RUNNING", 3: "FAILED"}


@staged()
async def test_the_last_ten_are_kept_with_their_code(stage: Stage) -> None:
    for number in range(1, 14):
        await run(stage, str(number))
    assert list(await states(stage)) == list(range(4, 14))
    await stage.until(lambda: len(stage.stored("code")) == 20)
    assert await roll_back(stage, revision=4) == 4
    with pytest.raises(NotFoundError, match="no revision 3; it has: "):
        await roll_back(stage, revision=3)


@staged()
async def test_failed_deploys_do_not_push_out_what_a_rollback_needs(stage: Stage) -> None:
    await run(stage, "1")
    await run(stage, "2")
    stage.start = failing
    for number in range(3, 15):
        with pytest.raises(ReplicaStartError):
            await run(stage, str(number))
    assert list(await states(stage))[:2] == [1, 2]
    assert len(await states(stage)) == 10
    stage.start = None
    assert await roll_back(stage) == 1


@staged()
async def test_a_deleted_application_comes_back(stage: Stage) -> None:
    await run(stage, "1")
    await run(stage, "2")
    await stage.change("delete_application", name="default", by="prog.py")
    await stage.until(lambda: not stage.stored("app"))
    found = (await revisions(stage))[2]
    assert (found["state"], found["reason"]) == ("DELETED", "deleted by prog.py")
    assert await roll_back(stage) == 2
    await stage.until(lambda: versions(stage) == ["2", "2"])


@staged()
async def test_the_history_of_a_deleted_application_is_kept_for_a_while(stage: Stage) -> None:
    await run(stage, "1")
    await stage.change("delete_application", name="default")
    await stage.until(lambda: not stage.stored("app"))
    assert stage.stored("code")
    with patch.object(history_revisions, "KEPT_DELETED_S", -1.0):
        await stage.run("other", graph={"front": ()}, route="/other")
    assert sorted(stage.stored("revision")) == ["revision/other/1"]
    assert sorted(stage.stored("code")) == ["code/other/front@1"]
    with pytest.raises(NotFoundError):
        await stage.call("history", app="default")


@staged()
async def test_old_revisions_lose_their_code_beyond_the_budget(stage: Stage) -> None:
    big = {"code": b"x" * (300 << 10)}
    for number in range(1, 6):
        await run(stage, str(number), graph={"front": ()}, both=big)
    kept = [number for number, each in (await revisions(stage)).items() if each["can_return"]]
    assert kept == [2, 3, 4, 5]
    await stage.until(lambda: len(stage.stored("code")) == 4)
    with pytest.raises(BadRequestError, match="history-bytes"):
        await roll_back(stage, revision=1)


@staged()
async def test_code_in_use_beyond_the_budget_costs_no_scan_of_all_revisions(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(history_revisions._Revising, "applications", lambda _: looks.append(1) or set())
    await run(stage, "1", graph={"front": ()}, both={"code": b"x" * (2 << 20)})
    await stage.update("front", num_replicas=2)
    await stage.update("front", num_replicas=1)
    assert not looks
    await run(stage, "2", graph={"front": ()}, both={"code": b"y" * (2 << 20)})
    assert looks


@staged()
async def test_code_of_the_same_version_that_was_replaced_is_not_taken_for_the_old_one(stage: Stage) -> None:
    await run(stage, "1")
    await stage.change("delete_application", name="default")
    await stage.until(lambda: not stage.stored("app"))
    await run(stage, "1", both={"code": b"other"})
    with pytest.raises(BadRequestError, match="replaced by other code of the same version"):
        await roll_back(stage, revision=1)


@staged()
async def test_a_change_of_one_deployment_is_a_revision_of_its_application(stage: Stage) -> None:
    await run(stage, "1")
    await stage.update("back", num_replicas=3)
    found = (await revisions(stage))[2]
    assert [tuple(each.values()) for each in found["changes"]] == [("back", "num_replicas", "1", "3")]
    assert await roll_back(stage) == 1
    await stage.until(lambda: len(stage.running_of("back")) == 1)


@staged()
async def test_an_application_of_a_release_without_history_gets_its_first_revision(stage: Stage) -> None:
    await run(stage, "1")
    for key in list(stage.store.data):
        if key.startswith(("revision/", "event/")):
            del stage.store.data[key]
    await stage.crash_controller()
    await run(stage, "2")
    assert await states(stage) == {1: "SUPERSEDED", 2: "RUNNING"}
    assert await roll_back(stage) == 1


@staged()
async def test_a_new_controller_reads_the_history(stage: Stage) -> None:
    await run(stage, "1")
    await run(stage, "2")
    before = await stage.call("history", app="default")
    await stage.crash_controller()
    assert await stage.call("history", app="default") == before
    assert await roll_back(stage) == 1


@each_case("crash_at", range(1, 10))
def test_a_rollback_is_whole_wherever_the_controller_dies(crash_at: int) -> None:
    async def main() -> None:
        store = CrashingStore(crash_at=0)
        stage = store.stage = Stage(store=store, workers=4)
        async with stage.cluster:
            await stage.open()
            await run(stage, "1")
            await run(stage, "2")
            store.crash_at = store.commits + crash_at
            assert await roll_back(stage, request_id="one") == 1
            await stage.clock.sleep(60)
            assert len(set(store.epochs)) == 2, "the controller was not lost"
            assert versions(stage) == ["1", "1"]
            assert list((await states(stage)).values()) == ["SUPERSEDED", "ROLLED_BACK", "RUNNING"]
            records = stage.store.records()
            app = records["app/default"]
            assert isinstance(app, AppRecord)
            assert app.goal is None
            assert sum(isinstance(each, CodeRecord) for each in records.values()) == 4

    run_virtual(main)


@staged()
async def test_only_what_a_rollback_deploys_must_have_the_files_of_its_revision(stage: Stage) -> None:
    await run(stage, "1")
    await run(stage, "2")
    assert {each.message.is_exact for each in stage.running.values()} == {False}
    await roll_back(stage)
    await stage.until(lambda: versions(stage) == ["1", "1"])
    assert {each.message.is_exact for each in stage.running.values()} == {True}
    await run(stage, "3")
    await stage.until(lambda: versions(stage) == ["3", "3"])
    assert {each.message.is_exact for each in stage.running.values()} == {False}


@staged()
async def test_a_restart_takes_no_code_from_the_history_of_others(stage: Stage) -> None:
    for number in range(1, 4):
        await run(stage, str(number), graph={"front": ()})
    big = {"front": {"code": b"x" * (1200 << 10)}}
    await stage.run("big", graph={"front": ()}, route="/big", **big)
    answer = await stage.call("restart", application="big")
    await stage.calls.wait_for_goal(answer["goal"], None)
    assert all(each["can_return"] for each in (await revisions(stage)).values())


@staged()
async def test_a_version_that_ends_like_a_mark_is_another_version(stage: Stage) -> None:
    await run(stage, "1.0~1")
    await run(stage, "1.0")
    assert versions(stage) == ["1.0", "1.0"]
    with pytest.raises(BadRequestError, match="reserved"):
        await run(stage, "1.0~restart1")


@staged()
async def test_the_retry_of_a_rollback_that_failed_fails_again(stage: Stage) -> None:
    await run(stage, "1")
    await run(stage, "2")
    stage.start = failing
    for _ in range(2):
        with pytest.raises(ReplicaStartError):
            await roll_back(stage, request_id="once")
    assert await states(stage) == {1: "SUPERSEDED", 2: "RUNNING", 3: "FAILED"}
