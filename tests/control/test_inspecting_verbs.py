"""Profiles and stacks of replicas that end meanwhile, or whose worker does not answer. Fake clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from control_harness import replica, state_of
from controller_harness import Stage, staged
from tables import case

from daskserve.cluster.local.process import LocalProcess
from daskserve.common.types import ReplicaState, short_tag
from daskserve.control.decisions.replicas import busiest, named_replicas
from daskserve.control.records.records import ReplicaRecord
from daskserve.errors import ActorLostError, BadRequestError, InspectionError, NotFoundError


@staged(workers=2)
async def test_a_replica_that_ends_meanwhile_is_distinguished_from_one_that_never_was(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.run("x")
    call = LocalProcess.call

    async def lose(process: Any, actor: Any, verb: str, **message: Any) -> Any:
        if verb == "profile" and "replica" not in message:
            raise ActorLostError("its worker was lost")
        if verb == "stacks" and "replica" not in message:
            await asyncio.Event().wait()
        return await call(process, actor, verb, **message)

    monkeypatch.setattr(LocalProcess, "call", lose)
    with pytest.raises(InspectionError, match="while its code was inspected: its worker was lost"):
        await stage.call("profile", replica="x/back", seconds=1.0)
    with pytest.raises(InspectionError, match="did not answer within 5 s"):
        await stage.call("stacks", replica="x/back")


@staged(workers=2)
async def test_replicas_that_cannot_be_inspected_are_refused(stage: Stage) -> None:
    await stage.run("x")
    for seconds in (0, -1.0, 60.1):
        with pytest.raises(BadRequestError, match=r"must be more than 0 and at most 60\."):
            await stage.call("profile", replica="x/front", seconds=seconds)
    with pytest.raises(
        NotFoundError, match="There is no replica, or deployment with replicas, 'y'; the near"
    ):
        await stage.call("stacks", replica="y")


def test_the_busiest_replica_is_chosen_after_those_that_do_not_answer() -> None:
    replicas = [replica(f"b#{number}") for number in range(1, 4)]
    actors = {f"b#{number}": {"ongoing": ongoing} for number, ongoing in ((1, 2), (2, 7), (3, 0))}
    assert busiest(replicas, actors).tag == "b#2"
    assert busiest(replicas, {tag: each for tag, each in actors.items() if tag != "b#3"}).tag == "b#3"
    assert busiest(replicas, {}).tag == "b#1"
    assert busiest(replicas, {tag: {} for tag in actors}).tag == "b#1"


def test_a_replica_is_found_under_each_of_its_names() -> None:
    starting, waiting = ReplicaState.STARTING, ReplicaState.SHOULD_START
    state = state_of(
        replica("b#1"),
        replica("b#2", starting),
        replica("x/f#3"),
        replica("w#4", waiting, worker=None),
    )
    for name, tags in {
        "b#1": ["b#1"],
        "b": ["b#2", "b#1"],
        "default/b": ["b#2", "b#1"],
        "x/f": ["x/f#3"],
        "x/f#3": ["x/f#3"],
    }.items():
        with case(name):
            assert [each.tag for each in named_replicas(state, name)] == tags
    for name, message in {
        "w": "'w' has no worker yet; `daskserve status` says what it waits for",
        "w#4": "'w#4' has no worker yet",
        "default/x/f": "'default/x/f'; the nearest are: x/f",
        "y" * 300: "'" + "y" * 200 + "'; the nearest are: ",
    }.items():
        with case(name), pytest.raises(NotFoundError, match=message):
            named_replicas(state, name)
    with pytest.raises(NotFoundError, match="'b'; none runs"):
        named_replicas(state_of(), "b")


@staged(workers=3)
async def test_the_busiest_replica_of_a_deployment_is_inspected(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.run("x", front={"num_replicas": 3})
    asked: list[str] = []
    call = LocalProcess.call

    async def answer(process: Any, actor: Any, verb: str, **message: Any) -> Any:
        if verb == "stacks" and "replica" not in message:
            asked.append(actor.name)
            return {"threads": []}
        return await call(process, actor, verb, **message)

    inspect = LocalProcess.inspect
    ongoing: dict[str, int] = {}

    async def busy(process: Any, worker: str) -> Any:
        return [{**each, "ongoing": ongoing.get(each["name"], 0)} for each in await inspect(process, worker)]

    monkeypatch.setattr(LocalProcess, "call", answer)
    monkeypatch.setattr(LocalProcess, "inspect", busy)
    names = {
        each.tag: each.address(stage.cluster.instance).name
        for each in stage.stored("replica").values()
        if isinstance(each, ReplicaRecord)
    }
    for each in stage.running_of("x/front"):
        ongoing.clear()
        ongoing[names[each.tag]] = 5
        found = await stage.call("stacks", replica="x/front")
        assert (found["replica"], asked[-1]) == (short_tag(each.tag), names[each.tag])
        assert (found["deployment"], found["application"], found["state"]) == ("x/front", "x", "RUNNING")
