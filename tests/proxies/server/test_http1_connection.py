"""Streams that wait for the next head as soon as a response is whole."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tornado.iostream import IOStream, StreamClosedError

from daskserve.proxies.server.tornado_connection import HEAD_END, RequestStream

FIRST, SECOND = b"GET /1 HTTP/1.1\r\n\r\n", b"GET /2 HTTP/1.1\r\n\r\n"
LIMIT_BYTES = 100
DEADLINE_S = 10.0


def run(scenario: Callable[[RequestStream, socket.socket], Awaitable[None]]) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        stream = RequestStream(ours)
        with theirs:
            async with asyncio.timeout(DEADLINE_S):
                await scenario(stream, theirs)
        stream.close()

    asyncio.run(main())


def head(stream: RequestStream) -> Awaitable[bytes]:
    return stream.read_until_regex(HEAD_END, max_bytes=LIMIT_BYTES)


def test_what_is_read_ahead_is_what_is_asked_for_next() -> None:
    async def scenario(stream: RequestStream, client: socket.socket) -> None:
        client.sendall(FIRST)
        assert await head(stream) == FIRST
        stream.read_ahead(LIMIT_BYTES)
        stream.read_ahead(LIMIT_BYTES)
        assert stream.reading()
        client.sendall(SECOND + FIRST)
        assert await head(stream) == SECOND
        stream.read_ahead(LIMIT_BYTES)
        assert not stream.reading(), "it has come in already"
        assert await head(stream) == FIRST

    run(scenario)


def test_a_client_that_hangs_up_meanwhile_is_seen_by_the_next_read() -> None:
    async def scenario(stream: RequestStream, client: socket.socket) -> None:
        stream.read_ahead(LIMIT_BYTES)
        client.shutdown(socket.SHUT_WR)
        with pytest.raises(StreamClosedError):
            await head(stream)
        stream.read_ahead(LIMIT_BYTES)
        with pytest.raises(StreamClosedError):
            await head(stream)

    run(scenario)


def test_a_head_that_is_too_long_closes_the_connection() -> None:
    async def scenario(stream: RequestStream, client: socket.socket) -> None:
        client.sendall(b"x" * (LIMIT_BYTES + 1))
        stream.read_ahead(LIMIT_BYTES)
        with pytest.raises(StreamClosedError):
            await head(stream)

    run(scenario)


def test_delays_are_switched_off_once_and_never_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(IOStream, "set_nodelay", lambda self, value: asked.append(value))

    async def scenario(stream: RequestStream, client: socket.socket) -> None:
        for value in (False, True, False, True):
            stream.set_nodelay(value)
        assert asked == [True]

    run(scenario)


def test_a_loop_of_requests_leaves_the_event_loops_list_of_sockets_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes: list[Any] = []

    async def scenario(stream: RequestStream, client: socket.socket) -> None:
        loop: Any = stream.io_loop
        stream.set_close_callback(lambda: None)
        stream.read_ahead(LIMIT_BYTES)
        original = loop.update_handler

        def update(fd: int, events: int) -> None:
            changes.append(events)
            original(fd, events)

        monkeypatch.setattr(loop, "update_handler", update)
        for number in range(5):
            client.sendall(FIRST)
            # It is here some turns before anybody asks for it, as under load.
            for _ in range(3):
                await asyncio.sleep(0)
            assert await head(stream) == FIRST, number
            stream.read_ahead(LIMIT_BYTES)

    run(scenario)
    assert changes == []
