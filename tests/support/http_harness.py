"""A server on a loopback socket and a client that sees each byte, for the tests of this folder."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import pytest
import raw_cases
import uvloop

from daskserve.common.types import Receive, Send
from daskserve.options.http import HTTPOptions
from daskserve.proxies.asgi import ASGIApp, Scope
from daskserve.proxies.exchange.limits.limits import EVENT_LOOP_TURN
from daskserve.proxies.exchange.request.head import HeadLimits, RequestHead, read_head
from daskserve.proxies.server.server import HTTPServer

DEADLINE_S = 10.0
#: The lines of the handshake of a WebSocket.
HANDSHAKE = tuple(each.decode() for each in raw_cases.HANDSHAKE)
Test = TypeVar("Test", bound=Callable[..., Any])

#: The transport that `serving` uses, and perhaps its event loop; see the fixture ``transport``.
TRANSPORT: contextvars.ContextVar[str] = contextvars.ContextVar("TRANSPORT", default="tornado")


def on_each_transport(test: Test) -> Test:
    """Run a test of sockets on each transport."""
    return _on(test, "tornado", "asyncio")


def on_each_loop(test: Test) -> Test:
    """Run a test on each transport and event loop."""
    test = pytest.mark.usefixtures("loop_factory")(test)
    return _on(test, "tornado", "asyncio", "asyncio on uvloop")


def _on(test: Test, *transports: str) -> Test:
    test = pytest.mark.usefixtures("transport")(test)
    return pytest.mark.parametrize("transport", transports, indirect=True)(test)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run an async test body; one that hangs fails."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test()

    factory = uvloop.new_event_loop if TRANSPORT.get().endswith("uvloop") else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(bounded())


def make_server(app: ASGIApp, **options: Any) -> HTTPServer:
    """Return a server on a free port; ``options`` are those of `HTTPOptions` and arguments of the server."""
    names = options.keys() & HTTPOptions.model_fields.keys()
    given = {name: options.pop(name) for name in names}
    http = HTTPOptions(**{"port": 0, "server": TRANSPORT.get().partition(" ")[0], **given})
    return HTTPServer(app, http, **options)


async def poll_for(condition: Callable[[], object]) -> None:
    """Return once the condition holds; the deadline of `run` limits the wait."""
    while not condition():  # noqa: ASYNC110 - what a test waits for has no event
        await asyncio.sleep(0.001)


def advance(seconds: float) -> None:
    """Advance the running loop's clock, so that timers are due however busy the machine is."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, **options: Any) -> AsyncIterator[HTTPServer]:
    """Run a server around a block; then check that it left nothing behind and that no error was lost."""
    loop = asyncio.get_running_loop()
    lost: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: lost.append(context))
    before = asyncio.all_tasks(), timers(loop)
    server = make_server(app, **options)
    await server.bind()
    server.start()
    try:
        yield server
    finally:
        await server.stop()
    assert asyncio.all_tasks() - before[0] == set()
    assert timers(loop) - before[1] == set()
    assert "0 connections, 0 tasks" in repr(server)
    assert lost == []
    with contextlib.closing(socket.socket()) as probe:
        if probe.connect_ex(("127.0.0.1", server.port)) == 0:  # another process may have the port by now
            listening = [each.laddr.port for each in psutil.Process().net_connections() if not each.raddr]
            assert server.port not in listening


def hits(server: HTTPServer) -> dict[str, float]:
    """Return how many requests and connections have hit each limit, without limits that were not hit.

    Full turns of the event loop are left out: they depend on how busy the machine is.
    """
    samples = server.samples("i")
    found = {labels[1]: value for name, labels, value in samples if name == "http_limited_requests" and value}
    found.pop(EVENT_LOOP_TURN, None)
    return found


def timers(loop: asyncio.AbstractEventLoop) -> set[asyncio.TimerHandle]:
    """Return the pending timers of the loop."""
    scheduled: list[asyncio.TimerHandle] = getattr(loop, "_scheduled", [])  # uvloop does not expose them
    return {handle for handle in scheduled if not handle.cancelled()}


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """One connection and its responses, which are read strictly as HTTP/1.1."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def get(self, path: str = "/", *headers: str, method: str = "GET") -> Response:
        await self.send(request(path, *headers, method=method))
        return await self.response(has_body=method != "HEAD")

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers: dict[str, str] = {}
        for line in filter(None, lines[1:]):
            name, _, value = line.partition(": ")
            assert name not in headers, f"{name} twice in {lines}"
            headers[name] = value
        return int(lines[0].split(" ")[1]), headers

    async def chunk(self) -> bytes:
        length = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(length)
        assert await self.reader.readexactly(2) == b"\r\n"
        return data

    async def response(self, *, has_body: bool = True) -> Response:
        status, headers = await self.head()
        body = b""
        if not has_body or status in (204, 304):
            pass
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            while data := await self.chunk():
                body += data
        else:
            body = await self.reader.read()
        return Response(status, headers, body)

    async def rest(self) -> bytes:
        """Return all data until the server closes the connection; a reset counts as a close."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while more := await self.reader.read(65536):
                data += more
        return data

    def reset(self) -> None:
        """Reset the connection."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(server: HTTPServer) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def request(path: str = "/", *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    """Return a request; a body brings its content-length."""
    lines = [f"{method} {path} HTTP/1.1", "Host: test", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def head(*headers: str, method: str = "GET", target: str = "/", version: str = "HTTP/1.1") -> RequestHead:
    """Return the head of a request as the servers read it, with these headers and no others."""
    data = "\r\n".join([f"{method} {target} {version}", *headers, "", ""]).encode("latin-1")
    found = read_head(data, 0, HeadLimits(1 << 20, 1000))
    assert found is not None
    return found[0]


async def respond(
    send: Send, body: bytes = b"", status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


async def read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        assert message["type"] == "http.request", message
        parts.append(message["body"])
        if not message["more_body"]:
            return b"".join(parts)


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the path."""
    await respond(send, scope["path"].encode())


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the request's body."""
    await respond(send, await read_body(receive))


class Hanging:
    """An application that answers only when the test lets it, and records how its requests ended."""

    def __init__(self) -> None:
        self.running = 0
        self.cancelled = 0
        self.go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.running += 1
        try:
            await self.go.wait()
            await respond(send, b"at last")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.exc_info]


Application = Callable[[Scope, Receive, Send], Awaitable[None]]
