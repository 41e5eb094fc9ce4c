"""Large gathered bodies: they are received into their final memory, which is returned afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from http_harness import (
    TRANSPORT,
    connected,
    on_each_loop,
    poll_for,
    read_body,
    request,
    respond,
    serving,
)

from daskserve.common.types import Receive, Send
from daskserve.proxies.asgi import Scope
from daskserve.proxies.exchange.limits.memory_trimmer import LARGE_BYTES, QUIET_TICKS, MemoryTrimmer
from daskserve.proxies.exchange.request.body import RequestBody
from daskserve.proxies.exchange.request.body_buffer import FIRST_BYTES, GROWTH, BodyBuffer
from daskserve.proxies.exchange.request.buffered_body import BufferedBodyProtocol

BODY = bytes(range(256)) * 12_000  # 3 MB


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the parts that were received into a buffer."""
    sizes: list[int] = []
    before = BufferedBodyProtocol.buffer_updated

    def note(self: BufferedBodyProtocol, nbytes: int) -> None:
        sizes.append(nbytes)
        before(self, nbytes)

    monkeypatch.setattr(BufferedBodyProtocol, "buffer_updated", note)
    return sizes


async def echo_gathered(scope: Scope, receive: Receive, send: Send) -> None:
    assert isinstance(receive, RequestBody)
    await receive.gather()
    await respond(send, await read_body(receive))


@on_each_loop
async def test_a_gathered_body_is_received_into_its_buffer_and_the_next_request_as_before(
    filled: list[int],
) -> None:
    async with serving(echo_gathered) as server, connected(server) as client:
        for body in (BODY, b"short", BODY[:-1]):
            data = request(method="POST", body=body)
            await client.send(data[:1000])
            await client.send(data[1000:] + request(method="POST", body=b"next"))
            assert (await client.response()).body == body
            assert (await client.response()).body == b"next"
    assert (sum(filled) > len(BODY)) is TRANSPORT.get().startswith("asyncio")


@on_each_loop
async def test_a_request_that_ends_while_its_body_comes_drops_the_rest() -> None:
    async def give_up(scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(receive, RequestBody)
        gathering = asyncio.ensure_future(receive.gather())
        await poll_for(lambda: receive.received_bytes > len(BODY) // 3)
        gathering.cancel()
        await respond(send, b"enough")

    async with serving(give_up) as server, connected(server) as client:
        data = request(method="POST", body=BODY)
        await client.send(data[: len(data) // 2])
        assert (await client.response()).body == b"enough"
        await client.send(data[len(data) // 2 :] + data[: len(data) // 2])
        assert (await client.response()).body == b"enough"


def test_a_buffer_takes_a_few_times_what_it_has_until_it_has_what_was_announced() -> None:
    buffer = BodyBuffer(10 * FIRST_BYTES)
    buffer.write(b"a" * 10)
    sizes = []
    while (room := buffer.room()) is not None:
        sizes.append(buffer.size_bytes + len(room))
        room[:] = b"b" * len(room)
        size = len(room)
        del room
        buffer.filled(size)
    assert sizes == [FIRST_BYTES, FIRST_BYTES * GROWTH, 10 * FIRST_BYTES]
    buffer.write(b"more than announced")
    assert buffer.take() == b"a" * 10 + b"b" * (10 * FIRST_BYTES - 10) + b"more than announced"


def test_a_body_that_is_shorter_than_announced_has_no_padding() -> None:
    buffer = BodyBuffer(1000)
    buffer.write(b"short")
    assert buffer.take() == b"short"


def test_memory_is_returned_once_no_large_body_has_come_for_a_while() -> None:
    returned = []
    started: list[Callable[[], object]] = []

    def start_thread(name: str, function: Callable[[], object]) -> None:
        started.append(function)

    freed = MemoryTrimmer(lambda: returned.append(1), start_thread)  # type: ignore[arg-type]
    freed.note(LARGE_BYTES - 1)
    for _ in range(QUIET_TICKS + 1):
        freed.tick()
    assert not started
    freed.note(LARGE_BYTES)
    freed.tick()
    freed.note(LARGE_BYTES)
    for _ in range(QUIET_TICKS - 1):
        freed.tick()
    assert not started
    for _ in range(QUIET_TICKS):
        freed.tick()
    (trim,) = started
    trim()
    assert returned
