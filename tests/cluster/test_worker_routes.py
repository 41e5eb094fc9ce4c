"""The routes of a process: a lost worker is dialled again as long as a caller uses it. Virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.routes import FIRST_PAUSE_S, LONGEST_PAUSE_S, WorkerRoutes
from daskserve.common.clock import LoopClock
from daskserve.common.types import Reachability, WorkerAddress
from daskserve.errors import ActorLostError

pytestmark = pytest.mark.virtual_time


WORKER = "tcp://10.0.0.2:4000"


class Channels:
    """A pool whose connections fail until the test lets them succeed."""

    def __init__(self) -> None:
        self.watchers: list[Callable[[WorkerAddress, Reachability], object]] = []
        self.relayed: list[WorkerAddress] = []
        self.route: Reachability | None = None
        self.dials: list[float] = []

    def route_to(self, worker: WorkerAddress) -> Reachability | None:
        return self.route

    async def connect(self, worker: WorkerAddress, patience_s: float | None = None) -> None:
        self.dials.append(asyncio.get_running_loop().time())
        if self.route is None:
            raise ActorLostError("nothing answers", begun=False)
        self.tell(self.route)

    def tell(self, route: Reachability) -> None:
        for watcher in list(self.watchers):
            watcher(WORKER, route)


class Stage:
    def __init__(self) -> None:
        self.channels = Channels()
        self.routes = WorkerRoutes(cast(ChannelPool, self.channels), LoopClock())
        self.received: list[Reachability] = []
        self.used = {WORKER}
        self.routes.watch(lambda worker, route: self.received.append(route), self.used.__contains__)


@pytest.fixture
@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    stage.routes.close()
    await asyncio.sleep(0)
    assert stage.channels.watchers == []
    assert len(asyncio.all_tasks()) == 1


async def test_a_lost_worker_is_dialled_with_growing_pauses_until_it_answers(stage: Stage) -> None:
    stage.channels.tell(Reachability.NONE)
    assert stage.routes.to(WORKER) is Reachability.NONE
    assert stage.routes.broken() == {WORKER: Reachability.NONE}
    await asyncio.sleep(20)
    dials = stage.channels.dials
    pauses = [round(after - before, 3) for before, after in zip([0.0, *dials], dials, strict=False)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-2:] == [LONGEST_PAUSE_S] * 2
    stage.channels.route = Reachability.SCHEDULER
    await asyncio.sleep(LONGEST_PAUSE_S)
    assert stage.received == [Reachability.NONE, Reachability.SCHEDULER]
    assert stage.routes.to(WORKER) is Reachability.SCHEDULER
    count = len(dials)
    await asyncio.sleep(60)
    assert len(dials) == count


async def test_a_worker_that_is_not_used_any_more_is_not_dialled(stage: Stage) -> None:
    stage.channels.tell(Reachability.NONE)
    stage.used.clear()
    await asyncio.sleep(60)
    assert len(stage.channels.dials) <= 1
    assert stage.routes.broken() == {}
    stage.channels.tell(Reachability.NONE)
    await asyncio.sleep(60)
    assert len(stage.channels.dials) <= 1


async def test_the_workers_behind_the_scheduler_count_as_broken_routes(stage: Stage) -> None:
    stage.channels.relayed = ["tcp://10.0.0.3:4000"]
    stage.channels.tell(Reachability.NONE)
    assert stage.routes.broken() == {
        "tcp://10.0.0.3:4000": Reachability.SCHEDULER,
        WORKER: Reachability.NONE,
    }
