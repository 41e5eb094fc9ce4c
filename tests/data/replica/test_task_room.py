"""How tasks and requests share the slots of a replica, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter

from tables import each_case

from daskserve.common.types import Envelope, EnvelopeKind, Message, QueueTimeout
from daskserve.data.replica.requests.slots import Slots
from daskserve.data.replica.tasks import TaskSlots
from daskserve.telemetry.replica import ReplicaMetrics
from daskserve.testing import run_virtual

#: The duration of each request and task, and of each test.
TOOK_S, RUN_S = 0.1, 20.0


async def shared(concurrency: int, share: float, requests: int, backlog: bool) -> Counter[str]:
    """Return how many requests and tasks end while ``requests`` requests and some tasks always exist."""
    slots, loop = Slots("b#AAAAAA", concurrency, ReplicaMetrics()), asyncio.get_running_loop()
    slots.is_open = True
    room, ended, tasks = TaskSlots(share), Counter[str](), set[asyncio.Task[None]]()

    async def drop(message: Message) -> None:
        pass

    async def carry(kind: str, waited_s: float) -> None:
        timeout = QueueTimeout(1e6, waited_s)
        await slots.take(Envelope(EnvelopeKind.CALL, {}, queue_timeout=timeout), drop)
        await asyncio.sleep(TOOK_S)
        slots.free()
        ended[kind] += 1

    async def ask() -> None:
        while True:
            await carry("request", 0.0)

    async def consume() -> None:
        while True:
            for _ in range(room(concurrency, slots.ongoing, len(tasks), loop.time()) - len(tasks)):
                # The tasks of a backlog have waited longer than any request.
                task = asyncio.create_task(carry("task", 3600.0 if backlog else 0.0))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(0.01)

    runs = [asyncio.create_task(each) for each in (*(ask() for _ in range(requests)), consume())]
    await asyncio.sleep(RUN_S)
    for each in (*runs, *tasks):
        each.cancel()
    return ended


@each_case(
    ("concurrency", "share", "requests", "least_tasks", "least_requests"),
    [
        # Each slot has 200 turns.
        (8, 0.25, 24, 180, 1300),
        (2, 0.25, 20, 85, 280),
        (1, 0.25, 10, 12, 140),
        (8, 0.0, 24, 0, 1580),
        # If there are few requests, tasks get the other slots.
        (8, 0.25, 2, 1050, 350),
    ],
)
def test_neither_tasks_nor_requests_starve(
    concurrency: int, share: float, requests: int, least_tasks: int, least_requests: int
) -> None:
    for backlog in (False, True):
        ended = run_virtual(shared, concurrency, share, requests, backlog)
        # Without a backlog, a task has waited less than the requests before it.
        assert ended["task"] >= (least_tasks if backlog else min(8, least_tasks))
        assert ended["request"] >= least_requests
        assert share or requests < concurrency or not ended["task"]
