"""Rollouts with the real controller, routers and replicas, in this process and in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tables import each_case

import daskserve as serve
from daskserve.client.client import AsyncClient
from daskserve.testing import local_instance_async, run_virtual

#: Time between two requests.
EVERY_S = 0.01


class Fault(Exception):
    """The error that a faulty version raises."""


def application(version: str, fails: float, seed: int, **options: Any) -> serve.Application:
    rng = random.Random(f"{version} {seed}")

    @serve.deployment(name="m", version=version, num_replicas=2, max_ongoing_requests=50, **options)
    async def answer(value: Any = None) -> str:
        if rng.random() < fails:
            raise Fault(version)
        return version

    return answer.bind()


class Load:
    """Calls at a steady rate; counts the answers."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.answers: Counter[str] = Counter()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as calls:
            while True:
                await asyncio.sleep(EVERY_S)
                calls.create_task(self._call())

    async def _call(self) -> None:
        try:
            self.answers[await self._handle.remote()] += 1
        except Fault:
            self.answers["failed"] += 1


@asynccontextmanager
async def under_load(
    fails: float, seed: int, plan: dict[str, Any]
) -> AsyncIterator[tuple[AsyncClient, Load]]:
    """Yield a client and the load on version 1, once version 2 has its first share of the traffic."""
    async with local_instance_async() as client:
        handle = await client.run(application("1", 0.001, seed))
        load = Load(handle)
        loading = asyncio.create_task(load.run())
        await client.run(application("2", fails, seed, rollout=plan))
        try:
            yield client, load
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)


async def outcome(fails: float, seed: int) -> str:
    plan = {"steps": ["50%", "100%"], "pause_s": 2}
    async with under_load(fails, seed, plan) as (client, load):
        state = ""
        while state not in ("COMPLETED", "ROLLED_BACK"):
            await asyncio.sleep(1)
            state = (await client.rollout_status("m"))["state"]
        await asyncio.sleep(0.1)
        load.answers.clear()
        await asyncio.sleep(1)
        assert load.answers["1" if state == "ROLLED_BACK" else "2"] > 20
        assert len(load.answers.keys() - {"failed"}) == 1
        return state


@pytest.mark.nightly
@pytest.mark.parametrize("first", [0, 10, 20])
@pytest.mark.parametrize(("fails", "expected"), [(0.03, "ROLLED_BACK"), (0.001, "COMPLETED")])
def test_thirty_rollouts_of_thirty_end_as_they_should(fails: float, expected: str, first: int) -> None:
    found = [run_virtual(outcome, fails, seed) for seed in range(first, first + 10)]
    assert found == [expected] * 10


def test_a_faulty_version_is_rolled_back_under_load() -> None:
    assert run_virtual(outcome, 0.03, 1) == "ROLLED_BACK"


def nearly_equal(old: float, new: float) -> bool:
    return abs(old - new) < 1


def halved(version: str, shift: float, small: float, **options: Any) -> serve.Application:
    # Virtual time runs ahead of busy threads, so their health checks would fail.
    @serve.deployment(name="m", version=version, liveness=None, **options)
    def answer(value: float) -> float:
        if value == 13:
            raise Fault(version)
        return value / 2 + (shift if value > 10 else small)

    return answer.bind()


async def compared(compare: Any) -> dict[str, Any]:
    plan = {"steps": ["0%", "100%"], "pause_s": None, "shadow": "100%", "compare": compare}
    async with local_instance_async() as client:
        handle = await client.run(halved("1", 0.0, 0.0))
        await client.run(halved("2", 5.0, 0.5, rollout=plan))
        answers = [await handle.remote(n) for n in range(13)]
        with pytest.raises(Fault):
            await handle.remote(13)
        assert answers == [n / 2 for n in range(13)]

        async def is_counted() -> dict[str, Any] | None:
            found = (await client.rollout_status("m"))["shadowed"]
            return found if found["compared"] + found["failed"] == 14 else None

        found: dict[str, Any] | None = None
        while found is None:
            await asyncio.sleep(0.5)
            found = await is_counted()
        return found


@each_case(
    "compare, different, failed",
    [(None, 13, 0), (nearly_equal, 2, 0), ("builtins:no_such_function", 0, 13), ("sys:exit", 0, 13)],
)
def test_answers_of_copies_are_compared_and_differences_are_kept(
    compare: Any, different: int, failed: int
) -> None:
    found = run_virtual(compared, compare)
    assert (found["different"], found["failed"]) == (different, failed)
    if different == 2:
        assert found["samples"] == ("__call__: 5.5 != 10.5", "__call__: 6.0 != 11.0")
    else:
        assert len(found["samples"]) == min(different, 10)
        assert found["trouble"].startswith(f"{compare} raised" if failed else "")
        assert bool(found["trouble"]) == bool(failed)
