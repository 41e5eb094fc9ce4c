"""Records that can no longer be read: what continues without them, and how a deploy repairs them."""

from __future__ import annotations

import pytest
from controller_harness import ScriptedReplica, ScriptedStore, Stage, boom, staged
from tables import each_case

from daskserve.errors import CodeLoadError
from daskserve.options.specs import deployment_tag


class AsideStore(ScriptedStore):
    """A store that sets damaged records aside, as file stores do, and then no longer contains them."""

    def problems(self) -> dict[str, str]:
        return {"backend/b": "damaged", "replica/gone#1": "damaged"}


TAGS = [deployment_tag("default", each) for each in ("back", "front")]


async def damage(stage: Stage, key: str) -> None:
    """Damage a stored record. A new controller reads it, and has to start all replicas again."""
    stage.store.data[key] = b"?"
    stage.cluster.remove_worker((await stage.cluster.program.controller()).worker)
    for worker in stage.replica_workers():
        stage.cluster.remove_worker(worker)
    await stage.cluster.program.controller()


@staged(workers=6)
async def test_a_deploy_repairs_lost_code_and_until_then_routers_know_the_reason(stage: Stage) -> None:
    given = {"version": "1", "user_version": "1", "num_replicas": 1}
    await stage.deploy(**given)
    await damage(stage, "code/b@1")
    await stage.clock.sleep(1.0)
    found = await stage.published("backend/b")
    assert not found["replicas"]
    assert "no code for version 1 of deployment 'b': it is lost or damaged" in found["unloadable"]
    assert list((await stage.call("status"))["problems"]) == ["code/b@1"]
    assert (await stage.call("stored_deployments"))["b"]["spec"]["code"] == b""
    await stage.deploy(**given)  # the same version, which changes nothing otherwise
    found = await stage.published("backend/b")
    assert len(found["replicas"]) == 1
    assert "unloadable" not in found
    assert (await stage.call("status"))["problems"] == {}
    started = len(stage.started)
    await stage.deploy(**given)
    assert len(stage.started) == started


@staged(workers=6)
async def test_a_deploy_repairs_code_that_no_replica_can_load(stage: Stage) -> None:
    async def load(replica: ScriptedReplica) -> None:
        if replica.message.code == b"garbage":
            raise CodeLoadError("UnpicklingError: garbage")

    await stage.deploy(version="1", user_version="1", code=b"garbage")
    stage.start = load
    stage.cluster.remove_worker(stage.running_of("b")[0].worker)
    await stage.until(lambda: stage.started[2:])
    await stage.clock.sleep(1.0)
    assert (await stage.published("backend/b"))["unloadable"] == "UnpicklingError: garbage"
    await stage.deploy(version="1", user_version="1", code=b"good")
    assert "unloadable" not in await stage.published("backend/b")
    assert [each.message.code for each in stage.running_of("b")] == [b"good"]


@staged(store=AsideStore())
async def test_damaged_records_of_a_running_instance_are_written_again(stage: Stage) -> None:
    await stage.create("b")
    before = dict(stage.store.data)
    stage.store.data.pop("backend/b")
    stage.store.failures = 1
    with pytest.raises(OSError, match="cannot be reached"):
        await stage.create("c")
    await stage.create("d")  # all records are read again
    assert set(await stage.call("list_backends")) == {"b", "d"}
    assert stage.store.data["backend/b"] == before["backend/b"]
    assert len(stage.running_of("b")) == 1


@staged(workers=6)
async def test_a_constructor_that_fails_does_not_say_that_the_code_is_lost(stage: Stage) -> None:
    await stage.deploy()
    stage.start = boom()
    stage.cluster.remove_worker(stage.running_of("b")[0].worker)
    await stage.until(lambda: stage.started[2:])
    assert "unloadable" not in await stage.published("backend/b")


@each_case("kind", ["app", "backend", "endpoint", "code", "goal", "replica"])
@staged(workers=9)
async def test_a_deploy_repairs_whatever_record_of_an_application_is_damaged(stage: Stage, kind: str) -> None:
    await stage.run()
    key = sorted(stage.stored(kind))[-1]
    await damage(stage, key)
    assert list((await stage.call("status"))["problems"]) == [key]
    await stage.run()
    await stage.until(lambda: {each.message.backend_tag for each in stage.running.values()} == set(TAGS))
    await stage.clock.sleep(1.0)
    found = await stage.app_status()
    assert (found["status"], found["message"]) == ("RUNNING", "")
    assert set(await stage.published("routes")) == {"/"}
    left = (await stage.call("status"))["problems"]
    assert list(left) == ([key] if kind in ("goal", "replica") else [])
