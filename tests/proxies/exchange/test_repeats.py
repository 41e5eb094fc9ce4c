"""Requests that come again: they mean what they meant, whatever is going on on their connection."""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from unittest import mock

import pytest
from http_harness import connected, hello, request, respond, run, serving
from hypothesis import example, given, settings
from hypothesis import strategies as st
from uvicorn import Config

from daskserve.clock import LoopClock
from daskserve.proxies.asgi import Scope
from daskserve.proxies.exchange.repeats import LastRequest
from daskserve.proxies.server.carrier import Carrier
from daskserve.proxies.server.uvicorn_connection import SharedState, UvicornConnection
from daskserve.types import Receive, Send

SERVER = "uvicorn"

PLAIN = request("/plain?a=1", "X-A: 1")
#: What clients may send, in whole and in parts.
PIECES = (
    PLAIN,
    PLAIN,
    PLAIN,
    PLAIN[:1],
    PLAIN[1:],
    PLAIN + PLAIN,
    PLAIN + PLAIN[:20],
    PLAIN[20:],
    b"\r\n",
    request("/other"),
    request("/plain?a=1", "X-A: 1", method="HEAD"),
    request("/plain?a=1", "X-A: 1", "Connection: close"),
    request("/plain?a=1", "X-A: 1", "Upgrade: h2c", "Connection: Upgrade"),
    request("/body", method="POST", body=b"body"),
    request("/body", "Content-Length: 200", method="POST"),
    request("/old").replace(b"1.1", b"1.0"),
    request("test:80", method="CONNECT"),
    b"nonsense\r\n\r\n",
    b"\r\n" * 40_000 + PLAIN,
)
TAIL, TWO, ONE_AND_A_HALF, HALF, EMPTY, OTHER, POST, LONG = 4, 5, 6, 7, 8, 9, 13, 18
#: A piece to be sent by the client, or None, for the application's next answer; and turns of the loop.
Step = tuple[int | None, int]
PLAIN_STEPS: list[Step] = [(0, 9), (None, 9)]


class Wire(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False
        self._socket = mock.Mock(spec=socket.socket)
        self._socket.getsockname.return_value = self._socket.getpeername.return_value = ("127.0.0.1", 80)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else default

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


class SameSecond(LoopClock):
    """Two connections that are compared must not stand on two sides of a second, which answers tell."""

    def wall(self) -> float:
        return 0.0


async def carry(steps: list[Step]) -> tuple[list[Any], bytes, bool]:
    """Return what an application sees of one connection, and the connection of it."""
    seen: list[Any] = []
    answers = asyncio.Semaphore(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append({**scope, "headers": list(scope["headers"])})
        scope["headers"].append((b"x-own", b"1"))
        scope["extensions"] = {"own": True}
        scope["path"] = "/elsewhere"
        await answers.acquire()
        message = await receive()
        while message["type"] == "http.request" and message["more_body"]:
            message = await receive()
        seen.append(message)
        await respond(send, seen[-2]["path"].encode(), headers=((b"date", b"today"),))

    carrier = Carrier(app, max_body_bytes=100, idle_timeout_s=60, clock=SameSecond())
    config = Config(app, loop="none", http=UvicornConnection, ws="none", lifespan="off", log_config=None)
    config.load()
    connection = UvicornConnection(carrier, config, SharedState())
    wire = Wire()
    connection.connection_made(wire)
    for piece, turns in steps:
        if wire.is_closed:
            break
        if piece is None:
            answers.release()
        else:
            connection.data_received(PIECES[piece])
        for _ in range(turns):
            await asyncio.sleep(0)
    result = seen.copy(), wire.written, wire.is_closed
    connection.connection_lost(None)
    await asyncio.gather(*carrier.tasks, return_exceptions=True)
    carrier.watch.stop()
    return result


STEPS = st.lists(
    st.tuples(st.one_of(st.none(), st.just(0), st.integers(0, len(PIECES) - 1)), st.integers(0, 9)),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
@example(steps=[(3, 9), (TAIL, 9), (None, 9)] * 3 + [(TAIL, 9)])
@example(steps=[(ONE_AND_A_HALF, 9), (None, 9), (HALF, 9), (None, 9)] * 4)
@example(steps=[(LONG, 9), (None, 9), (EMPTY, 9)] * 2 + [(EMPTY, 9)])
@example(steps=[(TWO, 9), (None, 9), (None, 9)] * 4)
@example(steps=[(0, 9), (OTHER, 9), (None, 2), (0, 9), *[(None, 9)] * 3])
@example(steps=[(0, 9), (OTHER, 9), (None, 3), (0, 9), *[(None, 9)] * 3])
def test_nobody_can_tell_that_a_request_was_read_before(steps: list[Step]) -> None:
    # Three requests that are answered first, so that the next like them is not read any more.
    steps = PLAIN_STEPS * 3 + steps
    with mock.patch.object(LastRequest, "note"):
        expected = asyncio.run(carry(steps))
    assert asyncio.run(carry(steps)) == expected


def test_the_third_is_not_read_any_more_and_none_is_that_differs() -> None:
    async def parsed(*pieces: int) -> int:
        with mock.patch.object(UvicornConnection, "_parse", autospec=True, side_effect=read) as parse:
            seen, *_ = await carry([step for piece in pieces for step in ((piece, 9), (None, 9))])
        assert len(seen) == 2 * len(pieces)
        return parse.call_count

    read = UvicornConnection._parse
    assert asyncio.run(parsed(0, 0, 0, 0, 0)) == 2
    assert asyncio.run(parsed(0, 0, OTHER, 0, 0)) == 5
    assert asyncio.run(parsed(POST, POST, POST, POST)) == 4


def test_a_long_one_is_not_kept() -> None:
    last = LastRequest()
    for size, is_kept in ((2048, True), (2049, False)):
        for _ in range(2):
            last.begun = {"headers": []}
            last.note(bytes(size))
        assert (len(last.data), last.scope is not None) == (size * is_kept, is_kept)
        assert last.begun is None


@pytest.mark.usefixtures("carrier")
def test_over_a_socket() -> None:
    async def test() -> None:
        async with serving(hello) as server, connected(server) as client:
            for path in ("/a",) * 5 + ("/b",) * 2 + ("/a",) * 4:
                assert (await client.get(path)).body.decode() == path
            await client.send(request("/a") * 3)
            assert [(await client.response()).body for _ in range(3)] == [b"/a"] * 3

    run(test)
