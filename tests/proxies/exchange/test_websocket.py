"""WebSockets, tested with a client that these tests define."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from http_harness import advance, connected, hits, poll_for, run, serving
from tables import each_case
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.events import (
    Message as DataMessage,
)

from daskserve.common.types import Message, Receive, Send
from daskserve.proxies.asgi import Scope
from daskserve.proxies.exchange.websocket.connection import MAX_PONGS
from daskserve.proxies.exchange.websocket.inbox import MAX_INBOX_BYTES
from daskserve.proxies.server.server import HTTPServer

pytestmark = pytest.mark.smoke


class SocketClient:
    """A client's end of one WebSocket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._events: list[Any] = []

    async def send(self, event: Any) -> None:
        await self.send_raw(self._protocol.send(event))

    async def send_raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def event(self) -> Any:
        """Return the server's next event; None once it has closed the connection."""
        while not self._events:
            data = await self._reader.read(65536)
            self._protocol.receive_data(data or None)
            self._events += self._protocol.events()
            if not data:
                return None
        return self._events.pop(0)

    async def open(self, path: str = "/", **options: Any) -> Any:
        await self.send(Request(host="test", target=path, **options))
        return await self.event()

    async def text(self, data: str) -> str:
        """Send a text, and return the answer."""
        await self.send(DataMessage(data=data))
        return await self.message()

    async def message(self) -> Any:
        parts = []
        while True:
            event = await self.event()
            assert isinstance(event, (TextMessage, BytesMessage)), event
            parts.append(event.data)
            if event.message_finished:
                return type(parts[0])().join(parts)

    async def closed(self) -> tuple[int, str]:
        """Return the server's closing code and reason; answer, and check that the connection ends."""
        event = await self.event()
        assert isinstance(event, CloseConnection), event
        await self.send(event.response())
        assert await self.event() is None
        return int(event.code), event.reason or ""

    def vanish(self) -> None:
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def client_of(server: HTTPServer) -> AsyncIterator[SocketClient]:
    async with connected(server) as client:
        yield SocketClient(client.reader, client.writer)
        client.writer.transport.abort()  # unread data is not an error


class Echo:
    """Accepts, echoes messages, and records how the connection ended."""

    def __init__(self) -> None:
        self.scope: Scope = {}
        self.ended: list[Any] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        try:
            assert await receive() == {"type": "websocket.connect"}
            await send({"type": "websocket.accept"})
            while (message := await receive())["type"] == "websocket.receive":
                await send({"type": "websocket.send", "bytes": message["bytes"], "text": message["text"]})
            self.ended.append(message)
        except BaseException as error:
            self.ended.append(error)
            raise


def disconnect(code: int, reason: str = "") -> Message:
    return {"type": "websocket.disconnect", "code": code, "reason": reason}


async def test_texts_and_bytes_are_carried_both_ways_until_the_client_closes() -> None:
    app = Echo()
    async with serving(app) as server, client_of(server) as client:
        assert isinstance(await client.open("/a%20b?x=1"), AcceptConnection)
        assert await client.text("grüß dich") == "grüß dich"
        await client.send(DataMessage(data=b"\x00\xff"))
        assert await client.message() == b"\x00\xff"
        assert await client.text("") == ""
        await client.send(CloseConnection(code=4000, reason="enough"))
        assert isinstance(await client.event(), CloseConnection)
        assert await client.event() is None
        await poll_for(lambda: app.ended)
    assert app.ended == [disconnect(4000, "enough")]
    expected = {"type": "websocket", "scheme": "ws", "path": "/a b", "raw_path": b"/a%20b"}
    assert {key: app.scope[key] for key in expected} == expected
    assert (app.scope["query_string"], app.scope["subprotocols"]) == (b"x=1", [])
    assert "method" not in app.scope
    assert (b"host", b"test") in app.scope["headers"]


async def test_a_subprotocol_and_headers_are_agreed_upon() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        assert scope["subprotocols"] == ["v2", "v1"]
        await send({"type": "websocket.accept", "subprotocol": "v1", "headers": [(b"x-who", b"me")]})
        await receive()

    async with serving(app) as server, client_of(server) as client:
        answer = await client.open(subprotocols=["v2", "v1"])
        assert answer.subprotocol == "v1"
        assert (b"x-who", b"me") in answer.extra_headers
        await client.send(CloseConnection(code=1000))
        assert isinstance(await client.event(), CloseConnection)


async def test_a_message_in_fragments_arrives_whole() -> None:
    async with serving(Echo()) as server, client_of(server) as client:
        await client.open()
        await client.send(DataMessage(data="ab", message_finished=False))
        await client.send(Ping())
        await client.send(DataMessage(data="cd"))
        assert isinstance(await client.event(), Pong)
        assert await client.message() == "abcd"


@each_case("before", [b"", b"GET /x HTTP/1.1\r\nHost: test\r\n\r\n"])
async def test_a_client_need_not_wait_for_the_answer_to_its_handshake(before: bytes) -> None:
    echo = Echo()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await echo(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"first"})

    async with serving(app) as server, connected(server) as client:
        both = WSConnection(ConnectionType.CLIENT)
        handshake = both.send(Request(host="test", target="/"))
        # The client's protocol object accepts no message before the answer.
        frame = b"\x82\x83\x00\x00\x00\x00abc"
        await client.send(before + handshake + frame * 10_000)
        if before:
            assert (await client.response()).body == b"first"
        opened = SocketClient(client.reader, client.writer)
        opened._protocol = both
        assert isinstance(await opened.event(), AcceptConnection)
        for _ in range(10_000):
            assert await opened.message() == b"abc"
        client.writer.transport.abort()


async def test_the_application_closes_with_its_code() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close", "code": 4321, "reason": "go"})
        with pytest.raises(OSError, match="closed"):
            await send({"type": "websocket.send", "text": "more"})
        assert await receive() == disconnect(4321, "go")

    async with serving(app) as server, client_of(server) as client:
        await client.open()
        assert await client.closed() == (4321, "go")


async def test_an_application_that_returns_closes_with_1000_and_one_that_fails_with_1011(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        if scope["path"] == "/fail":
            raise RuntimeError("broken")

    async with serving(app) as server:
        async with client_of(server) as client:
            await client.open("/return")
            assert (await client.closed())[0] == 1000
        assert caplog.records == []
        async with client_of(server) as client:
            await client.open("/fail")
            assert await client.closed() == (1011, "internal error")
    assert "broken" in caplog.text


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/close", 403, b""),
        ("/return", 500, b"Internal Server Error"),
        ("/fail", 500, b"Internal Server Error"),
        ("/deny", 404, b"nothing here"),
    ],
)
def test_a_handshake_that_is_refused_is_answered_by_http(
    path: str, status: int, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if scope["path"] == "/close":
            await send({"type": "websocket.close"})
        elif scope["path"] == "/fail":
            raise RuntimeError("broken")
        elif scope["path"] == "/deny":
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "websocket.http.response.start", "status": 404, "headers": headers})
            await send({"type": "websocket.http.response.body", "body": b"nothing ", "more_body": True})
            await send({"type": "websocket.http.response.body", "body": b"here"})

    async def test() -> None:
        async with serving(app) as server, client_of(server) as client:
            answer = await client.open(path)
            assert isinstance(answer, RejectConnection)
            assert answer.status_code == status
            read = b""
            while isinstance(event := await client.event(), RejectData):
                read += event.data
            assert (event, read) == (None, body)

    with caplog.at_level(logging.ERROR):
        run(test)


async def test_a_lost_connection_is_a_disconnect() -> None:
    app = Echo()
    async with serving(app) as server, client_of(server) as client:
        await client.open()
        client.vanish()
        await poll_for(lambda: app.ended)
    assert app.ended == [disconnect(1006)]


async def test_an_application_that_sends_receives_the_disconnect_at_once() -> None:
    ended: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        try:
            while True:
                await send({"type": "websocket.send", "bytes": bytes(1 << 20)})
        except BaseException as error:
            ended.append(error)
            raise

    async with serving(app) as server, client_of(server) as client:
        await client.open()
        (session,) = server.state.sockets
        await poll_for(session.connection.stream.writing)
        client.vanish()
        await poll_for(lambda: ended)
    assert isinstance(ended[0], OSError)


async def test_a_refusal_that_is_read_late_arrives_whole() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        headers = [(b"content-length", b"8000000")]
        await send({"type": "websocket.http.response.start", "status": 404, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": bytes(8_000_000)})

    async with serving(app) as server, connected(server) as client:
        handshake = WSConnection(ConnectionType.CLIENT).send(Request(host="test", target="/"))
        await client.send(handshake)
        assert (await client.head())[0] == 404
        await asyncio.sleep(0.05)
        assert await client.rest() == bytes(8_000_000)


async def test_an_application_that_ignores_the_disconnect_is_cancelled() -> None:
    ended: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            ended.append(error)
            raise

    async with serving(app) as server, client_of(server) as client:
        await client.open()
        client.vanish()
        await poll_for(lambda: "gone" in repr(list(server.state.sockets)))
        advance(6)
        await poll_for(lambda: ended)
        assert hits(server) == {"websocket_end": 1}
    assert isinstance(ended[0], asyncio.CancelledError)


@each_case(
    ("data", "code"),
    [
        (b"\xc1\x80\x00\x00\x00\x00", 1002),  # a reserved bit
        (b"\x81\x82\x00\x00\x00\x00\xff\xfe", 1007),  # no UTF-8
        (b"\x81\x02hi", 1002),  # not masked
    ],
)
async def test_a_client_that_breaks_the_protocol_is_closed_with_a_code(data: bytes, code: int) -> None:
    app = Echo()
    async with serving(app) as server, client_of(server) as client:
        await client.open()
        await client.send_raw(data)
        event = await client.event()
        assert isinstance(event, CloseConnection)
        assert event.code == code
        await poll_for(lambda: app.ended)
        assert app.ended[0]["code"] == code


async def test_a_message_that_is_too_large_is_refused() -> None:
    app = Echo()
    async with serving(app, max_websocket_message_bytes=1000) as server, client_of(server) as client:
        await client.open()
        assert await client.text("x" * 1000) == "x" * 1000
        await client.send(DataMessage(data="x" * 600, message_finished=False))
        await client.send(DataMessage(data="x" * 600))
        assert (await client.closed())[0] == 1009
        await poll_for(lambda: app.ended)
        assert hits(server) == {"max_websocket_message_bytes": 1}
    assert app.ended[0]["code"] == 1009


async def test_a_client_that_sends_faster_than_the_application_reads_has_to_wait() -> None:
    may_read = asyncio.Event()
    seen: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await may_read.wait()
        while (message := await receive())["type"] == "websocket.receive":
            seen.append(len(message["bytes"]))

    async with serving(app) as server, client_of(server) as client:
        await client.open()
        frame = client._protocol.send(DataMessage(data=bytes(100_000)))
        for _ in range(400):
            client._writer.write(frame)
        session = next(iter(server.state.sockets))
        await poll_for(lambda: session.connection.inbox.is_full)
        for _ in range(200):
            await asyncio.sleep(0)
        assert session.connection.inbox._held_bytes < 2 * MAX_INBOX_BYTES
        assert len(getattr(session.connection.stream, "_unread", b"")) < MAX_INBOX_BYTES
        may_read.set()
        await poll_for(lambda: len(seen) == 400)


async def test_a_silent_client_is_pinged_and_then_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskserve.proxies.exchange.websocket.connection.PING_S", ping_s := 1.0)

    app = Echo()
    async with serving(app) as server, client_of(server) as client:
        await client.open()
        for _ in range(2):
            advance(ping_s)
            ping = await client.event()
            assert isinstance(ping, Ping)
            await client.send(ping.response())
            assert await client.text("still here") == "still here"
        advance(ping_s)
        assert isinstance(await client.event(), Ping)
        advance(ping_s)
        assert (await client.closed())[0] == 1011
        await poll_for(lambda: app.ended)
        assert hits(server) == {"websocket_silence": 1}


async def test_a_client_that_sends_pings_and_does_not_read_gets_no_more_pongs() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        with contextlib.suppress(OSError):
            await send({"type": "websocket.send", "bytes": bytes(8_000_000)})

    async with serving(app) as server, client_of(server) as client:
        await client.open()
        (session,) = server.state.sockets
        await poll_for(session.connection.stream.writing)
        for _ in range(MAX_PONGS + 10):
            await client.send(Ping())
        await poll_for(lambda: session.connection._pongs == MAX_PONGS + 10)
        assert hits(server) == {"websocket_pongs": 1}


async def test_a_draining_server_closes_with_going_away() -> None:
    app = Echo()
    async with serving(app) as server, client_of(server) as client:
        await client.open()
        draining = asyncio.create_task(server.drain(5))
        assert await client.closed() == (1001, "going away")
        await draining
        assert app.ended == [disconnect(1001, "going away")]


async def test_a_server_that_stops_ends_sessions_at_once() -> None:
    app = Echo()
    async with serving(app) as server, client_of(server) as client:
        await client.open()
        await server.stop()
        goodbye = await client.event()
        assert isinstance(goodbye, CloseConnection)
        assert goodbye.code == 1001
        assert await client.event() is None
        assert len(app.ended) == 1


@each_case(
    ("headers", "status"),
    [
        ("Upgrade: websocket\r\nConnection: Upgrade", 400),
        ("Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13", 400),
        ("Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 8", 426),
    ],
)
async def test_an_invalid_handshake_is_refused(headers: str, status: int) -> None:
    async with serving(Echo()) as server, connected(server) as client:
        await client.send(f"GET / HTTP/1.1\r\nHost: test\r\n{headers}\r\n\r\n".encode())
        found, received = await client.head()
        assert found == status
        assert (
            status == 400
            or {name.lower(): each for name, each in received.items()}["sec-websocket-version"] == "13"
        )


@each_case("headers", ["Upgrade: h2c\r\nConnection: Upgrade", "Connection: Upgrade"])
async def test_other_upgrades_are_ignored(headers: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"plain"})

    async with serving(app) as server, connected(server) as client:
        await client.send(f"GET / HTTP/1.1\r\nHost: test\r\n{headers}\r\n\r\n".encode())
        assert (await client.head())[0] == 200


async def test_a_flood_of_empty_messages_is_bounded() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await asyncio.Event().wait()

    async with serving(app) as server, client_of(server) as client:
        await client.open()
        client._writer.write(client._protocol.send(DataMessage(data=b"")) * 100_000)
        session = next(iter(server.state.sockets))
        await poll_for(lambda: session.connection.inbox.is_full)
        assert session.connection.inbox._held_bytes < 2 * MAX_INBOX_BYTES


async def test_received_messages_do_not_block_other_tasks() -> None:
    """A client that sends without a pause must not occupy the loop alone, however much arrives at once."""

    async with serving(Echo()) as server, client_of(server) as client:
        await client.open()
        (session,) = server.state.sockets
        frame = client._protocol.send(DataMessage(data=b"x" * 20))
        stream = session.connection.stream
        stream.data_received(frame * 5000)
        parsed = [len(session.connection.inbox._messages)]
        while len(parsed) < 5:
            await asyncio.sleep(0)
            parsed.append(len(session.connection.inbox._messages))
        assert 0 < parsed[0] < 1000
        echoed = [await client.message() for _ in range(5000)]
        assert echoed == [b"x" * 20] * 5000


async def test_an_invalid_answer_is_an_error_of_the_application(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept", "subprotocol": "not offered"})

    async with serving(app) as server, client_of(server) as client:
        answer = await client.open()
        assert isinstance(answer, RejectConnection)
        assert answer.status_code == 500
    assert "not offered" in caplog.text


async def test_an_invalid_close_code_is_an_error_of_the_application(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close", "code": 70_000})

    async with serving(app) as server, client_of(server) as client:
        await client.open()
        assert await client.closed() == (1011, "internal error")
    assert "WebSocket / failed" in caplog.text


async def test_a_handshake_during_draining_is_answered_and_then_closed() -> None:
    may_accept = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await may_accept.wait()
        await send({"type": "websocket.accept"})
        assert await receive() == disconnect(1001, "going away")

    async with serving(app) as server, client_of(server) as client:
        opening = asyncio.create_task(client.open())
        await poll_for(lambda: server.state.sockets)
        draining = asyncio.create_task(server.drain(5))
        await asyncio.sleep(0)
        may_accept.set()
        assert isinstance(await opening, AcceptConnection)
        assert await client.closed() == (1001, "going away")
        await draining


async def test_the_session_ends_without_a_client_that_closes_and_does_not_read() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        with contextlib.suppress(OSError):
            while True:
                await send({"type": "websocket.send", "bytes": bytes(1_000_000)})

    async with serving(app) as server, client_of(server) as client:
        await client.open()
        (session,) = server.state.sockets
        await poll_for(session.connection.stream.writing)
        client._writer.write(client._protocol.send(CloseConnection(code=1000)))
        await poll_for(lambda: session.connection.inbox.disconnect is not None)
        advance(5.5)  # the application is cancelled
        await poll_for(lambda: session._task is None)
        advance(2.5)  # and the connection is closed
        await poll_for(lambda: not server.state.sockets)
        assert session.connection.stream.closed()
        assert hits(server) == {"websocket_end": 1, "websocket_close": 1}
