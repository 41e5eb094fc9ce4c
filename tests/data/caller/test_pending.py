"""Calls across loops: results, errors and cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any, cast

import pytest

from daskserve.cluster.dask.connection import DaskConnection
from daskserve.data.caller.calls.pending import start_call, waiter_for
from daskserve.data.caller.calls.response import Response
from daskserve.loops.event_loop import running_loop
from daskserve.loops.thread_calls import LoopQueues

DEADLINE_S = 10.0


class LoopConnection:
    """A connection's loop, in a separate thread."""

    is_closed = False

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop_queues = LoopQueues()
        self.current_task = lambda: None
        self.thread_calls = self.loop_queues.get(self.loop)
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def runs_here(self) -> bool:
        return running_loop() is self.loop

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def connection() -> Iterator[DaskConnection]:
    connection = LoopConnection()
    yield cast(DaskConnection, connection)
    connection.close()


async def answer(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


def test_results_and_errors_cross_threads(connection: DaskConnection) -> None:
    assert start_call(connection, answer(7)).result(DEADLINE_S) == 7
    with pytest.raises(KeyError):
        start_call(connection, answer(KeyError("k"))).result(DEADLINE_S)


def test_a_waiter_on_another_loop_is_woken_and_its_cancellation_cancels_the_call(
    connection: DaskConnection,
) -> None:
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def main() -> None:
        call = start_call(connection, answer(1))
        await waiter_for(connection, call)
        assert call.result() == 1
        call = start_call(connection, hang())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await Response(call, connection, "id", cast(Any, None))
        assert call.cancelled()

    asyncio.run(main())
    assert cancelled.wait(DEADLINE_S)


def test_a_task_that_its_loop_cancels_before_its_first_step_ends_its_call(connection: DaskConnection) -> None:
    async def begin() -> Any:
        before = asyncio.all_tasks()
        call = start_call(connection, answer(1))
        (task,) = asyncio.all_tasks() - before
        task.cancel()
        return call

    call = asyncio.run_coroutine_threadsafe(begin(), connection.loop).result(DEADLINE_S)
    with pytest.raises(CancelledError):
        call.result(DEADLINE_S)
