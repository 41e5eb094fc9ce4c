"""The connection of a WebSocket: its protocol, its timers, and the messages in both directions.

A connection lives on one event loop. The handshake is read on the server's loop. If user code runs in this
process on a separate loop, the connection moves there when the handshake is accepted (see
`daskserve.common.types.SocketReceiver`). From then on, user code reads and writes the connection directly.
Otherwise each message would cross threads, which doubled its CPU time and its latency.

The `daskserve.proxies.exchange.websocket.session.WebSocketSession` stays on the server's loop, and posts its
calls to the loop of a connection that has moved. While user code blocks that loop, the connection and these
calls wait; `WebSocketConnection.cut` ends the connection from any thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from wsproto import WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    RejectData,
    TextMessage,
)
from wsproto.events import (
    Message as DataMessage,
)
from wsproto.utilities import LocalProtocolError

from daskserve.common.clock import Clock
from daskserve.common.types import SOCKET_RECEIVER, Message, OpenSocket, SocketReceiver
from daskserve.proxies.exchange.limits.limits import WEBSOCKET_PONGS, WEBSOCKET_SILENCE, Limits
from daskserve.proxies.exchange.limits.loop_work import SLICE_BYTES, SLOW, STEP_BYTES, LoopWork
from daskserve.proxies.exchange.stream import Stream, open_stream
from daskserve.proxies.exchange.websocket.assembler import MessageAssembler
from daskserve.proxies.exchange.websocket.deflate import Inflation, MessageDeflate
from daskserve.proxies.exchange.websocket.inbox import WebSocketInbox, WebSocketReader

log = logging.getLogger("daskserve.proxies")

#: Interval of pings to a client that sends nothing, and the time for its answer.
PING_S = 20.0
#: Maximum number of unsent pongs to a client that does not read.
MAX_PONGS = 64
GOING_AWAY = (1001, "going away")


class WebSocketCallbacks(NamedTuple):
    """The functions that a connection calls on its loop; see `WebSocketSession`."""

    #: The connection moves to another loop.
    moves: Callable[[SocketReceiver], None]
    #: The application receives the disconnect.
    disconnected: Callable[[], None]
    #: The connection is closed. May be called more than once.
    closed: Callable[[], None]


class WebSocketWriter:
    """Writes the frames of one WebSocket."""

    def __init__(self, stream: Stream, protocol: WSConnection, on_lost: Callable[[], None]) -> None:
        self.stream = stream
        self._protocol = protocol
        self._on_lost = on_lost
        #: Held while a compressed message is sent, because its pieces must not mix with those of another.
        self._sending = asyncio.Lock()

    def post(self, event: Event) -> None:
        """Send an event without waiting for the client to read it."""
        try:
            self.stream.write(self._protocol.send(event))
        except (ConnectionResetError, LocalProtocolError) as error:
            log.debug("A WebSocket was already closed: %r", error)

    def pack(self, event: Event) -> bytes:
        """Return the bytes of an event; raise `RuntimeError` if the protocol does not allow it."""
        try:
            return self._protocol.send(event)
        except LocalProtocolError as error:
            raise RuntimeError(f"the WebSocket cannot send the message: {error}") from error

    def write(self, data: bytes) -> asyncio.Future[None]:
        """Send bytes, and return a future for `flush`; raise `OSError` if the client has disconnected."""
        try:
            return self.stream.write(data)
        except ConnectionResetError:
            self._on_lost()
            raise

    async def send_in_pieces(
        self, frame: DataMessage[Any], loop_work: LoopWork, on_incomplete: Callable[[], None]
    ) -> None:
        """Compress and send a message in pieces, so that other connections are served in between.

        Raises `OSError` if the connection has ended or ends meanwhile. Calls ``on_incomplete`` if only a part
        of the message was sent, for example because the task was cancelled.
        """
        is_incomplete = False
        async with self._sending:
            try:
                for at in range(0, max(1, len(frame.data)), SLICE_BYTES):
                    if at:
                        await loop_work.turn(SLOW * SLICE_BYTES)
                    if self._protocol.state is not ConnectionState.OPEN:
                        raise ConnectionResetError("the WebSocket is closed")
                    is_last = at + SLICE_BYTES >= len(frame.data)
                    piece = DataMessage(data=frame.data[at : at + SLICE_BYTES], message_finished=is_last)
                    flushed = self.write(self.pack(piece))
                    is_incomplete = not is_last
                    if not flushed.done():
                        await self.flush(flushed)
            finally:
                if is_incomplete:
                    on_incomplete()

    async def flush(self, flushed: asyncio.Future[None]) -> None:
        """Wait until there is room for more; raise `OSError` if the client has disconnected."""
        if not flushed.done():
            try:
                await asyncio.shield(flushed)
            except ConnectionResetError:
                self._on_lost()
                raise

    def end(self) -> None:
        """Close the connection once all written data is sent."""
        if self.stream.closed():
            return
        if not self.stream.writing():
            self.stream.close()
            return

        def written(done: asyncio.Future[None]) -> None:
            if not done.cancelled():
                done.exception()  # marks it as retrieved: the client has disconnected
            self.stream.close()

        self.stream.write(b"").add_done_callback(written)


class WebSocketConnection:
    """The connection of one WebSocket; user code gets an `OpenSocket` once the handshake is accepted.

    Parameters
    ----------
    protocol : WSConnection
        The protocol, which has received the handshake.
    max_message_bytes : int
        Maximum size of a message; a larger one closes the connection with code 1009.
    deflates_messages : bool
        Whether to compress messages if the client offers it.
    """

    def __init__(
        self,
        stream: Stream,
        protocol: WSConnection,
        callbacks: WebSocketCallbacks,
        *,
        max_message_bytes: int,
        deflates_messages: bool,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._writer = WebSocketWriter(stream, protocol, self._on_lost)
        self._limits = limits
        self.inbox = WebSocketInbox(limits)
        self.inbox.put({"type": "websocket.connect"}, 0)
        self.is_accepted = self.is_closing = self.is_gone = False
        self._protocol = protocol
        self._callbacks = callbacks
        self._deflate = MessageDeflate() if deflates_messages else None
        inflation = None if self._deflate is None else Inflation(self._deflate, limits.inflation)
        self._assembler = MessageAssembler(
            self.inbox, inflation, limits, self.close, max_message_bytes=max_message_bytes, clock=clock
        )
        self._clock = clock
        self._reader = WebSocketReader(self.inbox, self._parse)
        self._is_going_away = False
        self._pongs = 0
        self._denial: Message | None = None
        self._sent_bytes_at_ping: int | None = None
        self._ping_timer: asyncio.TimerHandle | None = None
        #: The loop of user code to which the connection has moved, or which uses the connection directly.
        self._receiver: SocketReceiver | None = None
        #: The socket while the connection moves, and the calls that wait until it has moved.
        self._arriving: socket.socket | None = None
        self._late: list[Callable[[], None]] = []

    @property
    def stream(self) -> Stream:
        """The stream of the connection."""
        return self._writer.stream

    def __repr__(self) -> str:
        return "gone" if self.is_gone else "open" if self.is_accepted else "opening"

    def start(self) -> None:
        """Watch for the end of the connection. Nothing is read until the handshake is accepted."""
        self.stream.set_close_callback(self._on_lost)

    # ---- the application's side

    def receive(self) -> Awaitable[Message]:
        """Return the client's next message; after a disconnect, every call returns the disconnect."""
        return self.inbox.take()

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
        if kind == "websocket.send" and self.is_accepted and not self.is_closing and not self.is_gone:
            data = message.get("bytes")
            frame = DataMessage(data=message["text"] if data is None else bytes(data))
            if self._deflate is not None and self._deflate.enabled():
                # Otherwise the client would take the next message for the rest of an incomplete one.
                end = partial(self.close, 1011, "a message was not sent whole")
                await self._writer.send_in_pieces(frame, self._limits.loop_work.current(), end)
                return
            flushed = self._writer.write(self._writer.pack(frame))
            if not flushed.done():
                await self._writer.flush(flushed)
        elif self.is_gone or (self.is_closing and kind != "websocket.http.response.body"):
            # Yield, so that an application in a send loop can still receive the disconnect.
            await self._clock.sleep(0)
            raise ConnectionResetError("the WebSocket is closed")
        elif kind == "websocket.close" and self.is_accepted:
            self.close(message.get("code") or 1000, message.get("reason") or "")
        elif self.is_accepted:
            raise RuntimeError(f"a message of type {kind!r} was sent over an open WebSocket")
        elif kind == "websocket.accept" and self._denial is None:
            await self._accept(message)
        elif kind == "websocket.close" and self._denial is None:
            await self._writer.flush(self._deny({"status": 403, "headers": ()}, b"", more_body=False))
        elif kind == "websocket.http.response.start" and self._denial is None:
            self._denial = message
        elif kind == "websocket.http.response.body" and self._denial is not None:
            more_body = bool(message.get("more_body", False))
            body = bytes(message.get("body", b""))
            await self._writer.flush(self._deny(self._denial, body, more_body=more_body))
        else:
            raise RuntimeError(f"a message of type {kind!r} does not answer a WebSocket's handshake")

    async def _accept(self, message: Message) -> None:
        receiver: SocketReceiver | None = message.get(SOCKET_RECEIVER)
        headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
        accept = AcceptConnection(
            subprotocol=message.get("subprotocol"),
            extra_headers=headers,
            extensions=[] if self._deflate is None else [self._deflate],
        )
        data = self._writer.pack(accept)
        self.is_accepted = True
        here = asyncio.get_running_loop()
        loop = here if receiver is None else receiver.loop
        left = self.stream.leave_for(loop)
        if loop is here or left is not None:
            self._receiver = receiver
            if receiver is not None:
                receiver.expect_socket()
        if left is None:
            flushed = self._writer.write(data)
            self._begin(b"")
            if self._receiver is not None:
                self._receiver.take_socket(_open_socket(self))
            await self._writer.flush(flushed)
            return
        self._arriving, unread = left
        if receiver is None or loop is here:
            await self._arrive(data, unread)
        else:
            self._callbacks.moves(receiver)
            # The future that it awaits keeps a reference to the task, which ends with the loop at the latest.
            receiver.post(lambda: loop.create_task(self._arrive(data, unread)))

    # ---- after a move, on the new loop

    async def _arrive(self, data: bytes, unread: bytes) -> None:
        """Open the connection on the running loop, and accept the handshake with ``data``."""
        sock, receiver = self._arriving, self._receiver
        assert sock is not None
        try:
            stream = await open_stream(sock)
        except BaseException as error:
            sock.close()
            self._arriving = None
            self._on_lost()
            if not isinstance(error, OSError):
                raise
        else:
            self._writer.stream = stream
            self._arriving = None
            stream.set_close_callback(self._on_lost)
            with suppress(ConnectionResetError):
                self._writer.write(data)
                self._begin(unread)
        late, self._late = self._late, []
        for call in late:
            call()
        if receiver is not None:
            receiver.take_socket(_open_socket(self))
            if self.is_gone:
                receiver.drop_socket(_open_socket(self))

    def _begin(self, unread: bytes) -> None:
        self._reader.start(self.stream, self._limits.loop_work.current(), unread)
        self._arm_ping()
        if self._is_going_away:
            self.go_away()

    # ---- the client's side

    def _parse(self, data: bytes) -> Iterator[int]:
        """Process received data, up to the client's last frame; yield the cost of each step."""
        self._protocol.receive_data(data)
        for event in self._protocol.events():
            if isinstance(event, (TextMessage, BytesMessage)):
                yield from self._assembler.take(event)
            elif self._take(event):
                yield STEP_BYTES
            else:
                return

    def _take(self, event: Event) -> bool:
        """Process an event other than a message; return False if it is the last one."""
        if isinstance(event, Ping):
            # Otherwise pongs would accumulate if a client sends pings and does not read.
            self._pongs = self._pongs + 1 if self.stream.writing() else 0
            if self._pongs <= MAX_PONGS:
                self._writer.post(event.response())
            elif self._pongs == MAX_PONGS + 1:
                self._limits.hit(WEBSOCKET_PONGS)
        elif isinstance(event, CloseConnection):
            if self._protocol.state is ConnectionState.REMOTE_CLOSING:
                self._writer.post(event.response())
            elif self._protocol.state is ConnectionState.OPEN:
                self._writer.post(event)  # an invalid frame: wsproto has set the close code
            self._disconnect(int(event.code), event.reason or "")
            self.is_closing = True
            self._reader.stop()
            self._writer.end()
            return False
        return True

    def _arm_ping(self) -> None:
        if not self.is_gone:
            self._ping_timer = asyncio.get_running_loop().call_later(PING_S, self._ping)

    def _ping(self) -> None:
        if self.is_gone or self.is_closing:
            return
        # A client that reads, even slowly, is alive.
        written_bytes = self.stream.sent_bytes
        is_reading = self._sent_bytes_at_ping is not None and written_bytes > self._sent_bytes_at_ping
        if not self._reader.has_received and not is_reading and not self.inbox.is_full:
            self._limits.hit(WEBSOCKET_SILENCE)
            self.close(1011, "no data or pong was received in time")
            return
        self._reader.has_received = False
        self._sent_bytes_at_ping = written_bytes if self.stream.writing() else None
        self._writer.post(Ping())
        self._arm_ping()

    def _on_lost(self) -> None:
        """Record that the connection is lost; idempotent."""
        self.is_gone = True
        self._reader.stop()
        self._disconnect(1006, "")
        self._notify_closed()

    def _disconnect(self, code: int, reason: str) -> None:
        if self.inbox.disconnect is None:
            self.inbox.end({"type": "websocket.disconnect", "code": code, "reason": reason})
            self._callbacks.disconnected()

    def _notify_closed(self) -> None:
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        receiver, self._receiver = self._receiver, None  # it refers to this object
        if receiver is not None:
            receiver.drop_socket(_open_socket(self))
        self._callbacks.closed()

    # ---- called by the session through `call`, on the connection's loop

    def call(self, function: Callable[[], None]) -> None:
        """Call a method of this connection, once it has arrived on its loop."""
        if self._arriving is None:
            function()
        else:
            self._late.append(function)

    def go_away(self) -> None:
        """Close the connection with code 1001 once it is open. Idempotent."""
        self._is_going_away = True
        self.close(*GOING_AWAY)

    def fail(self) -> None:
        """Report to the client that the application has failed, unless the WebSocket has ended."""
        if self.is_accepted:
            self.close(1011, "internal error")
        elif not self.is_closing and not self.is_gone:
            with suppress(OSError):  # the client has disconnected
                self._deny({"status": 500, "headers": ()}, b"Internal Server Error", more_body=False)

    def end(self) -> None:
        """Record that the application has returned."""
        if self.is_accepted:
            self.close(1000, "")
        elif not self.is_closing and not self.is_gone:
            log.error("The application of a WebSocket ended without answering the handshake")
            self.fail()

    def finish(self) -> None:
        """End the connection after the application has ended; the client may have to answer a close first."""
        if self.stream.closed():
            self._notify_closed()
            return
        if not self._reader.is_open:
            self._writer.end()

    def abort(self) -> None:
        """End the connection at once, with code 1001 if it is open and this can be sent without waiting."""
        self.go_away()
        self._on_lost()
        self.stream.close()

    def cut(self, code: int) -> None:
        """End the connection from any thread, with a code if this can be sent without waiting."""
        sock, stream = self._arriving, self.stream
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        else:
            stream.cut(b"" if self.is_closing else b"\x88\x02" + code.to_bytes(2, "big"))

    def close(self, code: int, reason: str) -> None:
        """Begin to close an open connection, and notify the application. Idempotent."""
        if self.is_gone or self.is_closing or not self.is_accepted:
            return
        self._writer.post(CloseConnection(code=code, reason=reason[:120]))  # raises if the code is invalid
        self.is_closing = True
        self._disconnect(code, reason)

    def _deny(self, start: Any, body: bytes, *, more_body: bool) -> asyncio.Future[None]:
        if not self.is_closing:
            headers = [(bytes(name), bytes(value)) for name, value in start.get("headers", ())]
            if not any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in headers):
                headers.append((b"connection", b"close"))  # the body ends with the connection
            data = self._writer.pack(
                RejectConnection(status_code=start["status"], headers=headers, has_body=True)
            )
            self.is_closing = True
            self._writer.write(data)
        flushed = self._writer.write(self._writer.pack(RejectData(data=body, body_finished=not more_body)))
        if not more_body:
            self._writer.end()
        return flushed


def _open_socket(connection: WebSocketConnection) -> OpenSocket:
    # All results for one connection are equal. It keeps none, to avoid a reference cycle.
    return OpenSocket(connection.receive, connection.send, connection.go_away, connection.abort)
