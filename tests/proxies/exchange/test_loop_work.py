"""How connections with much work share an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from daskserve.proxies.exchange.limits.limits import Limits
from daskserve.proxies.exchange.limits.loop_work import (
    BUSY_S,
    SLICE_BYTES,
    TURN_BYTES,
    TURN_S,
    WINDOW_S,
    LoopWork,
    WorkByLoop,
)
from daskserve.proxies.exchange.websocket.inbox import MAX_INBOX_BYTES, WebSocketInbox, WebSocketReader


class ManualLoop:
    """Calls posted functions on request. Its time only advances while work runs."""

    def __init__(self) -> None:
        self.posted: list[Any] = []
        self.now = 0.0
        self.full = 0

    def call_soon(self, function: Any) -> None:
        self.posted.append(function)

    def time(self) -> float:
        return self.now

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.Future()

    def note_full(self) -> None:
        self.full += 1

    def turn(self) -> None:
        posted, self.posted = self.posted, []
        for function in posted:
            function()


class Client:
    """Works for a number of slices."""

    def __init__(self, loop_work: LoopWork, loop: ManualLoop, slices: int, slice_s: float = 0.0) -> None:
        self.loop_work, self.loop, self.left, self.slice_s = loop_work, loop, slices, slice_s

    def work(self) -> int:
        self.left -= 1
        self.loop.now += self.slice_s
        if self.left:
            self.loop_work.add(self.work)
        return SLICE_BYTES


@pytest.fixture
def loop() -> ManualLoop:
    return ManualLoop()


@pytest.fixture
def loop_work(loop: ManualLoop) -> LoopWork:
    return LoopWork(loop, loop.note_full)  # type: ignore[arg-type]


def test_a_turn_has_a_budget_of_bytes_that_all_share_evenly(loop_work: LoopWork, loop: ManualLoop) -> None:
    clients = [Client(loop_work, loop, 100) for _ in range(4)]
    for client in clients:
        loop_work.add(client.work)
    loop.turn()
    assert [client.left for client in clients] == [100 - TURN_BYTES // SLICE_BYTES // 4] * 4
    assert len(loop.posted) == 1
    while loop.posted:
        loop.turn()
    assert [client.left for client in clients] == [0] * 4
    assert loop.full == 4 * 100 * SLICE_BYTES // TURN_BYTES


def test_a_turn_has_a_budget_of_time(loop_work: LoopWork, loop: ManualLoop) -> None:
    client = Client(loop_work, loop, 100, slice_s=TURN_S / 3)
    loop_work.add(client.work)
    loop.turn()
    assert client.left == 97


def test_less_is_done_while_the_rest_of_a_turn_takes_long(loop_work: LoopWork, loop: ManualLoop) -> None:
    client = Client(loop_work, loop, 1000)
    loop_work.add(client.work)
    done = []
    for rest_s in (2 * BUSY_S, 2 * BUSY_S, 0, 0, *[2 * BUSY_S] * 9):
        loop.now += rest_s
        before = client.left
        loop.turn()
        done.append(before - client.left)
    whole = TURN_BYTES // SLICE_BYTES
    assert done[:6] == [whole // 2, whole // 4, whole // 2, whole, whole // 2, whole // 4]
    assert done[-1] == 1


def test_work_is_done_at_once_until_the_turn_is_full(loop_work: LoopWork, loop: ManualLoop) -> None:
    clients = [Client(loop_work, loop, 1) for _ in range(2 * TURN_BYTES // SLICE_BYTES)]
    for client in clients:
        loop_work.do(client.work)
    assert sum(client.left for client in clients) == TURN_BYTES // SLICE_BYTES
    loop.now += WINDOW_S
    late = Client(loop_work, loop, 1)
    loop_work.do(late.work)
    assert late.left == 0
    loop.turn()
    assert sum(client.left for client in clients) == 0


def test_work_that_fails_does_not_stop_the_rest(loop_work: LoopWork, loop: ManualLoop) -> None:
    def fail() -> int:
        raise ValueError("broken")

    client = Client(loop_work, loop, 2)
    loop_work.add(fail)
    loop_work.add(client.work)
    with pytest.raises(ValueError, match="broken"):
        loop.turn()
    loop.turn()
    assert client.left == 0


async def test_a_turn_that_nobody_waits_for_any_more_is_skipped() -> None:
    by_loop = WorkByLoop(lambda: None)
    loop_work = by_loop.current()
    assert loop_work is by_loop.current()
    given_up, kept = loop_work.turn(1), loop_work.turn(1)
    given_up.cancel()
    await kept


class StillStream:
    """A stream whose data the test passes on itself."""

    def start_reading(self, on_data: Any) -> None:
        self.receive = on_data

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def test_forty_clients_do_no_more_in_a_turn_than_the_budgets() -> None:
    """The data of all clients arrives at once, and each client's data takes a hundred slices."""

    done = 0

    def parse(data: bytes) -> Iterator[int]:
        nonlocal done
        for _ in range(100):
            done += 1
            yield SLICE_BYTES

    loop_work = WorkByLoop(lambda: None).current()
    for _ in range(40):
        stream: Any = StillStream()
        WebSocketReader(WebSocketInbox(Limits()), parse).start(stream, loop_work)
        stream.receive(b"x")
    most = done
    while done < 40 * 100:
        before = done
        await asyncio.sleep(0)
        most = max(most, done - before)
    assert most <= 2 * TURN_BYTES // SLICE_BYTES


async def test_a_full_inbox_stops_work_in_the_middle_until_there_is_room() -> None:
    inbox = WebSocketInbox(Limits())

    def parse(data: bytes) -> Iterator[int]:
        for _ in range(100):
            inbox.put({"type": "websocket.receive"}, MAX_INBOX_BYTES // 2)
            yield 1

    stream: Any = StillStream()
    reader = WebSocketReader(inbox, parse)
    reader.start(stream, WorkByLoop(lambda: None).current())
    stream.receive(b"x")
    for _ in range(100):
        assert inbox.is_full is (_ < 98)
        await inbox.take()
        await asyncio.sleep(0)
    reader.stop()
