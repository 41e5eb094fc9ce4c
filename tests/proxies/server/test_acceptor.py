"""Accepting connections at the maximum number of connections, and without file descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator

import pytest
from http_harness import (
    HANDSHAKE,
    Client,
    Hanging,
    advance,
    connected,
    echo,
    hello,
    on_each_transport,
    poll_for,
    request,
    respond,
    serving,
    tracebacks,
)
from tables import each_case

from daskserve.common.types import Receive, Send
from daskserve.proxies.asgi import Scope
from daskserve.proxies.server import acceptor
from daskserve.proxies.server.acceptor import Acceptor, default_max_connections, descriptor_limit
from daskserve.proxies.server.server import HTTPServer


def metrics(server: HTTPServer) -> dict[tuple[str, ...], object]:
    return {(name, *labels[1:]): value for name, labels, value in server.samples("i")}


def pauses(server: HTTPServer, cause: str) -> object:
    return metrics(server)["http_accept_pauses", cause]


def evicted(server: HTTPServer) -> object:
    return metrics(server)["http_evicted_connections",]


@each_case(
    ("descriptors", "connections"),
    [(1024, 768), (256, 192), (65_536, 10_000), (None, 10_000), (1, 1)],
)
def test_by_default_a_quarter_of_the_descriptors_is_left(descriptors: int | None, connections: int) -> None:
    assert default_max_connections(descriptors) == connections


async def test_a_server_has_the_default_limit() -> None:
    async with serving(hello) as server:
        assert server._acceptor._max_connections == default_max_connections(descriptor_limit())


async def test_a_limit_beyond_the_descriptors_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(hello, max_connections=10**9):
        pass
    assert "max_connections is 1000000000, but this process may have" in caplog.text


# ---- the limit


@on_each_transport
async def test_at_the_limit_clients_wait_until_a_connection_closes(caplog: pytest.LogCaptureFixture) -> None:
    app = Hanging()
    async with serving(app, max_connections=2) as server:
        async with connected(server) as one, connected(server) as two, connected(server) as three:
            for client in (one, two):
                await client.send(request("/", "Connection: close"))
            await poll_for(lambda: app.running == 2)
            await three.send(request())
            await poll_for(lambda: pauses(server, "max_connections"))
            assert (app.running, metrics(server)["http_connections",]) == (2, 2)
            app.go.set()
            for client in (one, two, three):
                assert (await client.response()).body == b"at last"
            assert evicted(server) == 0
    (record,) = caplog.records
    assert "Accepting no connections for 0.05 s at a time: there are 2 (max_connections)" in record.message


async def test_at_the_limit_the_connection_that_is_idle_for_longest_gives_way() -> None:
    hanging = Hanging()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (hanging if scope["path"] == "/hang" else hello)(scope, receive, send)

    async with serving(app, max_connections=4) as server:
        async with (
            connected(server) as busy,
            connected(server) as silent,
            connected(server) as used,
            connected(server) as recent,
            connected(server) as new,
        ):
            await busy.send(request("/hang"))
            await poll_for(lambda: hanging.running)
            await silent.send(b"GET / HT")
            assert (await used.get("/")).status == 200
            await poll_for(lambda: metrics(server)["http_connections",] == 4)
            advance(2)
            assert (await recent.get("/recent")).status == 200
            assert (await new.get("/new")).body == b"/new"
            assert await silent.rest() == b""
            assert evicted(server) == 1
            async with connected(server) as newer:
                assert (await newer.get("/newer")).body == b"/newer"
                assert await used.rest() == b""
                assert evicted(server) == 2
                assert (await recent.get("/again")).body == b"/again"
                hanging.go.set()
                assert (await busy.response()).body == b"at last"


async def test_connections_that_were_used_a_moment_ago_do_not_give_way() -> None:
    async with serving(hello, max_connections=1) as server:
        async with connected(server) as first, connected(server) as second:
            assert (await first.get("/")).status == 200
            await second.send(request("/second"))
            await poll_for(lambda: pauses(server, "max_connections"))
            assert (await first.get("/again")).body == b"/again"
            assert evicted(server) == 0
            advance(2)
            assert (await second.response()).body == b"/second"
            assert await first.rest() == b""


@on_each_transport
async def test_uploads_and_responses_under_way_do_not_give_way() -> None:
    size = 20_000_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (respond(send, bytes(size)) if scope["path"] == "/large" else echo(scope, receive, send))

    async with serving(app, max_connections=2) as server:
        async with connected(server) as uploading, connected(server) as reading:
            await uploading.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nab")
            reading.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await reading.send(request("/large"))
            await poll_for(lambda: any(each.stream.writing() for each in server.state.connections))
            advance(2)
            async with connected(server) as waiting:
                await waiting.send(request("/"))
                await poll_for(lambda: pauses(server, "max_connections"))
                assert evicted(server) == 0
                await uploading.send(b"cd")
                assert (await uploading.response()).body == b"abcd"
                reading.writer.transport.resume_reading()  # type: ignore[attr-defined]
                assert len((await reading.response()).body) == size
                advance(2)
                assert (await waiting.response()).status == 200


@on_each_transport
async def test_websockets_count() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await respond(send, b"served")
            return
        await receive()
        await send({"type": "websocket.accept"})
        await receive()

    async with serving(app, max_connections=1) as server:
        async with connected(server) as socket_client, connected(server) as waiting:
            await socket_client.send(request("/", *HANDSHAKE))
            assert (await socket_client.head())[0] == 101
            advance(2)
            await waiting.send(request())
            await poll_for(lambda: pauses(server, "max_connections"))
            socket_client.reset()
            assert (await waiting.response()).body == b"served"


@on_each_transport
async def test_a_server_that_drains_at_its_limit_serves_those_that_wait() -> None:
    app = Hanging()
    async with serving(app, max_connections=1) as server:
        async with connected(server) as served, connected(server) as waiting:
            await served.send(request())
            await poll_for(lambda: app.running)
            await waiting.send(request())
            await poll_for(lambda: pauses(server, "max_connections"))
            draining = asyncio.create_task(server.drain(5))
            app.go.set()
            for client in (served, waiting):
                response = await client.response()
                assert (response.body, response.headers["connection"]) == (b"at last", "close")
            await draining


# ---- no descriptors


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Use up the file descriptors of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(number) for number in os.listdir("/proc/self/fd"))
    holes = [os.dup(0)]
    while holes[-1] < highest:
        holes.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (holes[-1] + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in holes:
            os.close(number)


@on_each_transport
async def test_without_descriptors_accepting_pauses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "IDLE_S", 60.0)
    tries: list[float] = []
    take_next = Acceptor._accept_next

    def count(acceptor: Acceptor, listening: socket.socket) -> None:
        tries.append(asyncio.get_running_loop().time())
        take_next(acceptor, listening)

    async with serving(hello) as server, connected(server) as served:
        assert (await served.get("/")).status == 200
        monkeypatch.setattr(Acceptor, "_accept_next", count)
        with contextlib.closing(socket.create_connection(("127.0.0.1", server.port))) as sock:
            with no_descriptors():
                await poll_for(lambda: len(tries) == 3)
                assert tries[2] - tries[0] >= 0.09
                # Existing connections are served meanwhile.
                assert (await served.get("/meanwhile")).body == b"/meanwhile"
                assert metrics(server)["http_connections",] == 1
            streams = await asyncio.open_connection(sock=sock)
            assert (await Client(*streams).get("/later")).body == b"/later"
            assert pauses(server, "descriptors") == 1
            streams[1].close()
    (record,) = caplog.records
    assert f"at a time: [Errno {errno.EMFILE}]" in record.message
    assert tracebacks(caplog) == []


async def test_without_descriptors_the_oldest_incomplete_head_gives_way() -> None:
    async with serving(hello) as server, contextlib.AsyncExitStack() as stack:

        async def client() -> Client:
            return await stack.enter_async_context(connected(server))

        used, silent, slow, slower = [await client() for _ in range(4)]
        assert (await used.get("/")).status == 200
        assert (await slower.get("/")).status == 200
        await slow.send(b"GET / HT")
        await poll_for(lambda: metrics(server)["http_connections",] == 4)
        advance(0.5)
        await slower.send(b"GET / HT")  # the idle time before does not count
        sock = stack.enter_context(socket.socket())
        await asyncio.sleep(0.01)
        with no_descriptors():
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
            await poll_for(lambda: pauses(server, "descriptors"))
            assert evicted(server) == 0  # nobody has taken a second yet
            advance(0.7)
            assert await silent.rest() == b""
            assert await slow.rest() == b""
            await poll_for(lambda: metrics(server)["http_connections",] == 3)
            streams = await asyncio.open_connection(sock=sock)
            assert (await Client(*streams).get("/new")).body == b"/new"
            assert (await used.get("/still")).body == b"/still"
            await slower.send(b"TP/1.1\r\nHost: a\r\n\r\n")
            assert (await slower.response()).status == 200
            assert evicted(server) == 2
            streams[1].close()


async def test_without_descriptors_nobody_gives_way_while_nobody_waits() -> None:
    """Without a free descriptor, accept() fails whether a client waits or not."""

    async with serving(hello) as server, connected(server) as silent, connected(server) as last:
        await poll_for(lambda: metrics(server)["http_connections",] == 2)
        advance(2)
        with no_descriptors():
            (listening,) = server._sockets
            server._acceptor._accept(listening)
            assert (await last.get("/")).status == 200
        assert (evicted(server), pauses(server, "descriptors")) == (0, 0)
        assert (await silent.get("/")).status == 200


async def test_after_a_lack_of_descriptors_some_stay_free_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor, "SCARCE_S", 3.0)

    async with serving(hello, max_connections=100) as server, contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(connected(server))
        await poll_for(lambda: metrics(server)["http_connections",] == 8)
        advance(2)
        server._acceptor._make_room("too many open files")
        assert evicted(server) == 3
        await poll_for(lambda: metrics(server)["http_connections",] == 5)
        for _ in range(2):
            client = await stack.enter_async_context(connected(server))
            assert (await client.get("/")).status == 200
        assert metrics(server)["http_connections",] == 6
        assert evicted(server) == 4
        advance(3)
        client = await stack.enter_async_context(connected(server))
        assert (await client.get("/")).status == 200
        assert metrics(server)["http_connections",] == 7


async def test_a_server_without_descriptors_drains() -> None:
    async with serving(hello) as server:
        with no_descriptors():
            await server.drain(1)


@on_each_transport
async def test_without_descriptors_connections_become_websockets() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await respond(send)
            return
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "hi"})
        await receive()

    async with serving(app) as server, connected(server) as client:
        assert (await client.get()).status == 200
        with no_descriptors():
            await client.send(request("/", *HANDSHAKE))
            assert (await client.head())[0] == 101
            assert await client.reader.readexactly(4) == b"\x81\x02hi"
        client.reset()


async def test_an_unknown_failure_of_accepting_does_not_end_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "FAILED_S", 0.01)
    take_next = Acceptor._accept_next
    failures = [OSError(errno.EPROTO, "strange"), ConnectionAbortedError()]

    def fail(acceptor: Acceptor, listening: socket.socket) -> None:
        if failures:
            raise failures.pop()
        take_next(acceptor, listening)

    async with serving(hello) as server:
        monkeypatch.setattr(Acceptor, "_accept_next", fail)
        async with connected(server) as client:
            assert (await client.get("/")).status == 200
        assert pauses(server, "other") == 1
    assert tracebacks(caplog) == []
