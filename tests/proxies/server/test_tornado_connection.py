"""One connection under Tornado, over a pair of sockets: when it is read, and what the stream counts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from http_harness import hello, poll_for, request
from tornado.iostream import IOStream

from daskserve.common.clock import LoopClock
from daskserve.common.types import Receive, Send
from daskserve.proxies.asgi import Scope
from daskserve.proxies.exchange.request_head import HeadLimits
from daskserve.proxies.exchange.server_state import ServerState
from daskserve.proxies.server.tornado_connection import RequestStream, TornadoConnection

DEADLINE_S = 10.0


class Bench:
    """A connection that is served, and the client's end of it."""

    def __init__(self, client: socket.socket, stream: RequestStream) -> None:
        client.setblocking(False)
        self.client = client
        self.stream = stream
        self.server_state = ServerState(
            self._app,
            head_limits=HeadLimits(1 << 16, 100),
            max_body_bytes=1000,
            max_message_bytes=1000,
            idle_timeout_s=60,
            clock=LoopClock(),
        )
        self.serving = asyncio.ensure_future(TornadoConnection(self.server_state, stream).serve())
        self.paths: list[str] = []

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        await hello(scope, receive, send)

    async def answers(self, count: int) -> None:
        """Return once the given number of requests have been answered."""
        received = b""
        while received.count(b"HTTP/1.1 200 ") < count:
            received += await asyncio.get_running_loop().sock_recv(self.client, 65536)


def run(scenario: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            bench = Bench(theirs, RequestStream(ours))
            async with asyncio.timeout(DEADLINE_S):
                await scenario(bench)
                bench.stream.close()
                await bench.serving
            assert not bench.server_state.connections
            bench.server_state.watch.stop()

    asyncio.run(main())


def test_the_next_head_is_read_as_soon_as_a_response_is_written() -> None:
    async def scenario(bench: Bench) -> None:
        is_reading: list[bool] = []

        async def note(scope: Scope, receive: Receive, send: Send) -> None:
            await hello(scope, receive, send)
            is_reading.append(bench.stream.reading())

        bench.server_state.app = note
        for path in ("/1", "/2"):
            bench.client.sendall(request(path))
            await bench.answers(1)
        assert is_reading == [True, True]

    run(scenario)


def test_buffered_requests_are_served_in_order() -> None:
    async def scenario(bench: Bench) -> None:
        bench.client.sendall(request("/1") + request("/2") + request("/3"))
        await bench.answers(3)
        assert bench.paths == ["/1", "/2", "/3"]

    run(scenario)


def test_a_client_that_hangs_up_ends_the_connection() -> None:
    async def scenario(bench: Bench) -> None:
        bench.client.sendall(request("/1"))
        await bench.answers(1)
        bench.client.close()
        await bench.serving
        assert bench.stream.closed()

    run(scenario)


def test_a_head_that_is_too_long_closes_the_connection() -> None:
    async def scenario(bench: Bench) -> None:
        bench.client.sendall(b"x" * ((1 << 16) + 1))
        await bench.serving
        assert bench.stream.closed()
        assert bench.paths == []

    run(scenario)


def test_delays_are_switched_off_once_and_never_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(IOStream, "set_nodelay", lambda self, value: asked.append(value))

    async def scenario(bench: Bench) -> None:
        for value in (False, True, False, True):
            bench.stream.set_nodelay(value)
        assert asked == [True]

    run(scenario)


def test_the_stream_counts_what_the_system_has_taken() -> None:
    async def scenario(bench: Bench) -> None:
        written = bench.stream.write(bytes(10_000_000))
        before = bench.stream.sent_bytes
        assert 0 < before < 10_000_000
        await asyncio.get_running_loop().sock_recv(bench.client, 1 << 20)
        await poll_for(lambda: bench.stream.sent_bytes > before)
        while not written.done():
            await asyncio.get_running_loop().sock_recv(bench.client, 1 << 20)
            await asyncio.sleep(0)
        assert bench.stream.sent_bytes == 10_000_000

    run(scenario)


def test_a_loop_of_requests_leaves_the_event_loops_list_of_sockets_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes: list[Any] = []

    async def scenario(bench: Bench) -> None:
        loop: Any = bench.stream.io_loop
        bench.client.sendall(request("/first"))
        await bench.answers(1)
        original = loop.update_handler

        def update(fd: int, events: int) -> None:
            changes.append(events)
            original(fd, events)

        monkeypatch.setattr(loop, "update_handler", update)
        for _ in range(5):
            bench.client.sendall(request("/next"))
            await bench.answers(1)

    run(scenario)
    assert changes == []
