"""Sources: replicas read an async iterator and acknowledge its items."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import quick_instance
from gates import Gates, anew_for_each_test
from tables import each_case

import daskserve as serve
from daskserve.data.tasks.sources import SourceOptions, SourceReader
from daskserve.testing import local_instance


class Broker(Gates):
    """Delivers numbers, again if they are not acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.waiting: list[int] = []
        self.taken: set[int] = set()
        self.acked: list[int] = []
        self.refused: list[str] = []
        self.handled: list[int] = []
        self.most = 0
        self.failures = 0
        self.closed = 0

    async def messages(self) -> AsyncIterator[int]:
        while True:
            with self.lock:
                found = self.waiting.pop(0) if self.waiting else None
                if found is not None:
                    self.taken.add(found)
                    self.most = max(self.most, len(self.taken))
            if found is None:
                await asyncio.sleep(0.005)
            else:
                yield found

    def ack(self, number: int) -> None:
        with self.lock:
            self.taken.remove(number)
            self.acked.append(number)

    async def nack(self, number: int, error: Exception) -> None:
        with self.lock:
            self.taken.remove(number)
            self.refused.append(str(error))


BROKER = Broker()
fresh = anew_for_each_test(BROKER)


class Reader:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @serve.tasks.source("handle", max_in_flight=2, backoff_s=0.01)
    async def numbers(self) -> AsyncIterator[serve.tasks.SourceItem]:
        try:
            async for number in BROKER.messages():
                yield serve.tasks.SourceItem(
                    number, partial(BROKER.ack, number), partial(BROKER.nack, number)
                )
                if number in (5, 20) and BROKER.failures < 2:
                    BROKER.failures += 1
                    raise ConnectionError("the broker is away")
        finally:
            BROKER.closed += 1

    def handle(self, number: int) -> None:
        if number < 0:
            raise ValueError(f"{number} is negative")
        if number >= 1000:
            BROKER.go.wait(10)
        BROKER.handled.append(self.factor * number)

    async def __call__(self, request: Any = None) -> str:
        return "alive"


def poll_for(condition: Callable[[], Any]) -> Any:
    return quick_instance.poll_for(condition, what=lambda: "the condition is still false")


def test_replicas_read_handle_and_acknowledge_items(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # of errors that are meant
    BROKER.waiting = [*range(20), -1, 20]
    with local_instance():
        handle = serve.run(serve.deployment(num_replicas=2)(Reader).bind(10))
        poll_for(lambda: len(BROKER.acked) == 21)
        assert sorted(BROKER.acked) == [*range(21)]
        assert sorted(BROKER.handled) == [10 * number for number in range(21)]
        poll_for(lambda: BROKER.refused == ["-1 is negative"])
        assert BROKER.failures >= 1
        assert BROKER.most <= 4
        assert handle.remote().result() == "alive"


def test_a_source_stays_a_method_of_its_class() -> None:
    assert inspect.isasyncgenfunction(Reader.numbers)


def test_a_replica_that_stops_handles_what_it_has_read_and_no_more() -> None:
    BROKER.waiting = [1000, 1001, 1002]
    with local_instance():
        serve.run(serve.deployment(Reader).bind(1))
        poll_for(lambda: BROKER.taken == {1000, 1001})
        threading.Timer(0.2, BROKER.go.set).start()
        serve.delete("default")
        assert sorted(BROKER.acked) == [1000, 1001]
        assert BROKER.waiting == [1002]
        assert BROKER.closed == 1


def test_a_replica_does_not_wait_for_items_beyond_its_grace_period() -> None:
    BROKER.waiting = [1000]
    with local_instance():
        serve.run(serve.deployment(graceful_shutdown_timeout_s=0.1)(Reader).bind(1))
        poll_for(lambda: BROKER.taken == {1000})
        serve.delete("default")
        assert BROKER.acked == []
        BROKER.go.set()
        poll_for(lambda: BROKER.handled == [1000])  # the thread has ended, and adds nothing to the next test


class Quick:
    """Its source ends; its own destructor still runs."""

    @serve.tasks.source("handle")
    async def numbers(self) -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async def handle(self, number: int) -> None:
        BROKER.handled.append(number)

    def __del__(self) -> None:
        BROKER.closed += 1


async def test_a_stop_that_is_cancelled_ends_what_is_handled_although_the_source_hangs() -> None:
    began, ends = asyncio.Event(), asyncio.Event()

    async def read() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    async def handle(item: int) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ends.set()

    reader = SourceReader(read, handle, SourceOptions("handle", None, 1.0, 1.0))
    reader.start()
    await began.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await reader.stop()
    async with asyncio.timeout(10):
        await ends.wait()


def test_a_source_may_end_and_yield_plain_values() -> None:
    with local_instance():
        serve.run(serve.deployment(Quick).bind())
        poll_for(lambda: sorted(BROKER.handled) == [0, 1, 2])
        serve.delete("default")
        poll_for(lambda: BROKER.closed == 1)


def _no_handler() -> None:
    class Wrong:
        @serve.tasks.source("missing")
        async def read(self) -> AsyncIterator[int]:
            yield 1


@each_case(
    ("make", "error", "text"),
    [
        (_no_handler, (TypeError, RuntimeError), "missing|__set_name__"),
        (lambda: serve.tasks.source(lambda self: None), TypeError, "name of a method"),
        (lambda: serve.tasks.source("a", max_in_flight=0), ValueError, "max_in_flight is 0"),
        (lambda: serve.tasks.source("a", backoff_s=-1), ValueError, "backoff_s is -1"),
        (lambda: serve.tasks.source("a")(lambda self: None), TypeError, "async def"),
    ],
)
def test_wrong_sources_are_refused(make: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        make()
