"""Clients that close their side of the connection and wait for the response, and clients that leave."""

from __future__ import annotations

import asyncio

import pytest
from http_harness import (
    Client,
    Hanging,
    connected,
    echo,
    on_each_transport,
    poll_for,
    read_body,
    request,
    serving,
)

from daskserve.common.types import Receive, Send
from daskserve.proxies.asgi import Scope
from daskserve.proxies.server import disconnects

pytestmark = pytest.mark.smoke

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LARGE = bytes(16 << 20)


async def half_close(client: Client, data: bytes) -> None:
    await client.send(data)
    client.writer.write_eof()


async def pause() -> None:
    """Wait until the server has seen the end of the data and has tested the client."""
    await asyncio.sleep(10 * disconnects.PERIOD_S)


@on_each_transport
@pytest.mark.parametrize("count", [1, 3])
async def test_requests_before_the_end_are_all_answered(count: int) -> None:
    async with serving(echo) as server, connected(server) as client:
        await half_close(client, request(method="POST", body=b"data") * count)
        for _ in range(count):
            assert (await client.response()).body == b"data"
        assert await client.rest() == b""


@on_each_transport
async def test_a_response_that_comes_soon_comes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disconnects, "PERIOD_S", 0.2)
    monkeypatch.setattr(disconnects, "QUICK_S", 0.2)

    app = Hanging()
    async with serving(app) as server, connected(server) as client:
        await half_close(client, request())
        await asyncio.sleep(0.15)  # the end has long been seen
        app.go.set()
        assert (await client.response()).body == b"at last"
        assert await client.rest() == b""


@on_each_transport
async def test_a_late_response_comes_after_100_continue() -> None:
    app = Hanging()
    async with serving(app) as server, connected(server) as client:
        await half_close(client, request())
        await pause()
        app.go.set()
        assert await client.reader.readuntil(b"\r\n\r\n") == CONTINUE
        assert (await client.response()).body == b"at last"
        assert await client.rest() == b""
        assert app.cancelled == 0


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(3):
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        await pause()
    await send({"type": "http.response.body", "body": b""})


@on_each_transport
async def test_a_slow_stream_is_complete() -> None:
    async with serving(stream) as server, connected(server) as client:
        await half_close(client, request())
        assert (await client.response()).body == b"part" * 3
        assert await client.rest() == b""


@on_each_transport
async def test_a_large_response_is_complete() -> None:
    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        length = (b"content-length", b"%d" % len(LARGE))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": LARGE})

    async with serving(large) as server, connected(server) as client:
        await half_close(client, request())
        await pause()
        assert (await client.response()).body == LARGE
        assert await client.rest() == b""


@on_each_transport
async def test_a_client_that_leaves_is_noticed_before_the_next_regular_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disconnects, "PERIOD_S", 1000.0)

    app = Hanging()
    async with serving(app) as server:
        async with connected(server) as client:
            await client.send(request())
            await poll_for(lambda: app.running)
        await poll_for(lambda: app.cancelled)
        await poll_for(lambda: not server.state.connections)


@on_each_transport
async def test_a_client_that_leaves_shortly_before_its_turn_does_not_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disconnects, "PERIOD_S", 1000.0)
    turn, go, ran = asyncio.Lock(), asyncio.Event(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with turn:
            ran.append(scope["path"])
            await go.wait()
        await respond(send)

    async def respond(send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async with serving(app) as server, connected(server) as first:
        await first.send(request())
        await poll_for(turn.locked)
        async with connected(server) as second:
            await second.send(request())
            await poll_for(lambda: len(server.state.connections) == 2)
            await poll_for(lambda: len(turn._waiters or ()) == 1)  # type: ignore[attr-defined]
        await poll_for(lambda: not turn._waiters)  # type: ignore[attr-defined]
        go.set()
        assert (await first.response()).body == b"done"
        assert len(ran) == 1


@on_each_transport
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("is_reset", [True, False])
async def test_a_client_that_has_left_has_its_request_cancelled(version: str, is_reset: bool) -> None:
    app = Hanging()
    async with serving(app) as server:
        async with connected(server) as client:
            await client.send(request().replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
            await poll_for(lambda: app.running)
            if is_reset:
                client.reset()
        await poll_for(lambda: app.cancelled)
        await poll_for(lambda: not server.state.connections)


@on_each_transport
async def test_a_stream_without_news_ends_when_its_client_has_left() -> None:
    cancelled = asyncio.Event()

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(silent) as server:
        async with connected(server) as client:
            await client.send(request())
            await client.head()
            await client.chunk()
        await cancelled.wait()


@on_each_transport
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_request_that_ends_too_early_is_not_answered(is_first: bool) -> None:
    completed: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        completed.append(await read_body(receive))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with serving(app) as server, connected(server) as client:
        before = b"" if is_first else request(method="POST", body=b"whole")
        await half_close(client, before + request(method="POST", body=b"cut off")[:-3])
        if not is_first:
            assert (await client.response()).status == 200
        assert await client.rest() == b""
        await poll_for(lambda: not server.state.tasks)
        assert completed == ([] if is_first else [b"whole"])


@on_each_transport
async def test_an_end_between_requests_closes_the_connection() -> None:
    async with serving(echo) as server, connected(server) as client:
        await client.get()
        client.writer.write_eof()
        assert await client.rest() == b""
        await poll_for(lambda: not server.state.connections)
