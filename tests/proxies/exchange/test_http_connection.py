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
    run,
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


@each_case("piece", [1000, 60_000, 1 << 20])
def test_a_head_beyond_the_size_limit_is_refused(piece: int) -> None:
    async def test() -> None:
        async with serving(hello) as server:
            for size, status in ((LIMIT - 100, 200), (LIMIT * 2 + 1, 431)):
                async with connected(server) as client:
                    assert (await client.get()).status == 200
                    head = head_of(size)
                    for start in range(0, size, piece):
                        client.writer.write(head[start : start + piece])
                        await asyncio.sleep(0)
                    response = await client.response()
                    assert response.status == status
                    if status == 431:
                        assert await client.rest() == b""

    run(test)


def test_a_head_that_begins_in_the_piece_where_a_body_ends_may_be_as_long() -> None:
    async def test() -> None:
        async with serving(echo) as server, connected(server) as client:
            body = bytes(100_000)
            data = request(method="POST", body=body) + head_of(LIMIT - 100)
            client.writer.write(data[:-10])
            assert (await client.response()).body == body
            await client.send(data[-10:])
            assert (await client.response()).status == 200

    run(test)


def test_a_refused_head_ends_the_connection_although_its_client_continues() -> None:
    async def test() -> None:
        async with serving(hello) as server, connected(server) as client:
            await client.send(b"no request\r\n\r\n")
            assert (await client.response()).status == 400
            await client.send(request())
            assert await client.rest() == b""
            advance(3)
            await poll_for(lambda: "0 connections" in repr(server))

    run(test)


def test_data_after_a_refused_head_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(hello) as server, connected(server) as client:
            client.writer.write(head_of(LIMIT + 1000) + b"no request\r\n\r\n")
            assert (await client.response()).status == 431
            assert await client.rest() == b""

    run(test)
    assert tracebacks(caplog) == []


@each_case("method", ["POST", "HEAD"])
def test_a_broken_body_of_a_queued_request_is_refused_in_order(method: str) -> None:
    async def test() -> None:
        app = Hanging()
        async with serving(app) as server, connected(server) as client:
            broken = request("/", "Transfer-Encoding: chunked", method=method) + b"2\r\nhi\r\nzz\r\n"
            await client.send(request() + broken)
            await poll_for(lambda: app.running)
            app.go.set()
            assert (await client.response()).body == b"at last"
            assert (await client.response(has_body=method != "HEAD")).status == 400
            assert await client.rest() == b""

    run(test)


@each_case("before", [b"", request()])
@each_case("endless", [b"2;" + b"x" * 100_000, b"0\r\n" + b"X: y\r\n" * 20_000])
def test_chunk_overhead_beyond_the_limit_is_refused(before: bytes, endless: bytes) -> None:
    async def test() -> None:
        async with serving(echo) as server, connected(server) as client:
            upload = b"POST / HTTP/1.1\r\nHost: a\r\nX-A: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % (
                b"a" * 30_000
            )
            client.writer.write(before + upload + b"2;" + b"x" * 3_000 + b"\r\nhi\r\n0\r\n\r\n")
            if before:
                assert (await client.response()).status == 200
            assert (await client.response()).body == b"hi"
            client.writer.write(before + upload + endless)
            if before:
                assert (await client.response()).status == 200
            assert (await client.response()).status == 400

    run(test)


def test_trailers_are_not_headers() -> None:
    async def test() -> None:
        seen: list[Any] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive())["more_body"]:
                pass
            seen.append(scope["headers"])
            await respond(send)

        async with serving(app) as server, connected(server) as client:
            for trailer in (b"Host: b", b"Connection: close"):
                await client.send(
                    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
                )
                await client.send(trailer + b"\r\n\r\n")
                assert (await client.response()).status == 200
            assert (await client.get()).status == 200
        assert seen[:2] == [[(b"host", b"a"), (b"transfer-encoding", b"chunked")]] * 2

    run(test)


def test_no_requests_are_read_while_others_wait() -> None:
    async def test() -> None:
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

    run(test)


@pytest.mark.parametrize("transport", ["asyncio"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_a_client_that_never_reads_its_last_response_is_disconnected() -> None:
    async def test() -> None:
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

    run(test)


def test_an_internal_error_ends_the_connection_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(HTTPConnection, "_begin", fail)

    async def test() -> None:
        async with serving(hello) as server, connected(server) as client:
            await client.send(request())
            assert await client.rest() == b""

    run(test)
    (record,) = tracebacks(caplog)
    assert "Reading a request failed" in record.getMessage()


@each_case("is_first", [True, False])
def test_data_before_a_target_beyond_the_limit_is_refused(is_first: bool) -> None:
    async def test() -> None:
        async with serving(hello) as server:
            for size, status in ((LIMIT // 2, 400), (4 * LIMIT, 431)):
                async with connected(server) as client:
                    if not is_first:
                        assert (await client.get()).status == 200
                    method, rest = request().split(b" ", 1)
                    data = method + b" " * size + rest
                    for start in range(0, len(data), 10_000):
                        client.writer.write(data[start : start + 10_000])
                        await asyncio.sleep(0)
                    response = await client.response()
                    assert response.status == status
                    assert await client.rest() == b""

    run(test)


def test_data_after_the_last_request_of_a_connection_is_ignored() -> None:
    async def test() -> None:
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

    run(test)


def test_a_target_received_in_parts_is_joined() -> None:
    async def test() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await respond(send, scope["raw_path"] + b"?" + scope["query_string"])

        async with serving(app) as server, connected(server) as client:
            for _ in range(2):
                for part in (b"GE", b"T /a", b"b/", b"c?d", b"=e", b" HTTP/1.1\r\nHost: a\r\n\r", b"\n"):
                    await client.send(part)
                    for _ in range(5):  # the server is on the same loop
                        await asyncio.sleep(0)
                assert (await client.response()).body == b"/ab/c?d=e"

    run(test)


def test_the_refusal_of_a_head_request_has_no_body() -> None:
    async def test() -> None:
        async with serving(hello) as server, connected(server) as client:
            await client.send(b"HEAD /\x01 HTTP/1.1\r\nHost: a\r\n\r\n")
            status, _ = await client.head()
            assert status == 400
            assert await client.rest() == b""

    run(test)
