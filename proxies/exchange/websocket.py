"""A WebSocket session between a client and the ASGI application, for both servers.

The server hands over the connection when a request's headers ask for a WebSocket (RFC 6455). From then on
wsproto handles the protocol and `WebSocketSession` carries the messages. A session ends in one of these ways:

1. The application closes it: with its own code, or with 403 if it never accepted the handshake.
2. The application answers the handshake with a response of its own (for example a 404 of the ingress).
3. The application returns: 1000. It fails: 500 before the connection was accepted, 1011 after.
4. The client closes it or disconnects: the application receives the disconnect, and is cancelled after
   `DISCONNECT_GRACE_S`.
5. The client breaks the protocol (1002, 1007), or sends a message that is too large (1009): as 4.
6. The client sends nothing, not even answers to pings: 1011, as 4.
7. The server drains: 1001, as 4.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from tornado.iostream import StreamClosedError
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.events import (
    Message as DataMessage,
)
from wsproto.extensions import Extension
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from daskserve.clock import Clock
from daskserve.payload import is_logged
from daskserve.proxies.asgi import ASGIApp, Headers, Scope
from daskserve.proxies.exchange.deflate import BoundedDeflate
from daskserve.proxies.exchange.stream import Stream
from daskserve.types import Message

log = logging.getLogger("daskserve.proxies")

_HANDSHAKE_HEADERS = frozenset(
    (
        b"connection",
        b"upgrade",
        b"sec-websocket-key",
        b"sec-websocket-version",
        b"sec-websocket-protocol",
        b"sec-websocket-extensions",
    )
)
_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")

#: How long an application may run after its client has disconnected; then it is cancelled.
DISCONNECT_GRACE_S = 5.0
#: How long a client may take to answer a close.
CLOSE_TIMEOUT_S = 2.0
#: Size of received messages that may wait for the application; beyond it, nothing more is read.
MAX_INBOX_BYTES = 1024 * 1024
#: Interval of pings to a silent client, and the time it has to answer.
PING_S = 20.0
#: Size of a read; small, so that parsing does not block other tasks.
_READ_BYTES = 16 * 1024
#: Maximum number of pongs that wait for a client that does not read.
MAX_PONGS = 64
#: Overhead that each message or part counts in addition to its data.
_PART_BYTES = 256
#: Overhead of parts that a message may have in addition to the size limit.
_PARTS_ALLOWANCE_BYTES = 1024 * 1024


class BadHandshakeError(ValueError):
    """A request is not a valid handshake; the error carries the response to it."""

    def __init__(self, message: str, status: int = 400, headers: Headers = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class _WebSocketInbox:
    """Messages that wait for the application; after the last one, every `take` returns the disconnect."""

    def __init__(self) -> None:
        self._messages: deque[tuple[Message, int]] = deque()
        self._held_bytes = 0
        self._changed = asyncio.Event()
        self._parts: list[Any] = []
        self._parts_bytes = 0
        self.disconnect: Message | None = None

    @property
    def is_full(self) -> bool:
        return self._held_bytes > MAX_INBOX_BYTES and self.disconnect is None

    def put(self, message: Message, size_bytes: int) -> None:
        self._messages.append((message, size_bytes))
        self._held_bytes += size_bytes
        self._changed.set()

    def add_part(self, event: TextMessage | BytesMessage, max_bytes: int) -> bool:
        """Add a message or a part of one; return False if the message is too large."""
        self._parts.append(event.data)
        self._parts_bytes += len(event.data)
        # Many small parts use memory too.
        overhead_bytes = _PART_BYTES * len(self._parts)
        if (
            self._parts_bytes > max_bytes
            or self._parts_bytes + overhead_bytes > max_bytes + _PARTS_ALLOWANCE_BYTES
        ):
            return False
        if event.message_finished:
            message: Message = {"type": "websocket.receive", "text": None, "bytes": None}
            if isinstance(event, TextMessage):
                message["text"] = "".join(self._parts)
            else:
                message["bytes"] = b"".join(bytes(part) for part in self._parts)
            self.put(message, self._parts_bytes + _PART_BYTES)
            self._parts, self._parts_bytes = [], 0
        return True

    def end(self, disconnect: Message) -> None:
        self.disconnect = disconnect
        self._changed.set()

    async def take(self) -> Message:
        while not self._messages:
            if self.disconnect is not None:
                return self.disconnect
            self._changed.clear()
            await self._changed.wait()
        message, size_bytes = self._messages.popleft()
        self._held_bytes -= size_bytes
        self._changed.set()
        return message

    async def wait_for_room(self) -> None:
        while self.is_full:
            self._changed.clear()
            await self._changed.wait()


def _read_handshake(protocol: WSConnection, headers: Headers) -> list[str]:
    """Check a handshake with wsproto; return the subprotocols that the client offers."""
    # Only the headers it needs: it requires ASCII or IDNA in paths and hosts, where other bytes are valid.
    wanted = [header for header in headers if header[0] in _HANDSHAKE_HEADERS]
    keys = [value for name, value in wanted if name == b"sec-websocket-key"]
    try:
        protocol.initiate_upgrade_connection([(b"host", b"here"), *wanted], "/")
        request = next(protocol.events())
    except RemoteProtocolError as error:
        hint = error.event_hint
        reply = (hint.status_code, hint.headers) if isinstance(hint, RejectConnection) else (400, ())
        raise BadHandshakeError(f"This is not a valid WebSocket handshake: {error}.", *reply) from error
    except UnicodeError as error:
        raise BadHandshakeError("The headers of a WebSocket handshake must be ASCII.") from error
    if len(keys) != 1 or _KEY.fullmatch(keys[0]) is None:
        raise BadHandshakeError(
            "A WebSocket handshake must have one Sec-WebSocket-Key, of 16 bytes in base64."
        )
    assert isinstance(request, Request)
    return [offered for offered in request.subprotocols if offered]


OnEnd: TypeAlias = Callable[["WebSocketSession"], None]


class WebSocketSession:
    """Carries the messages between a client and the application.

    Parameters
    ----------
    scope : mapping
        The ASGI scope of type ``websocket``.
    max_message_bytes : int
        Maximum size of a message; a larger one closes the connection with code 1009.
    deflates_messages : bool
        Whether messages are compressed if the client offers it.
    on_end : callable
        ``on_end(session)`` is called once, when the application has ended and the connection is closed.

    Raises
    ------
    BadHandshakeError
        The request is not a valid handshake.
    """

    def __init__(
        self,
        app: ASGIApp,
        scope: Scope,
        stream: Stream,
        *,
        max_message_bytes: int,
        clock: Clock,
        on_end: OnEnd,
        deflates_messages: bool = False,
    ) -> None:
        self._app = app
        self._scope = scope
        self._stream = stream
        self._max_message_bytes = max_message_bytes
        self._extensions: list[Extension] = [BoundedDeflate(max_message_bytes)] if deflates_messages else []
        self._clock = clock
        self._on_end = on_end
        self._protocol = WSConnection(ConnectionType.SERVER)
        self._inbox = _WebSocketInbox()
        self._inbox.put({"type": "websocket.connect"}, 0)
        self._pongs = 0
        self._denial: Message | None = None
        self._is_accepted = self._is_closing = self._is_leaving = self._is_gone = False
        self._has_received = True
        self._sent_bytes_at_ping: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        scope["subprotocols"] = _read_handshake(self._protocol, scope["headers"])

    def __repr__(self) -> str:
        state = "gone" if self._is_gone else "open" if self._is_accepted else "opening"
        return f"<WebSocketSession {self._scope['path']} {state}>"

    @property
    def unread(self) -> Stream | None:
        """The connection, if the session does not read from it now; otherwise None."""
        is_not_reading = not self._is_gone and (not self._is_accepted or self._inbox.is_full)
        return self._stream if is_not_reading else None

    def start(self) -> asyncio.Task[None]:
        """Start the application; the session ends with the returned task."""
        self._stream.set_nodelay(True)
        self._stream.set_close_callback(self._on_lost)
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    def leave(self, code: int = 1001, reason: str = "going away") -> None:
        """Close the connection as soon as it is open. Idempotent."""
        self._is_leaving = True
        self._close(code, reason)

    # ---- the application's side

    async def receive(self) -> Message:
        """Return the client's next message; after a disconnect, every call returns the disconnect."""
        return await self._inbox.take()

    async def send(self, message: Message) -> None:
        """Send one ASGI message; wait until the client has room for more.

        Raises
        ------
        OSError
            The client has disconnected.
        RuntimeError
            The message is not allowed in the current state.
        """
        kind = message["type"]
        if self._is_gone or (self._is_closing and kind != "websocket.http.response.body"):
            # Yield, so that an application in a send loop can still receive the disconnect.
            await self._clock.sleep(0)
            raise ConnectionResetError("the WebSocket is closed")
        if kind == "websocket.send" and self._is_accepted:
            data = message.get("bytes")
            frame = DataMessage(data=message["text"] if data is None else bytes(data))
            await self._write(self._packed(frame))
        elif kind == "websocket.close" and self._is_accepted:
            self._close(message.get("code") or 1000, message.get("reason") or "")
        elif self._is_accepted:
            raise RuntimeError(f"a message of type {kind!r} was sent over an open WebSocket")
        else:
            await self._answer_handshake(message)

    async def _answer_handshake(self, message: Message) -> None:
        kind = message["type"]
        if kind == "websocket.accept" and self._denial is None:
            headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            accept = AcceptConnection(
                subprotocol=message.get("subprotocol"), extra_headers=headers, extensions=self._extensions
            )
            data = self._packed(accept)
            self._is_accepted = True
            self._reading = asyncio.get_running_loop().create_task(self._read())
            self._arm_ping()
            await self._write(data)
            if self._is_leaving:
                self.leave()
        elif kind == "websocket.close" and self._denial is None:
            await self._deny({"status": 403, "headers": ()}, b"", more_body=False)
        elif kind == "websocket.http.response.start" and self._denial is None:
            self._denial = message
        elif kind == "websocket.http.response.body" and self._denial is not None:
            more_body = bool(message.get("more_body", False))
            await self._deny(self._denial, bytes(message.get("body", b"")), more_body=more_body)
        else:
            raise RuntimeError(f"a message of type {kind!r} does not answer a WebSocket's handshake")

    async def _deny(self, start: Any, body: bytes, *, more_body: bool) -> None:
        if not self._is_closing:
            headers = [(bytes(name), bytes(value)) for name, value in start.get("headers", ())]
            if not any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in headers):
                headers.append((b"connection", b"close"))  # the end of the body is the end of the connection
            data = self._packed(RejectConnection(status_code=start["status"], headers=headers, has_body=True))
            self._is_closing = True
            await self._write(data)
        await self._write(self._packed(RejectData(data=body, body_finished=not more_body)))
        if not more_body:
            self._end_stream()

    # ---- the client's side

    async def _read(self) -> None:
        try:
            while True:
                await self._inbox.wait_for_room()
                reading = asyncio.ensure_future(self._stream.read_bytes(_READ_BYTES, partial=True))
                if reading.done():  # buffered data: yield to other tasks
                    await self._clock.sleep(0)
                data = await reading
                self._has_received = True
                self._protocol.receive_data(data)
                for event in self._protocol.events():
                    if not self._take(event):
                        return
        except StreamClosedError:
            self._on_lost()

    def _take(self, event: Event) -> bool:
        """Process an event of the client; return False if it was the last."""
        if isinstance(event, (TextMessage, BytesMessage)):
            self._take_part(event)
        elif isinstance(event, Ping):
            # Pongs must not accumulate for a client that sends pings and does not read.
            self._pongs = self._pongs + 1 if self._stream.writing() else 0
            if self._pongs <= MAX_PONGS:
                self._post(event.response())
        elif isinstance(event, CloseConnection):
            if self._protocol.state is ConnectionState.REMOTE_CLOSING:
                self._post(event.response())
            elif self._protocol.state is ConnectionState.OPEN:
                self._post(event)  # for an invalid frame, wsproto sets the close code
            self._disconnect(int(event.code), event.reason or "")
            self._is_closing = True
            self._end_stream()
            return False
        return True

    def _take_part(self, event: TextMessage | BytesMessage) -> None:
        if self._is_closing:
            return  # too late, but the client's close may still follow
        if not self._inbox.add_part(event, self._max_message_bytes):
            self._close(1009, f"a message may have {self._max_message_bytes} bytes")

    def _arm_ping(self) -> None:
        self._timers = [asyncio.get_running_loop().call_later(PING_S, self._ping)]

    def _ping(self) -> None:
        if self._is_gone or self._is_closing:
            return
        # A client that reads, however slowly, is as alive as one that sends.
        written_bytes = self._stream.sent_bytes
        is_reading = self._sent_bytes_at_ping is not None and written_bytes > self._sent_bytes_at_ping
        if not self._has_received and not is_reading and not self._inbox.is_full:
            self._close(1011, "no data or pong was received in time")
            return
        self._has_received = False
        self._sent_bytes_at_ping = written_bytes if self._stream.writing() else None
        self._post(Ping())
        self._arm_ping()

    def _on_lost(self) -> None:
        """Record that the connection is lost; idempotent."""
        self._is_gone = True
        self._disconnect(1006, "")

    def _disconnect(self, code: int, reason: str) -> None:
        if self._inbox.disconnect is not None:
            return
        self._inbox.end({"type": "websocket.disconnect", "code": code, "reason": reason})
        if self._task is not None:
            self._timers.append(asyncio.get_running_loop().call_later(DISCONNECT_GRACE_S, self._task.cancel))

    # ---- the rest

    async def _run(self) -> None:
        """Top loop of one session: errors of the application end here, in the log."""
        try:
            await self._app(self._scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._close(1001, "going away")
            raise
        except Exception as error:
            if self._is_gone or self._is_closing:
                log.debug(
                    "The application of a WebSocket failed after its client had disconnected", exc_info=error
                )
            else:
                if not is_logged(error):
                    log.exception("WebSocket %s failed", self._scope["path"])
                await self._fail()
        else:
            if self._is_accepted:
                self._close(1000, "")
            elif not self._is_closing and not self._is_gone:
                log.error("The application of WebSocket %s ended without an answer", self._scope["path"])
                await self._fail()
        finally:
            self._finish()

    async def _fail(self) -> None:
        if self._is_accepted:
            self._close(1011, "internal error")
            return
        try:
            await self._deny({"status": 500, "headers": ()}, b"Internal Server Error", more_body=False)
        except OSError:
            pass  # the client has disconnected

    def _finish(self) -> None:
        self._task = None
        for timer in self._timers:
            timer.cancel()
        if self._stream.closed():
            self._on_end(self)
            return
        # The client gets some time to read the remaining data and to answer the close.
        limit = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._stream.close)

        def closed() -> None:
            limit.cancel()
            self._on_end(self)

        self._stream.set_close_callback(closed)
        if self._reading is None or self._reading.done():
            self._end_stream()

    def close(self) -> None:
        """End the connection at once; an open one with 1001, if that can be sent without waiting."""
        self.leave()
        self._on_lost()
        self._stream.close()

    def _close(self, code: int, reason: str) -> None:
        """Start to close an open connection, and notify the application; idempotent."""
        if self._is_gone or self._is_closing or not self._is_accepted:
            return
        self._is_closing = True
        self._post(CloseConnection(code=code, reason=reason[:120]))
        self._disconnect(code, reason)

    def _post(self, event: Event) -> None:
        """Send without waiting for the client to read it."""
        try:
            self._stream.write(self._protocol.send(event))
        except (StreamClosedError, LocalProtocolError) as error:
            log.debug("A WebSocket was already closed: %r", error)

    def _packed(self, event: Event) -> bytes:
        try:
            return self._protocol.send(event)
        except LocalProtocolError as error:
            raise RuntimeError(f"the WebSocket cannot send the message: {error}") from error

    async def _write(self, data: bytes) -> None:
        try:
            flushed = self._stream.write(data)
            if not flushed.done():
                await asyncio.shield(flushed)
        except StreamClosedError as error:
            self._on_lost()
            raise ConnectionResetError("the client has disconnected") from error

    def _end_stream(self) -> None:
        if self._stream.closed():
            return
        if not self._stream.writing():
            self._stream.close()
            return

        def written(done: asyncio.Future[None]) -> None:
            if not done.cancelled():
                done.exception()  # retrieved; the client has disconnected
            self._stream.close()

        self._stream.write(b"").add_done_callback(written)
