"""Forwarding between connections that are always ready."""

from __future__ import annotations

import asyncio
from typing import Any

from daskserve.cluster.scheduler.splice import (
    LARGE_BYTES,
    SMALL_BYTES,
    _carry_bytes,
    _carry_messages,
    _until_one_ends,
)


class ReadyStream:
    """A stream that always has data, until it ends, and accepts all writes at once."""

    def __init__(self, *pieces: int) -> None:
        self.left = list(pieces)
        self.asked: list[int] = []
        self.taken: list[int] = []

    async def read_into(self, buffer: Any, *, partial: bool) -> int:
        assert partial
        if not self.left:
            raise OSError("closed")
        self.asked.append(len(buffer))
        return min(len(buffer), self.left.pop(0))

    async def write(self, data: Any) -> None:
        self.taken.append(len(data))


class ReadyComm:
    """A comm that always has a message, until it ends, and accepts all writes at once."""

    def __init__(self, *messages: Any) -> None:
        self.left = list(messages)
        self.written: list[Any] = []

    async def read(self) -> Any:
        if not self.left:
            raise OSError("closed")
        return self.left.pop(0)

    async def write(self, message: Any) -> None:
        self.written.append(message)


def other_runs_during(carrying: Any) -> int:
    """Return how often another task ran while something was forwarded."""

    async def main() -> int:
        turns, task = 0, asyncio.create_task(carrying)
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        await task
        return turns

    return asyncio.run(main())


def test_other_tasks_run_between_any_two_buffers() -> None:
    source, sink = ReadyStream(*[LARGE_BYTES] * 50), ReadyStream()
    assert other_runs_during(_carry_bytes(source, sink)) >= 50  # type: ignore[arg-type]
    assert len(sink.taken) == 50


def test_other_tasks_run_between_any_two_messages() -> None:
    source, sink = ReadyComm(*range(50)), ReadyComm()
    assert other_runs_during(_carry_messages(source, sink)) >= 50
    assert sink.written == list(range(50))


def test_the_buffer_is_large_only_during_large_transfers() -> None:
    source = ReadyStream(100, SMALL_BYTES, LARGE_BYTES, SMALL_BYTES, 100, 100)
    other_runs_during(_carry_bytes(source, ReadyStream()))  # type: ignore[arg-type]
    assert source.asked == [SMALL_BYTES, SMALL_BYTES, LARGE_BYTES, LARGE_BYTES, LARGE_BYTES, SMALL_BYTES]


def test_the_end_of_one_direction_ends_the_other() -> None:
    async def main() -> list[str]:
        await _until_one_ends(_carry_messages(ReadyComm(), ReadyComm()), asyncio.Event().wait())
        return [each.get_name() for each in asyncio.all_tasks() if "splice" in each.get_name()]

    assert asyncio.run(main()) == []
