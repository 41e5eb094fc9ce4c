"""A server that gets bad input: one loop for all cases, a clock that can jump, and checks after each case.

Client and server share the loop, so the server has processed data after a few iterations of the loop, and an
idle timeout of seconds passes at once. Nothing waits in real time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import socket
import struct
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fuzz_requests import IDLE_S, MAX_BODY_BYTES, Delivery
from http_harness import read_body, respond, timers
from memory_transport import MemoryTransport, connect

from daskserve.common.types import ALL_HTTP_METHODS, Envelope, Message, Receive, Send
from daskserve.options.http import HTTPOptions
from daskserve.proxies.asgi import ASGIApp, Scope
from daskserve.proxies.ingress.app import IngressApp
from daskserve.proxies.ingress.routes import RouteTable
from daskserve.proxies.server.server import HTTPServer

MAX_MESSAGE_BYTES = 64 * 1024
#: Loop iterations without a change after which the server counts as idle.
QUIET_TURNS = 25
#: The answer of `/fixed`: a part at once, the rest when the request is complete.
FIXED = b"x" * 400
#: Number of idle timeouts after which a connection without data must be closed.
PATIENCE = 14

OPTIONS = HTTPOptions(
    host="127.0.0.1",
    port=0,
    max_body_bytes=MAX_BODY_BYTES,
    max_websocket_message_bytes=MAX_MESSAGE_BYTES,
    keep_alive_timeout_s=IDLE_S,
)


#: The transports: in memory, or in nightly runs the values of the option ``server``.
KINDS = ("memory", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("tornado", "asyncio")))


@dataclass
class Seen:
    """One request as the application saw it."""

    scope: Scope
    body: bytearray = field(default_factory=bytearray)
    is_complete: bool = False
    messages: list[Message] = field(default_factory=list)


@dataclass
class Outcome:
    """The result of one delivery.

    Attributes
    ----------
    seen : list
        The requests that the application saw.
    answer : bytes
        What the client received.
    is_closed : bool
        Whether the server closed the connection before the idle timeout.
    """

    seen: list[Seen]
    answer: bytes
    is_closed: bool


class FuzzedServer:
    """One server of a kind on a separate loop, with the ingress and a few applications."""

    def __init__(self, kind: str) -> None:
        self._runner = asyncio.Runner()
        loop = self._runner.get_loop()
        self._skipped_s = 0.0
        loop.time = lambda: time.monotonic() + self._skipped_s  # type: ignore[method-assign]
        self._lost: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: self._lost.append(context))
        self._seen: list[Seen] = []
        self._faults = _Faults()
        table = RouteTable(
            {
                f"/{name}": {"endpoint": name, "methods": ALL_HTTP_METHODS}
                for name in ("echo", "early", "stream", "fixed", "socket")
            }
            | {"/": {"endpoint": "hello", "methods": ["GET", "HEAD", "POST"]}}
        )
        self._ingress = IngressApp(
            options=HTTPOptions(),
            routes=table,
            dispatch=_dispatch,
            rng=random.Random(1),
        )
        self.run(self._start(kind))
        self._at_rest = self._holdings()

    def run(self, body: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(body)

    async def _start(self, kind: str) -> None:
        logging.getLogger().addHandler(self._faults)
        self._is_in_memory = kind == "memory"
        options = OPTIONS if self._is_in_memory else OPTIONS.model_copy(update={"server": kind})
        self._server = HTTPServer(self._app, options)
        if not self._is_in_memory:
            await self._server.bind()
        self._server.start()
        await self._turn(QUIET_TURNS)
        self._base = asyncio.all_tasks() - {asyncio.current_task()}
        await self._probe()  # creates the objects that are created once and kept

    def close(self) -> None:
        """Stop the server; check that no task and no timer is left."""
        self.run(self._server.stop())
        self.run(self._turn(QUIET_TURNS))

        async def left() -> tuple[Any, Any]:
            return asyncio.all_tasks() - {asyncio.current_task()}, timers(asyncio.get_running_loop())

        assert self.run(left()) == (set(), set())
        logging.getLogger().removeHandler(self._faults)
        self._runner.close()

    def deliver(self, delivery: Delivery, *, probes: bool = True) -> Outcome:
        """Send a delivery and return the result; check that it leaves nothing behind, and that the next
        request works.

        ``probes=False`` omits the next request.
        """
        outcome: Outcome = self.run(self._deliver(delivery, probes=probes))
        return outcome

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Record the messages that pass to the ingress."""
        seen = Seen(scope)
        self._seen.append(seen)

        async def noted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                seen.body += message["body"]
                seen.is_complete = not message["more_body"]
            seen.messages.append(message)
            return message

        await self._ingress(scope, noted, send)

    async def _deliver(self, delivery: Delivery, *, probes: bool) -> Outcome:
        self._seen.clear()
        self._faults.records.clear()
        self._lost.clear()
        with self._connect() as connection:
            sent = 0
            for at, pause_s in delivery.stops:
                await self._pump(connection, delivery.data[sent:at])
                sent = at
                self._skipped_s += pause_s
            await self._pump(connection, delivery.data[sent:])
            if delivery.ending == "reset":
                connection.reset()
            elif delivery.ending == "close":
                connection.finish()
            is_closed = connection.is_over
            for _ in range(PATIENCE):
                if connection.is_over:
                    break
                self._skipped_s += IDLE_S + 0.1
                await self._pump(connection, b"")
            assert connection.is_over, f"still open, though nothing came in: {bytes(connection.received)!r}"
        await self._settle()
        outcome = Outcome(list(self._seen), bytes(connection.received), is_closed)
        if probes:
            await self._probe()
            await self._settle()
        return outcome

    async def _probe(self) -> None:
        with self._connect() as connection:
            await self._pump(connection, b"GET /probe HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert connection.received.startswith(b"HTTP/1.1 200 "), bytes(connection.received)
            assert connection.received.endswith(b"\r\n\r\n/probe"), bytes(connection.received)
            assert connection.is_over

    def _connect(self) -> _Connection | MemoryTransport:
        return connect(self._server) if self._is_in_memory else _Connection(self._server.port)

    async def _pump(self, connection: _Connection | MemoryTransport, data: bytes) -> None:
        """Send and receive until nothing moves any more."""
        left = memoryview(data)
        quiet = 0
        while quiet < QUIET_TURNS and not (connection.is_over and not left):
            before = len(left), len(connection.received), connection.is_over, self._progress()
            left = connection.move(left)
            await asyncio.sleep(0)
            is_still = before == (len(left), len(connection.received), connection.is_over, self._progress())
            quiet = quiet + 1 if is_still else 0

    def _progress(self) -> tuple[int, int]:
        return len(self._seen), sum(len(seen.messages) for seen in self._seen)

    async def _turn(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    async def _settle(self) -> None:
        """Wait until requests and connections have ended; some need the clock to advance."""
        for _ in range(PATIENCE):
            await self._turn(QUIET_TURNS)
            if not self._begun():
                break
            self._skipped_s += IDLE_S + 0.1
        assert self._begun() == []
        assert self._faults.records == []
        assert self._lost == []

    def _begun(self) -> list[Any]:
        """Return the tasks, requests and connections that still exist."""
        begun: list[Any] = [*(asyncio.all_tasks() - self._base - {asyncio.current_task()})]
        if ongoing := self._ingress.ongoing:
            begun.append(f"{ongoing} ongoing requests")
        server_state = self._server.state
        begun += [*server_state.tasks, *server_state.connections, *server_state.sockets]
        begun += [f"{len(server_state.idle_watch)} watched"] if len(server_state.idle_watch) else []
        return begun

    def _holdings(self) -> int:
        gc.collect()  # earlier tests may have left files in reference cycles
        return len(os.listdir("/proc/self/fd"))

    def assert_at_rest(self) -> None:
        """Check that no more files are open than before the first case."""
        assert self._holdings() == self._at_rest


class _Faults(logging.Handler):
    """Collects logged errors: bad input must not cause any."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(logging.Formatter().format(record))


class _Connection:
    """A client's socket; never waits."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setblocking(False)
        # A small piece must not wait in the kernel until the one before it was acknowledged.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = bytearray()
        self.is_over = False
        self._is_deaf = False

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def move(self, data: memoryview) -> memoryview:
        """Send and receive as much as possible; return the rest to send."""
        if self.is_over:
            return data[:0]
        try:
            while more := self._socket.recv(1 << 20):
                self.received += more
            self.is_over = True
        except BlockingIOError:
            pass
        except ConnectionError:
            self.is_over = True
        if data and not self._is_deaf:
            try:
                return data[self._socket.send(data) :]
            except BlockingIOError:
                return data
            except ConnectionError:
                self._is_deaf = True  # data may still be unread
        return data[:0] if self._is_deaf else data

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()
        self.is_over = True


# ---- the applications


async def _dispatch(endpoint: str, envelope: Envelope, receive: Receive, send: Send) -> None:
    await _APPLICATIONS[endpoint](envelope.head, receive, send)


async def _hello(scope: Any, receive: Receive, send: Send) -> None:
    await respond(send, scope["path"].encode())


async def _echo(scope: Any, receive: Receive, send: Send) -> None:
    await respond(send, await read_body(receive))


async def _early(scope: Any, receive: Receive, send: Send) -> None:
    """Answer without reading the body."""
    await respond(send, b"early")


async def _stream(scope: Any, receive: Receive, send: Send) -> None:
    """Answer each part of the body with itself."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    is_more = True
    while is_more:
        message = await receive()
        is_more = message["more_body"]
        await send({"type": "http.response.body", "body": message["body"], "more_body": is_more})


async def _fixed(scope: Any, receive: Receive, send: Send) -> None:
    """Announce a length, and send all of it only once the body is complete."""
    headers = [(b"content-length", b"%d" % len(FIXED))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": FIXED[:10], "more_body": True})
    await read_body(receive)
    await send({"type": "http.response.body", "body": FIXED[10:]})


async def _socket(scope: Any, receive: Receive, send: Send) -> None:
    """Echo a WebSocket's messages; answer other requests like the other endpoints."""
    if scope["type"] != "websocket":
        await _hello(scope, receive, send)
        return
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"], "bytes": message["bytes"]})


_APPLICATIONS: dict[str, ASGIApp] = {
    "hello": _hello,
    "echo": _echo,
    "early": _early,
    "stream": _stream,
    "fixed": _fixed,
    "socket": _socket,
}


@contextlib.contextmanager
def fuzzed(kind: str) -> Iterator[FuzzedServer]:
    """Run a server for bad input; at the end, check that nothing is left open."""
    server = FuzzedServer(kind)
    try:
        yield server
        server.assert_at_rest()
    finally:
        server.close()
