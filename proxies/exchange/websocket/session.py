"""A WebSocket session between a client and the ASGI application.

When a request is the handshake of a WebSocket (RFC 6455), the server hands over the connection. From then on,
a `WebSocketConnection` sends and receives the messages, and the `WebSocketSession` runs the application. A
session ends in one of these ways:

1. The application closes it: the application's code, or 403 if it has not accepted the handshake.
2. The application answers the handshake with an HTTP response, for example a 404 of the ingress.
3. The application returns: 1000. It fails: 500 before it has accepted the handshake, 1011 afterwards.
4. The client closes it or disconnects: the application receives the disconnect, and is cancelled after
   `DISCONNECT_GRACE_S`.
5. The client violates the protocol (1002, 1007), sends a message that is too large (1009), exceeds the limits
   of decompression (1009, 1008) or the memory budget (1013); the rest is as in case 4.
6. The client sends nothing, not even pongs: 1011; the rest is as in case 4.
7. The server drains: 1001; the rest is as in case 4.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import TypeAlias

from wsproto import ConnectionType, WSConnection
from wsproto.events import RejectConnection, Request
from wsproto.utilities import RemoteProtocolError

from daskserve.common.clock import Clock
from daskserve.common.types import SocketReceiver
from daskserve.loops.thread_calls import ThreadCalls
from daskserve.payload.packed_errors import is_logged
from daskserve.proxies.asgi import ASGIApp, Headers, Scope
from daskserve.proxies.exchange.limits.limits import WEBSOCKET_CLOSE, WEBSOCKET_END, WEBSOCKET_OFFERS, Limits
from daskserve.proxies.exchange.stream import Stream
from daskserve.proxies.exchange.websocket.connection import WebSocketCallbacks, WebSocketConnection

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
#: Maximum number of offers and parameters of a handshake; wsproto takes 10 ms for as many as fit into a head.
MAX_ELEMENTS = 256
_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")

#: How long an application may run after its client has disconnected, before it is cancelled.
DISCONNECT_GRACE_S = 5.0
#: Time for a client to answer a close; user code that blocks its loop may delay a close by the same time.
CLOSE_TIMEOUT_S = 2.0


class BadHandshakeError(ValueError):
    """A request is not a valid handshake; the error contains the response."""

    def __init__(self, message: str, status: int = 400, headers: Headers = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


def _read_handshake(protocol: WSConnection, headers: Headers, limits: Limits) -> list[str]:
    """Check a handshake with wsproto; return the subprotocols that the client offers."""
    # Pass only the headers it needs: it requires ASCII or IDNA in paths and hosts, where HTTP allows other
    # bytes.
    offered = [header for header in headers if header[0] in _HANDSHAKE_HEADERS]
    keys = [value for name, value in offered if name == b"sec-websocket-key"]
    if sum(value.count(b",") + value.count(b";") + 1 for _, value in offered) > MAX_ELEMENTS:
        limits.hit(WEBSOCKET_OFFERS)
        raise BadHandshakeError(
            f"A WebSocket handshake may have {MAX_ELEMENTS} offers and parameters; this one has more."
        )
    for name, value in offered:
        if name == b"sec-websocket-version" and value != b"13":
            raise BadHandshakeError(
                f"Sec-WebSocket-Version is {value.decode('latin-1')!r}; this server supports version 13.",
                426,
                ((name, b"13"),),
            )
    try:
        protocol.initiate_upgrade_connection([(b"host", b"here"), *offered], "/")
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
    """Runs the application of one WebSocket. It stays on the server's loop even if its connection moves.

    Parameters
    ----------
    scope : mapping
        The ASGI scope of type ``websocket``.
    max_message_bytes : int
        Maximum size of a message; a larger one closes the connection with code 1009.
    deflates_messages : bool
        Whether to compress messages if the client offers it.
    limits : Limits
        The limits of the server, with the budget of received messages.
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
        deflates_messages: bool,
        limits: Limits,
    ) -> None:
        self._limits = limits
        protocol = WSConnection(ConnectionType.SERVER)
        scope["subprotocols"] = _read_handshake(protocol, scope["headers"], limits)
        self._app = app
        self._scope = scope
        self._on_end: OnEnd | None = on_end
        self.connection = WebSocketConnection(
            stream,
            protocol,
            WebSocketCallbacks(self._note_move, self._note_disconnect, self._note_close),
            max_message_bytes=max_message_bytes,
            deflates_messages=deflates_messages,
            clock=clock,
            limits=limits,
        )
        #: After the connection has moved: its loop, and how it calls this object.
        self._receiver: SocketReceiver | None = None
        self._thread_calls: ThreadCalls | None = None
        self._is_closed = False
        self._code = 1001
        self._task: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []

    def __repr__(self) -> str:
        return f"<WebSocketSession {self._scope['path']} {self.connection!r}>"

    @property
    def unread(self) -> Stream | None:
        """The stream, if it is not being read because the handshake is not accepted; otherwise None."""
        connection = self.connection
        return None if connection.is_accepted or connection.is_gone else connection.stream

    def start(self) -> asyncio.Task[None]:
        """Start the application, and return its task."""
        self.connection.start()
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    def go_away(self) -> None:
        """Close the connection with code 1001 once it is open. Idempotent."""
        self._call(self.connection.go_away)

    def close(self) -> None:
        """End the connection at once, with code 1001 if it is open and this can be sent without waiting."""
        self._call(self.connection.abort)

    def _call(self, function: Callable[[], None]) -> None:
        """Call a method of the connection on its loop."""
        if self._receiver is None:
            self.connection.call(function)
        else:
            self._receiver.post(self.connection.call, function)

    # ---- called by the connection, on its loop

    def _note_move(self, receiver: SocketReceiver) -> None:
        """Record that the connection moves to another loop."""
        self._thread_calls = ThreadCalls(asyncio.get_running_loop())
        self._receiver = receiver

    def _note_disconnect(self) -> None:
        """Record that the application receives the disconnect, and limit its time to return."""
        self._note(self._limit_application)

    def _note_close(self) -> None:
        """Record that the connection is closed."""
        self._note(self._set_closed)

    def _note(self, function: Callable[[], None]) -> None:
        if self._thread_calls is None:
            function()
        else:
            self._thread_calls.post(function)

    # ---- on the server's loop

    def _limit_application(self) -> None:
        if self._task is not None:
            self._timers.append(asyncio.get_running_loop().call_later(DISCONNECT_GRACE_S, self._stop))

    def _stop(self) -> None:
        if self._task is not None:
            self._limits.hit(WEBSOCKET_END)
            self._task.cancel()

    def _set_closed(self) -> None:
        self._is_closed = True
        if self._task is None:
            self._end()

    async def _run(self) -> None:
        """Run the application; its errors are logged here."""
        connection = self.connection
        try:
            await self._app(self._scope, connection.receive, connection.send)
        except asyncio.CancelledError:
            self._call(connection.go_away)
            raise
        except Exception as error:
            if connection.is_gone or connection.is_closing:
                log.debug(
                    "The application of a WebSocket failed after its client had disconnected", exc_info=error
                )
            else:
                if not is_logged(error):
                    log.exception("WebSocket %s failed", self._scope["path"])
                self._code = 1011
                self._call(connection.fail)
        else:
            self._code = 1000
            self._call(connection.end)
        finally:
            self._finish()

    def _finish(self) -> None:
        """End the connection; the client has a limited time to read the rest and to answer the close."""
        self._task = None
        self._call(self.connection.inbox.release)
        self._stop_timers()
        if self._is_closed:
            self._end()
        else:
            self._timers = [asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._cut)]
            self._call(self.connection.finish)

    def _cut(self) -> None:
        self._limits.hit(WEBSOCKET_CLOSE)
        if self._receiver is None:
            self.connection.stream.close()
        else:
            self.connection.cut(self._code)
            self._end()  # the connection's loop may be blocked

    def _end(self) -> None:
        self._stop_timers()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []
