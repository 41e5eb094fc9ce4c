"""The supervisor lets an instance's requests complete before it ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from daskserve.cluster.scheduler.controllers import Instance
from daskserve.cluster.scheduler.drains import ANSWER_S, DRAINED_S, Drains
from daskserve.cluster.store.opening import MemoryStore
from daskserve.common.types import ActorAddress
from daskserve.loops.tasks import TaskSet
from daskserve.testing import run_virtual

SLOWEST_S = 12.0


class _Supervisor:
    """One instance, whose slowest request takes `SLOWEST_S`."""

    def __init__(self) -> None:
        self.tasks = TaskSet(logging.getLogger(__name__))
        self.ended: list[tuple[float, str, str]] = []
        self.drains_asked = 0
        address = ActorAddress("controller", "tcp://a:1", 1)
        self.entry = Instance("shop", None, False, 0.0, b"", MemoryStore(), "start 1", controller=address)
        self.drains = Drains(lambda name: self.entry, self._call, self._end, self.tasks.spawn)

    async def _call(self, address: ActorAddress, verb: str) -> float | None:
        if verb == "drain":
            self.drains_asked += 1
            return 20.0
        await asyncio.sleep(SLOWEST_S)
        return None

    async def _end(self, name: str, start_id: str) -> None:
        self.ended.append((asyncio.get_running_loop().time(), name, start_id))


def test_programs_ask_again_until_the_requests_have_completed() -> None:
    async def run() -> Any:
        supervisor = _Supervisor()
        begun = asyncio.get_running_loop().time()
        answers = [await supervisor.drains.drain_instance("shop") for _ in range(3)]
        return answers, asyncio.get_running_loop().time() - begun, supervisor.drains_asked

    answers, took_s, drains_asked = run_virtual(run)
    assert answers == [False, False, True]
    assert 2 * ANSWER_S < took_s < SLOWEST_S + 0.1
    assert drains_asked == 1


def test_an_instance_ends_although_the_program_that_shuts_it_down_is_killed_meanwhile() -> None:
    async def run() -> Any:
        supervisor = _Supervisor()
        begun = asyncio.get_running_loop().time()
        program = asyncio.create_task(supervisor.drains.drain_instance("shop"))
        await asyncio.sleep(1)
        program.cancel()
        await asyncio.sleep(SLOWEST_S + DRAINED_S - 1.1)
        early = list(supervisor.ended)
        await asyncio.sleep(1)
        return early, [(at - begun, *rest) for at, *rest in supervisor.ended]

    early, ended = run_virtual(run)
    assert early == []
    ((after_s, name, start_id),) = ended
    assert SLOWEST_S + DRAINED_S <= after_s < SLOWEST_S + DRAINED_S + 0.5
    assert (name, start_id) == ("shop", "start 1")
