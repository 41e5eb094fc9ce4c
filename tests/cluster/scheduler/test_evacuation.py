"""How long a worker that retires waits for the actors on it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from daskserve.cluster.scheduler.supervisor import EVACUATION_S, Supervisor
from daskserve.testing import run_virtual


@pytest.mark.parametrize(("grace_s", "released_at"), [(0.0, EVACUATION_S), (300.0, 200.0), (100.0, 160.0)])
def test_a_retiring_worker_waits_for_the_grace_period_of_its_requests(
    grace_s: float, released_at: float
) -> None:
    """Its actors have ended after 200 s."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        released: list[float] = []

        async def release(worker: str) -> None:
            released.append(loop.time())

        supervisor: Any = Supervisor()
        supervisor._hosts = SimpleNamespace(has=lambda worker: True, retiring=set(), release=release)
        supervisor._capacity = SimpleNamespace(is_free=lambda *_: loop.time() >= 200, grace_s=grace_s)
        supervisor._controllers = SimpleNamespace(expected=lambda leaving: [])
        supervisor._reported = asyncio.Event()
        supervisor._is_closed = False
        evacuating = asyncio.create_task(supervisor._evacuate(["w1"]))
        while not evacuating.done():
            await asyncio.sleep(1)
            supervisor._reported.set()
        assert released == [released_at]

    run_virtual(main)
