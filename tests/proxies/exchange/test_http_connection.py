"""How a connection reads its requests on the transports of an event loop."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest
from http_harness import (
    Hanging,
    advance,
    connected,
    echo,
    hello,
    poll_for,
    request,
    respond,
    serving,
    tracebacks,
)
from memory_transport import connect, serving_in_memory
from tables import each_case

from daskserve.common.types import Receive, Send
from daskserve.options.http import HTTPOptions
from daskserve.proxies.asgi import Scope
from daskserve.proxies.exchange.http_connection import HTTPConnection

LIMIT = HTTPOptions().max_header_bytes


def head_of(size: int) -> bytes:
    return request("/", "X-A: " + "a" * (size - len(request("/", "X-A: "))))


async def test_a_head_that_begins_in_the_piece_where_a_body_ends_may_be_as_long() -> None:
    async with serving(echo) as server, connected(server) as client:
        body = bytes(100_000)
        data = request(method="POST", body=body) + head_of(LIMIT - 100)
        client.writer.write(data[:-10])
        assert (await client.response()).body == body
        await client.send(data[-10:])
        assert (await client.response()).status == 200


async def test_a_refused_head_ends_the_connection_although_its_client_continues() -> None:
    async with serving(hello) as server, connected(server) as client:
        await client.send(b"no request\r\n\r\n")
        assert (await client.response()).status == 400
        await client.send(request())
        assert await client.rest() == b""
        advance(3)
        await poll_for(lambda: "0 connections" in repr(server))


@each_case("method", ["POST", "HEAD"])
async def test_a_broken_body_of_a_queued_request_is_refused_in_order(method: str) -> None:
    app = Hanging()
    async with serving(app) as server, connected(server) as client:
        broken = request("/", "Transfer-Encoding: chunked", method=method) + b"2\r\nhi\r\nzz\r\n"
        await client.send(request() + broken)
        await poll_for(lambda: app.running)
        app.go.set()
        assert (await client.response()).body == b"at last"
        assert (await client.response(has_body=method != "HEAD")).status == 400
        assert await client.rest() == b""


async def test_no_requests_are_read_while_others_wait() -> None:
    app = Hanging()
    async with serving_in_memory(app) as server:
        client = connect(server)
        sent = memoryview(request() * 100_000)
        left = client.move(sent)
        await poll_for(lambda: app.running)
        assert len(sent) - len(left) < 1 << 20
        for _ in range(20):
            assert len(client.move(left)) == len(left)
            await asyncio.sleep(0)
        assert app.running == 1
        client.reset()
        await poll_for(lambda: app.cancelled == 1)


@pytest.mark.parametrize("transport", ["asyncio"], indirect=True)
@pytest.mark.usefixtures("transport")
async def test_a_client_that_never_reads_its_last_response_is_disconnected() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, bytes(1 << 20))

    async with serving(app, keep_alive_timeout_s=5) as server, connected(server) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        (connection,) = server.state.connections
        (stream,) = cast(Any, server.state.streams)
        stream._transport.set_write_buffer_limits(1 << 24)  # the application need not wait for it
        stream._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        await client.send(request("/", "Connection: close"))
        await poll_for(stream.closed)
        assert connection in server.state.connections
        advance(6)
        await poll_for(lambda: not server.state.connections)


async def test_an_internal_error_ends_the_connection_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(HTTPConnection, "_begin", fail)

    async with serving(hello) as server, connected(server) as client:
        await client.send(request())
        assert await client.rest() == b""
    (record,) = tracebacks(caplog)
    assert "Reading a request failed" in record.getMessage()


async def test_data_after_the_last_request_of_a_connection_is_ignored() -> None:
    may_answer = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await may_answer.wait()
        await respond(send, b"last")

    async with serving(app) as server, connected(server) as client:
        await client.send(request("/", "Connection: close"))
        for _ in range(30):
            await client.send(b"\r\n" * 5_000)
        may_answer.set()
        assert (await client.response()).body == b"last"
        assert await client.rest() == b""


async def test_the_refusal_of_a_head_request_has_no_body() -> None:
    async with serving(hello) as server, connected(server) as client:
        await client.send(b"HEAD /\x01 HTTP/1.1\r\nHost: a\r\n\r\n")
        status, _ = await client.head()
        assert status == 400
        assert await client.rest() == b""
