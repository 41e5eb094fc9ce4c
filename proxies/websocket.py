"""One WebSocket under Tornado, and the ASGI application that it talks to.

Tornado hands over the connection once a request's headers ask for a WebSocket (RFC 6455); from then on
wsproto speaks the protocol and this class carries its messages. A session ends in one of these ways:

1. The application closes it: with the code it names, or 403 if it never accepted.
2. The application answers the handshake with a response of its own (a 404 of the ingress, say).
3. The application returns: 1000. It fails: 500 before the connection was accepted, 1011 after.
4. The client closes it, or is gone: the application is told, gets `LEAVE_S` to end, and is cancelled then.
5. The client breaks the protocol (1002, 1007), or sends a message that is too large (1009): as 4.
6. Nothing is heard of the client, not even answers to pings: 1011, as 4.
7. The server drains: 1001, as 4.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from tornado.iostream import IOStream, StreamClosedError
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
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from daskserve.proxies.asgi import ASGIApp, Scope
from daskserve.types import Message

log = logging.getLogger("daskserve.proxies")

#: How long an application may take to end once its client is gone, before it is cancelled.
LEAVE_S = 5.0
#: How long a client may take to answer the closing of the connection.
CLOSE_S = 2.0
#: So much may have come in that the application has not taken yet; then the client has to wait.
INBOX_BYTES = 1024 * 1024
#: How often a silent client is asked whether it is there, and how long it may take to say so.
PING_S = 20.0
_READ_BYTES = 64 * 1024

OnEnd: TypeAlias = Callable[["WebSocketSession"], None]


class WebSocketSession:
    """Carries the messages between a client and the application.

    Parameters
    ----------
    scope : mapping
        The ASGI scope of type ``websocket``.
    max_message_bytes : int
        A client that sends a larger message is sent away with code 1009.
    on_end : callable
        ``on_end(session)`` is called once, when the application has ended.

    Raises
    ------
    ValueError
        The request is no proper handshake.
    """

    def __init__(
        self, app: ASGIApp, scope: Scope, stream: IOStream, *, max_message_bytes: int, on_end: OnEnd
    ) -> None:
        self._app = app
        self._scope = scope
        self._stream = stream
        self._max_message_bytes = max_message_bytes
        self._on_end = on_end
        self._protocol = WSConnection(ConnectionType.SERVER)
        self._inbox: deque[tuple[Message, int]] = deque([({"type": "websocket.connect"}, 0)])
        self._inbox_bytes = 0
        self._changed = asyncio.Event()  # something was put into the inbox, or taken out of it
        self._farewell: Message | None = None  # what `receive` returns when the inbox is empty
        self._parts: list[Any] = []
        self._parts_bytes = 0
        self._denial: Message | None = None
        self._is_accepted = self._is_closing = self._is_gone = False
        self._is_heard = True
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        try:
            self._protocol.initiate_upgrade_connection(scope["headers"], scope["raw_path"].decode("latin-1"))
            request = next(self._protocol.events())
        except RemoteProtocolError as error:
            raise ValueError(f"This is not a WebSocket handshake: {error}.") from error
        assert isinstance(request, Request)
        scope["subprotocols"] = list(request.subprotocols)

    def __repr__(self) -> str:
        state = "gone" if self._is_gone else "open" if self._is_accepted else "opening"
        return f"<WebSocketSession {self._scope['path']} {state}>"

    def start(self) -> asyncio.Task[None]:
        """Start the application; the session ends with the returned task."""
        self._stream.set_nodelay(True)
        self._stream.set_close_callback(self._note_lost)
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    def leave(self, code: int = 1001, reason: str = "going away") -> None:
        """Close an open connection; one that is still being opened goes on. Idempotent."""
        if self._is_accepted:
            self._close(code, reason)

    # ---- the application's side

    async def receive(self) -> Message:
        """Return the client's next message; once it is gone, that, however often it is asked for."""
        while not self._inbox:
            if self._farewell is not None:
                return self._farewell
            self._changed.clear()
            await self._changed.wait()
        message, size = self._inbox.popleft()
        self._inbox_bytes -= size
        self._changed.set()
        return message

    async def send(self, message: Message) -> None:
        """Send one ASGI message, as fast as the client reads.

        Raises
        ------
        OSError
            The client is gone.
        RuntimeError
            The message makes no sense at this point.
        """
        kind = message["type"]
        if self._is_gone or (self._is_closing and kind != "websocket.http.response.body"):
            raise ConnectionResetError("the WebSocket is closed")
        if kind == "websocket.send" and self._is_accepted:
            data = message.get("bytes")
            await self._write(DataMessage(data=message["text"] if data is None else bytes(data)))
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
            self._is_accepted = True
            self._reading = asyncio.get_running_loop().create_task(self._read())
            self._arm_ping()
            accept = AcceptConnection(subprotocol=message.get("subprotocol"), extra_headers=headers)
            await self._write(accept)
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
            self._is_closing = True
            headers = [(bytes(name), bytes(value)) for name, value in start.get("headers", ())]
            if not any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in headers):
                headers.append((b"connection", b"close"))  # the end of the body is the end of the connection
            await self._write(RejectConnection(status_code=start["status"], headers=headers, has_body=True))
        await self._write(RejectData(data=body, body_finished=not more_body))
        if not more_body:
            self._end_stream()

    # ---- the client's side

    async def _read(self) -> None:
        try:
            while True:
                while self._inbox_bytes > INBOX_BYTES and self._farewell is None:
                    self._changed.clear()
                    await self._changed.wait()
                data = await self._stream.read_bytes(_READ_BYTES, partial=True)
                self._is_heard = True
                self._protocol.receive_data(data)
                for event in self._protocol.events():
                    if not self._take(event):
                        return
        except StreamClosedError:
            self._note_lost()

    def _take(self, event: Event) -> bool:
        """Take in what the client sent; False if that was the last."""
        if isinstance(event, (TextMessage, BytesMessage)):
            return self._take_part(event)
        if isinstance(event, Ping):
            self._post(event.response())
        elif isinstance(event, CloseConnection):
            if self._protocol.state is ConnectionState.REMOTE_CLOSING:
                self._post(event.response())
            elif self._protocol.state is ConnectionState.OPEN:
                self._post(event)  # what wsproto makes of a broken frame: the code to close with
            self._say_farewell(int(event.code), event.reason or "")
            self._is_closing = True
            self._end_stream()
            return False
        return True

    def _take_part(self, event: TextMessage | BytesMessage) -> bool:
        if self._is_closing:
            return True  # it comes too late, but the client's closing may still follow
        self._parts.append(event.data)
        self._parts_bytes += len(event.data)
        if self._parts_bytes > self._max_message_bytes:
            self._close(1009, f"a message may have {self._max_message_bytes} bytes")
            return True
        if event.message_finished:
            is_text = isinstance(event, TextMessage)
            parts, self._parts = self._parts, []
            message: Message = {"type": "websocket.receive", "text": None, "bytes": None}
            if is_text:
                message["text"] = "".join(parts)
            else:
                message["bytes"] = b"".join(bytes(part) for part in parts)
            self._inbox.append((message, self._parts_bytes))
            self._inbox_bytes += self._parts_bytes
            self._parts_bytes = 0
            self._changed.set()
        return True

    def _arm_ping(self) -> None:
        self._timers = [asyncio.get_running_loop().call_later(PING_S, self._ping)]

    def _ping(self) -> None:
        if self._is_gone or self._is_closing:
            return
        is_reading_on = self._inbox_bytes <= INBOX_BYTES
        if not self._is_heard and is_reading_on:
            self._close(1011, "nothing was heard for too long")
            return
        self._is_heard = False
        self._post(Ping())
        self._arm_ping()

    def _note_lost(self) -> None:
        """Take note that the connection is no more; idempotent."""
        self._is_gone = True
        self._say_farewell(1006, "")

    def _say_farewell(self, code: int, reason: str) -> None:
        if self._farewell is not None:
            return
        self._farewell = {"type": "websocket.disconnect", "code": code, "reason": reason}
        self._changed.set()
        if self._task is not None:
            self._timers.append(asyncio.get_running_loop().call_later(LEAVE_S, self._task.cancel))

    # ---- the rest

    async def _run(self) -> None:
        """Top loop of one session: whatever goes wrong in the application ends here, in the log."""
        try:
            await self._app(self._scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._close(1001, "going away")
            raise
        except Exception as error:
            if self._is_gone or self._is_closing:
                log.debug("A WebSocket's application failed after its client had gone", exc_info=error)
            else:
                log.exception("WebSocket %s failed", self._scope["path"])
                await self._fail()
        else:
            if self._is_accepted:
                self._close(1000, "")
            elif not self._is_closing and not self._is_gone:
                log.error("WebSocket %s was left without an answer", self._scope["path"])
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
            pass  # whoever was to be told is gone

    def _finish(self) -> None:
        self._task = None
        for timer in self._timers:
            timer.cancel()
        if not self._is_accepted:
            self._end_stream()
        else:
            # The reader goes on until the client has answered the closing, or has had its time for that.
            loop = asyncio.get_running_loop()
            if self._reading is not None and not self._reading.done() and not self._stream.closed():
                limit = loop.call_later(CLOSE_S, self._stream.close)
                self._reading.add_done_callback(lambda _: limit.cancel())
            else:
                self._end_stream()
        self._on_end(self)

    def abort(self) -> None:
        """End the connection at once."""
        self._note_lost()
        self._stream.close()

    def _close(self, code: int, reason: str) -> None:
        """Begin to close an open connection, and tell the application; idempotent."""
        if self._is_gone or self._is_closing or not self._is_accepted:
            return
        self._is_closing = True
        self._post(CloseConnection(code=code, reason=reason[:120]))
        self._say_farewell(code, reason)

    def _post(self, event: Event) -> None:
        """Send without waiting for the client to read it."""
        try:
            self._stream.write(self._protocol.send(event))
        except (StreamClosedError, LocalProtocolError) as error:
            log.debug("A WebSocket was closed already: %r", error)

    async def _write(self, event: Event) -> None:
        try:
            flushed = self._stream.write(self._protocol.send(event))
            if not flushed.done():
                await flushed
        except StreamClosedError as error:
            self._note_lost()
            raise ConnectionResetError("the client has gone away") from error

    def _end_stream(self) -> None:
        if self._stream.closed():
            return
        if self._stream.writing():
            self._stream.write(b"").add_done_callback(self._end_when_written)
        else:
            self._stream.close()

    def _end_when_written(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled():
            done.exception()  # looked at: whoever was to read it is gone
        self._stream.close()
