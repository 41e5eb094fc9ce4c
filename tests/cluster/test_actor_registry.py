"""The time limits of an actor's start and end, which the actor's own worker enforces."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import pytest

from daskserve.cluster.actors.registry import HOST_ACTOR, ActorRegistry
from daskserve.cluster.local.records import LocalRecords
from daskserve.cluster.protocols.base import ActorSpec
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorKind
from daskserve.errors import ActorLostError, RequestTimeoutError, UnavailableError

pytestmark = pytest.mark.virtual_time


SPEC = asdict(ActorSpec(ActorKind.REPLICA, "i/replica/b#1", 1, "i", start_timeout_s=10.0))


class Staged:
    """An actor whose start has two stages of some seconds each, and that takes a second to stop."""

    verbs: Mapping[str, Any] = {}

    def __init__(self, *stages_s: float) -> None:
        self._stages_s = stages_s
        self._stage = "starting", 0.0

    def stage(self) -> tuple[str, float]:
        return self._stage

    async def start(self) -> Mapping[str, Any]:
        for name, stage_s in zip(("installing", "loading"), self._stages_s, strict=True):
            self._stage = name, asyncio.get_running_loop().time()
            await asyncio.sleep(stage_s)
        return {"made": True}

    async def stop(self, grace_s: float) -> None:
        await asyncio.sleep(1)

    def samples(self) -> Iterable[Any]:
        return ()


def registry_of(*stages_s: float) -> ActorRegistry:
    return ActorRegistry("here", 1, LoopClock(), lambda spec: Staged(*stages_s))  # type: ignore[arg-type, return-value]


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_each_stage_of_a_start_has_the_time_limit_for_itself() -> None:
    assert (await registry_of(8, 8).create(SPEC))["made"]
    began, registry = now(), registry_of(8, 11)
    with pytest.raises(RequestTimeoutError, match="did not start within 10 s: it was still loading"):
        await registry.create(SPEC)
    assert (now() - began, registry.entries) == (8 + 10 + 1, {})


async def test_a_worker_that_ends_starts_no_other_actors() -> None:
    """Without a scheduler, a controller on another worker does not know that this worker ends."""
    registry = registry_of(0, 0)
    await registry.create(SPEC)
    await registry.drain(5.0, "another instance")
    assert (await registry.create(SPEC))["made"]
    ending = asyncio.create_task(registry.drain(5.0))
    await asyncio.sleep(0.5)
    with pytest.raises(UnavailableError, match="Worker here is shutting down and starts no more actors"):
        await registry.create({**SPEC, "incarnation": 2})
    await ending
    assert registry.entries == {}


class Logging(Staged):
    """An actor that logs while it starts, in a verb, in a separate task, and while it stops."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.verbs = {"say": self.say}

    def _log(self, what: str) -> None:
        logging.getLogger("daskserve.control").warning("%s %s", self._name, what)

    async def start(self) -> Mapping[str, Any]:
        self._log("starts")
        asyncio.get_running_loop().call_soon(self._log, "goes on")
        return {}

    async def say(self) -> None:
        self._log("answers")

    async def stop(self, grace_s: float) -> None:
        self._log("ends")


async def test_records_of_two_instances_are_separate() -> None:
    records = LocalRecords()
    records.open()
    try:
        registry = ActorRegistry(
            "here",
            1,
            LoopClock(),
            lambda spec: Logging(spec.instance),  # type: ignore[arg-type, return-value]
            logs=records.logs(),
        )
        for name in ("i", "j"):
            await registry.create({**SPEC, "name": name, "instance": name})
            await registry.call(name, 1, "say", {})
        await registry.destroy("j", 1, 0)
        found = await registry.call(HOST_ACTOR, 0, "logs", {"query": {"instance": "j"}, "after": None})
    finally:
        records.close()
    (source,) = found["sources"]
    assert [each["message"] for each in source["rows"]] == ["j starts", "j goes on", "j answers", "j ends"]


async def test_a_second_call_does_not_begin_the_time_again() -> None:
    registry = registry_of(0, 100)
    first = asyncio.create_task(registry.create(SPEC))
    await asyncio.sleep(6)
    first.cancel()
    (actor,) = await registry.actors("i")
    assert (actor["is_ready"], actor["busy"]) == (False, ("loading", 6.0))
    with pytest.raises(RequestTimeoutError):
        await registry.create(SPEC)
    assert now() == 10 + 1


async def test_an_actor_that_stops_says_so_and_a_start_that_waits_ends() -> None:
    registry = registry_of(0, 5)
    creating = asyncio.create_task(registry.create(SPEC))
    await asyncio.sleep(2)
    stopping = asyncio.create_task(registry.destroy("i/replica/b#1", 1, 0))
    await asyncio.sleep(0.5)
    (actor,) = await registry.actors("i")
    assert actor["busy"] == ("draining", 0.5)
    with pytest.raises(ActorLostError, match="was stopped while it started"):
        await creating
    await stopping


class Busy(Staged):
    """An actor with a request that takes some seconds."""

    def __init__(self, name: str, request_s: float, log: list[tuple[str, float, float]]) -> None:
        super().__init__()
        self._name, self._request_s, self._log = name, request_s, log

    async def start(self) -> Mapping[str, Any]:
        return {}

    async def stop(self, grace_s: float) -> None:
        began = now()
        await asyncio.sleep(min(grace_s, self._request_s))
        self._log.append((self._name, began, now()))


@pytest.mark.parametrize(
    ("proxy_s", "replica_s", "expected"),
    [
        (2, 3, [("c", 0, 0), ("p", 0, 2), ("r", 2, 5)]),
        # A long stream takes neither all of the replicas' time nor more than its own time.
        (100, 100, [("c", 0, 0), ("p", 0, 10), ("r", 5, 10)]),
    ],
)
async def test_a_worker_that_leaves_lets_requests_complete_within_its_time(
    proxy_s: float, replica_s: float, expected: list[tuple[str, float, float]]
) -> None:
    log: list[tuple[str, float, float]] = []
    requests_s = {"c": 0.0, "p": proxy_s, "r": replica_s}
    registry = ActorRegistry(
        "here",
        1,
        LoopClock(),
        lambda spec: Busy(spec.name, requests_s[spec.name], log),  # type: ignore[arg-type, return-value]
    )
    for name, kind in (("r", ActorKind.REPLICA), ("p", ActorKind.PROXY), ("c", ActorKind.CONTROLLER)):
        await registry.create(asdict(ActorSpec(kind, name, 1, "i")))
    await registry.drain(10)
    assert (sorted(log), registry.entries) == (expected, {})
