"""Alarms fire once, at the earliest time that was set, on every kind of event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from daskserve.data.batching.limits import BatchLimits
from daskserve.data.batching.queue import BatchQueue
from daskserve.loops.alarm import Alarm

DEADLINE_S = 10.0


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    def run(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(scenario, DEADLINE_S))

    return run


def test_the_earliest_time_counts(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        fired = asyncio.Event()
        calls: list[float] = []
        now = asyncio.get_running_loop().time
        alarm = Alarm(lambda: (calls.append(now()), fired.set())[0])
        began = now()
        alarm.set(began + 1000)
        alarm.set(began + 0.02)
        alarm.set(began + 2000)
        await fired.wait()
        assert 0.015 < calls[0] - began < 1000
        fired.clear()
        alarm.set(now())  # at once: it waits for nothing earlier any more
        alarm.set(now())
        await fired.wait()
        await asyncio.sleep(0.01)
        assert len(calls) == 2

    run(scenario())


def test_a_cancelled_alarm_does_not_fire_and_can_be_set_again(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def scenario() -> None:
        fired = asyncio.Event()
        alarm = Alarm(fired.set)
        now = asyncio.get_running_loop().time
        alarm.set(now())
        alarm.cancel()
        alarm.cancel()
        await asyncio.sleep(0.01)
        assert not fired.is_set()
        alarm.set(now() + 0.001)
        await fired.wait()

    run(scenario())


def test_batches_wait_for_less_than_a_millisecond(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        async def double(items: list[int]) -> list[int]:
            return [2 * item for item in items]

        queue: BatchQueue[int, int] = BatchQueue(double, BatchLimits(100, 0.0004))
        found = await asyncio.gather(*[queue.submit(number) for number in range(5)])
        assert found == [0, 2, 4, 6, 8]

    run(scenario())
