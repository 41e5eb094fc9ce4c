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
EVERY_S = 0.004


class Fault(Exception):
    """What a faulty version raises."""


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
    """Yield a client and the load on version 1, beside which version 2 gets its first share."""
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
    plan = {"steps": ["10%", "50%", "100%"], "pause_s": 5, "min_requests": 300}
    async with under_load(fails, seed, plan) as (client, load):
        state = ""
        while state not in ("COMPLETED", "ROLLED_BACK"):
            await asyncio.sleep(1)
            state = (await client.rollout_status("m"))["state"]
        await asyncio.sleep(0.1)
        load.answers.clear()
        await asyncio.sleep(1)
        assert load.answers["1" if state == "ROLLED_BACK" else "2"] > 200
        assert len(load.answers.keys() - {"failed"}) == 1
        return state


@pytest.mark.nightly
@each_case("fails, expected", [(0.03, "ROLLED_BACK"), (0.001, "COMPLETED")])
def test_thirty_rollouts_of_thirty_end_as_they_should(fails: float, expected: str) -> None:
    assert [run_virtual(outcome, fails, seed) for seed in range(30)] == [expected] * 30


def test_a_faulty_version_is_taken_back_under_load() -> None:
    assert run_virtual(outcome, 0.03, 1) == "ROLLED_BACK"
