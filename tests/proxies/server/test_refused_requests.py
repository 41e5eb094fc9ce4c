"""Requests that never reach the application: limits of heads, counts, and the cost of slow heads."""

from __future__ import annotations

import asyncio
import time

import pytest
from http_harness import HANDSHAKE, Client, connected, hello, poll_for, request, serving

from daskserve.common.types import Receive, Send
from daskserve.proxies.asgi import Scope
from daskserve.proxies.server.server import HTTPServer

pytestmark = pytest.mark.smoke


async def response_to(server: HTTPServer, data: bytes) -> tuple[int, str]:
    async with connected(server) as client:
        await client.send(data)
        response = await client.response()
        assert response.headers["connection"] == "close"
        assert await client.rest() == b""
        return response.status, response.body.decode()


async def test_the_limits_of_a_head_are_options() -> None:
    async with serving(hello, max_header_bytes=1024, max_headers=8) as server:
        async with connected(server) as client:
            assert (await client.get("/", *["X: y"] * 7)).status == 200
            assert (await client.get("/", "X: " + "y" * 900)).status == 200
        status, text = await response_to(server, request("/", *["X: y"] * 8))
        assert (status, text) == (431, "The request has 9 headers; max_headers allows 8.")
        status, text = await response_to(server, request("/", "X: " + "y" * 1024))
        expected = "The request's headers are larger than the 1024 bytes that max_header_bytes allows."
        assert (status, text) == (431, expected)


async def test_refused_requests_are_counted_by_cause() -> None:
    async with serving(hello, max_header_bytes=1024, max_headers=8) as server:
        async with connected(server) as client:
            assert (await client.get()).status == 200
        assert "http_errors" not in {name for name, _, _ in server.samples("i")}
        chunks = request("/", "Transfer-Encoding: chunked", method="POST") + b"zz\r\n"
        for data in (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", b"no request\r\n\r\n", chunks):
            assert (await response_to(server, data))[0] == 400
        for data in (request("/", *["X: y"] * 8), b"x" * 1025, b"x" * 2000):
            assert (await response_to(server, data))[0] == 431
        counts = {labels: count for name, labels, count in server.samples("i") if name == "http_errors"}
        assert counts == {
            ("i", "", "", "malformed"): 3,
            ("i", "", "", "max_headers"): 1,
            ("i", "", "", "max_header_bytes"): 2,
        }


async def test_a_trickled_head_costs_no_more_at_its_end_than_at_its_start() -> None:
    async def trickle(client: Client, start: bytes) -> float:
        await client.send(start)
        for _ in range(20):
            await asyncio.sleep(0)
        began = time.process_time()
        for _ in range(200):
            client.writer.write(b"y")
            for _ in range(3):  # the server is on the same loop, and reads each byte for itself
                await asyncio.sleep(0)
        return time.process_time() - began

    async with serving(hello) as server:
        async with connected(server) as client:
            short_s = await trickle(client, b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
            await client.send(b"\r\n\r\n")
            assert (await client.response()).status == 200
        async with connected(server) as client:
            long_s = await trickle(client, b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 60_000)
            await client.send(b"\r\n\r\n")
            assert (await client.response()).status == 200
    assert long_s < 5 * short_s + 0.05


async def test_a_refused_client_that_continues_sending_gets_the_response() -> None:
    async with serving(hello) as server, connected(server) as client:
        client.writer.write(b"no request\r\n\r\n" + bytes(5_000_000))
        response = await client.response()
        assert response.status == 400
        assert await client.rest() == b""
        client.writer.close()
        await poll_for(lambda: "0 connections" in repr(server))


async def test_a_message_that_comes_with_the_handshake_of_a_websocket_is_received() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": (await receive())["text"]})
        await receive()

    async with serving(app) as server, connected(server) as client:
        handshake = request("/", *HANDSHAKE)
        await client.send(handshake + b"\x81\x82\0\0\0\0hi")
        assert (await client.head())[0] == 101
        assert await client.reader.readexactly(4) == b"\x81\x02hi"
