"""Many requests of batch jobs that wait for slots."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from quick_instance import poll_for

import daskserve as serve
from daskserve.data.caller.deferred_requests import MAX_SENT, DeferredRequests
from daskserve.options.fields.priority import BATCH_PRIORITY
from daskserve.testing import local_instance

DEADLINE_S = 10.0


@serve.deployment(max_ongoing_requests=2)
class Model:
    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.began = 0

    async def __call__(self, value: int) -> int:
        self.began += 1
        await self.go.wait()
        return value

    async def count(self) -> int:
        return self.began

    async def let_go(self) -> None:
        self.go.set()


@pytest.fixture
def handle() -> Iterator[Any]:
    with local_instance():
        yield serve.run(Model.bind(), route_prefix=None)


def test_more_than_a_replica_queues_wait_their_turn_and_live_requests_pass(handle: Any) -> None:
    job = handle.options(priority=BATCH_PRIORITY)
    found = [job.remote(number) for number in range(100)]
    live = Counter[int]()

    def has_begun() -> bool:
        live[handle.count.remote().result(DEADLINE_S)] += 1
        return live[1] > 20

    poll_for(has_begun, what=lambda: f"tasks that had begun, as live requests saw them: {live}")
    assert set(live) <= {0, 1}
    handle.let_go.remote().result(DEADLINE_S)
    assert [each.result(DEADLINE_S) for each in found] == list(range(100))


async def test_turns_are_in_order_and_none_is_lost_by_a_request_that_leaves() -> None:
    deferred, order = DeferredRequests(), list[int]()

    async def wait(number: int) -> None:
        await deferred.wait()
        order.append(number)

    for _ in range(MAX_SENT):
        await deferred.wait()
    waiting = [asyncio.create_task(wait(number)) for number in range(4)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    deferred.release()
    waiting[1].cancel()  # it has got its turn just now
    await asyncio.wait(waiting[:3])
    assert order == [2]
    deferred.release()
    await waiting[3]
    for _ in range(MAX_SENT):
        deferred.release()
    await asyncio.wait_for(deferred.wait(), DEADLINE_S)
