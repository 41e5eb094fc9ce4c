"""A connection that waits for its client, and a client that waits for its connection: bytes in, bytes out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from http_harness import advance, request, respond, run, timers
from memory_transport import MemoryTransport, connect, serving_in_memory
from tables import each_case

from daskserve.common.types import Receive, Send
from daskserve.proxies.asgi import ASGIApp, Scope
from daskserve.proxies.exchange.exchange import LINGER_S
from daskserve.proxies.exchange.request.body import HIGH_WATER_BYTES
from daskserve.proxies.server.server import HTTPServer

LIMIT = 4 * HIGH_WATER_BYTES
IDLE_S = 3.0
UPLOAD = request("/", "Transfer-Encoding: chunked", method="POST")
LAST = b"0\r\n\r\n"


class Application:
    """Runs the test's commands until it is cancelled."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[Callable[[Receive, Send], Awaitable[Any]]] = asyncio.Queue()
        self.ended = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while True:
                await (await self.orders.get())(receive, send)
        except BaseException as error:
            self.ended = type(error).__name__
            raise

    async def order(self, order: Callable[[Receive, Send], Awaitable[Any]]) -> None:
        self.orders.put_nowait(order)
        await settle()


def over_memory(test: Callable[[HTTPServer, MemoryTransport, Application], Any]) -> Callable[[], None]:
    """Run a test on a server, with one client."""

    def wrapped() -> None:
        async def main() -> None:
            app = Application()
            async with serve(app) as server:
                await test(server, connect(server), app)

        run(main)

    wrapped.__name__ = test.__name__
    return wrapped


def serve(app: ASGIApp) -> Any:
    return serving_in_memory(app, max_body_bytes=LIMIT, keep_alive_timeout_s=IDLE_S)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def take(receive: Receive, send: Send) -> None:
    await receive()


async def answer(receive: Receive, send: Send) -> None:
    await respond(send, b"whole")


async def begin(receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200})
    await go_on(receive, send)


async def go_on(receive: Receive, send: Send) -> None:
    await send({"type": "http.response.body", "body": b"part", "more_body": True})


# ---- inactivity


@over_memory
async def test_a_client_is_watched_only_while_the_server_waits_for_it(
    server: HTTPServer, client: MemoryTransport, app: Application
) -> None:
    def is_watched() -> bool:
        return len(server.state.idle_watch) == 1

    client.send(UPLOAD)
    assert is_watched()  # 1. for the body
    client.send(chunk(b"data"))
    assert is_watched()
    client.send(chunk(bytes(HIGH_WATER_BYTES)))
    await settle()
    assert client.is_paused
    assert not is_watched()  # 2. not while the application is the slow one
    for _ in range(6):
        await app.order(take)
    assert not client.is_paused
    assert is_watched()  # 3. again, once the buffer has room
    client.send(LAST)
    assert not is_watched()  # 4. not while the application works


@over_memory
async def test_each_part_of_an_answer_restarts_the_timeout_of_its_request(
    server: HTTPServer, client: MemoryTransport, app: Application
) -> None:
    client.send(UPLOAD)
    for order in (begin, go_on, go_on):
        advance(0.7 * IDLE_S)
        await app.order(order)
        assert not client.is_over
    advance(1.1 * IDLE_S)
    await settle()
    assert client.is_over


# ---- bodies that turn out to be malformed, or too large


@each_case(("body", "status"), [(chunk(b"half") + b"zz\r\n", b"400"), (chunk(bytes(LIMIT + 1)), b"413")])
async def test_a_refused_body_ends_the_application_like_a_disconnect(body: bytes, status: bytes) -> None:
    received, errors = [], []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            received.append((await receive())["type"])
            try:
                await respond(send, b"too late")
            except OSError as error:
                errors.append(error)

    async with serve(app) as server:
        client = connect(server)
        client.stop_reading()
        client.send(UPLOAD)
        await settle()
        client.send(body)
        await settle()
        assert (received, len(errors)) == (["http.disconnect"], 1)
        assert client.received.startswith(b"HTTP/1.1 %b " % status)
        assert client.received.count(b"HTTP/1.1 ") == 1
        client.send(LAST)
        await settle()
        assert not client.is_over  # it has not read the response
        client.read_on()
        await settle()
        assert client.is_over


@each_case(
    ("data", "refusal"),
    [
        (b"no request\r\n\r\n", ("no", "", "1.1", 400)),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, ("GET", "", "1.1", 431)),
        (b"POST /a?b HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", ("POST", "/a?b", "1.1", 400)),
        (b"GET /a HTTP/1.0\r\nHost: a b\r\n\r\n", ("GET", "/a", "1.0", 400)),
        (request("/up", f"Content-Length: {LIMIT + 1}", method="PUT"), ("PUT", "/up", "1.1", 413)),
        (UPLOAD + b"zz\r\n", ("POST", "/", "1.1", 400)),
    ],
)
async def test_requests_that_the_server_refuses_are_reported(data: bytes, refusal: tuple[Any, ...]) -> None:
    found: list[tuple[Any, ...]] = []
    async with serve(Application()) as server:
        server.on_refused(lambda client, *others: found.append(others))
        connect(server).send(data)
        await settle()
        await settle()
    assert found == [refusal]


# ---- the end of an exchange


@over_memory
async def test_a_client_that_keeps_sending_after_its_answer_is_disconnected(
    server: HTTPServer, client: MemoryTransport, app: Application
) -> None:
    client.send(UPLOAD)
    await app.order(answer)
    client.send(chunk(bytes(LIMIT + 1)))  # which is ignored
    await settle()
    assert not client.is_over
    assert app.ended == ""
    advance(LINGER_S)
    await settle()
    assert client.is_over
    assert server.state.limits.hits["linger"] == 1


def lingering() -> list[asyncio.TimerHandle]:
    return [each for each in timers(asyncio.get_running_loop()) if "Exchange" in repr(each)]


@each_case("leaves", [False, True])
def test_an_exchange_leaves_no_timer(leaves: bool) -> None:
    @over_memory
    async def test(server: HTTPServer, client: MemoryTransport, app: Application) -> None:
        client.send(UPLOAD)
        await app.order(answer)
        assert len(lingering()) == 1
        if leaves:
            client.reset()
        else:
            client.send(LAST)
        assert lingering() == []
        await settle()
        assert app.ended == ""  # the rest of its work does not concern the client

    test()


@over_memory
async def test_a_client_that_leaves_before_the_application_has_begun_leaves_no_task(
    server: HTTPServer, client: MemoryTransport, app: Application
) -> None:
    client.send(request())
    client.reset()
    await settle()
    assert not server.state.tasks
    assert app.ended == ""  # the application never began


# ---- writing


@over_memory
async def test_small_parts_are_one_write_and_large_ones_are_not_copied(
    server: HTTPServer, client: MemoryTransport, app: Application
) -> None:
    large = bytes(1 << 20)

    async def stream(receive: Receive, send: Send) -> None:
        await begin(receive, send)
        await send({"type": "http.response.body", "body": b"small", "more_body": True})
        await send({"type": "http.response.body", "body": large, "more_body": True})

    client.send(request())
    await app.order(stream)
    head, small, *rest = client.writes
    assert head.endswith(b"4\r\npart\r\n")
    assert small == b"5\r\nsmall\r\n"
    assert any(part is large for part in rest)


@pytest.mark.parametrize("leaves", ["before the response", "within it", "before it was read"])
def test_a_client_that_has_left_is_an_error_of_its_connection(
    leaves: str, caplog: pytest.LogCaptureFixture
) -> None:
    @over_memory
    async def test(server: HTTPServer, client: MemoryTransport, app: Application) -> None:
        async def large(receive: Receive, send: Send) -> None:
            body = bytes(4 << 20)  # more than is buffered before the application reads
            headers = [(b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if leaves == "within it":
                client.close()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        client.send(request())
        await settle()
        client.stop_reading()
        app.orders.put_nowait(large)
        if leaves == "before the response":
            client.close()  # the application runs before the connection notices
        await settle()
        client.reset()
        await settle()
        assert app.ended == "ConnectionResetError"

    test()
    assert caplog.records == []
