"""The controller forgets what is gone: the same that comes and goes again leaves no more behind."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from controller_harness import Stage, staged
from held import held

from daskserve.common.types import Location
from daskserve.errors import ReplicaStartError
from daskserve.options.http import HTTPOptions

#: What has a bound of its own, and the process with its connections.
BOUNDED = {"events", "revisions", "goals"}
PROCESS = {"cluster", "_cluster", "_channels", "channels", "_registry", "_world", "connection"}


async def fail(_: Any) -> None:
    raise ReplicaStartError("the constructor raised", user_traceback="Traceback ...")


async def come_and_go(stage: Stage, number: int) -> Counter[str]:
    """Deploy, scale, lose and delete; return what the controller holds afterwards."""
    scaled = {"min_replicas": 1, "max_replicas": 3}
    await stage.create(num_replicas=3)
    await stage.endpoint()
    await stage.create("scaled", autoscaling_config=scaled)
    for version in ("1", "2"):
        options = {"version": version, "user_version": version, "num_replicas": 2}
        await stage.run("shop", graph={"front": ()}, route="/shop", front=options)
    stage.start = fail
    with pytest.raises(ReplicaStartError):
        await stage.deploy("fails", "/fails", version="1")
    stage.start = None
    joined = stage.cluster.add_worker(address=f"local://joined-{number}").address
    ill, *_ = stage.running_of("b")
    ill.health = lambda: {"is_healthy": False, "detail": "its probe failed"}  # type: ignore[attr-defined]
    await stage.until(lambda: ill.tag not in stage.running)
    await stage.update(num_replicas=8)
    await stage.clock.sleep(3)
    stage.cluster.suspend_worker(joined)
    await stage.clock.sleep(30)
    stage.cluster.remove_worker(joined)
    await stage.clock.sleep(30)
    for each in stage.running_of("scaled"):
        models = {"multiplexed": {"models": {"m": "loaded"}, "count": 1, "capacity": 3}}
        each.health = lambda models=models: models  # type: ignore[attr-defined]
    await stage.clock.sleep(3)
    await stage.change("delete_application", name="shop")
    await stage.call("delete_endpoint", name="e")
    for tag in ("b", "scaled"):
        await stage.delete(tag)
    await stage.clock.sleep(100)
    controller = stage.cluster.actor(await stage.cluster.program.controller())
    return held(controller, BOUNDED | PROCESS)


@staged(workers=4, http=HTTPOptions(location=Location.HEAD_ONLY))
async def test_a_controller_holds_no_more_after_the_same_has_come_and_gone_again(stage: Stage) -> None:
    before = await come_and_go(stage, 1)
    assert await come_and_go(stage, 2) == before
