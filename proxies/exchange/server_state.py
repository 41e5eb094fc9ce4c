"""The state that all requests of a server share, and the state of one connection."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from daskserve.common.clock import Clock
from daskserve.common.types import ALL_HTTP_METHODS
from daskserve.loops.connection_table import LostAttempt, MovedConnection
from daskserve.proxies.asgi import ASGI_VERSIONS, ASGIApp, Headers
from daskserve.proxies.exchange.limits.idle import IdleWatch
from daskserve.proxies.exchange.limits.limits import BODY_RATE, BODY_SIZE, BUFFERS, IDLE, Limits
from daskserve.proxies.exchange.request.body import RequestBody
from daskserve.proxies.exchange.request.head import MALFORMED, HeadLimits, check_host
from daskserve.proxies.exchange.response.head import DateHeader, HeadCache
from daskserve.proxies.exchange.stream import Stream, addresses_of
from daskserve.proxies.exchange.taken_connection import TakenConnection
from daskserve.proxies.exchange.websocket.session import WebSocketSession

#: The cause of a refused body, by the status of the response.
_CAUSES: Mapping[int, str] = {400: MALFORMED, 408: BODY_RATE, 413: BODY_SIZE, 503: BUFFERS}
#: Longer hosts are not kept, because idle connections would hold their memory.
_KEPT_HOST = 255


class OngoingRequest(Protocol):
    """The current request of a connection: a `daskserve.proxies.exchange.exchange.Exchange`."""

    @property
    def body(self) -> RequestBody:
        """The body."""

    @property
    def response_started(self) -> bool:
        """Whether a part of the response was written."""

    @property
    def response_complete(self) -> bool:
        """Whether the whole response was written."""

    @property
    def unread(self) -> Stream | None:
        """The stream, if it is not being read; otherwise None."""

    #: Whether the connection has gone on to the next request, or is closing.
    is_over: bool

    @property
    def wants_body(self) -> bool:
        """Whether the body is incomplete and still needed, and the client does not wait for 100 Continue."""

    def finish_response(self) -> None:
        """Record that the response is complete."""

    def refuse(self, status: int, text: str, headers: Headers = ()) -> None:
        """Respond in place of the application, and close the connection."""

    def probe_client(self, *, is_late: bool) -> None:
        """Write a few bytes to a client whose data has ended; this resets the connection if it has left."""

    def on_connection_close(self) -> None:
        """Cancel the request because its client has disconnected."""


#: The address of a client; None if it has none.
Client: TypeAlias = tuple[str, int] | None
NoteRefused: TypeAlias = Callable[[Client, str, str, str, int], object]


class Refusals:
    """Counts the requests that the server refuses in place of the application.

    Attributes
    ----------
    causes : Counter
        The number of refused requests, by cause.
    bodies : Counter
        The number of requests whose body was refused before the response began, by method and status.
    """

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()
        self.bodies: Counter[tuple[str, str]] = Counter()
        #: Called with the client, method, target, version and status of each refused request.
        self.notify: NoteRefused = lambda *refused: None

    def count_body(self, method: str, status: int, *, is_cut: bool) -> None:
        """Count a request that ends because of its body; ``is_cut`` says that its response had already
        begun."""
        self.causes[_CAUSES[status]] += 1
        if not is_cut:
            self.bodies[method if method in ALL_HTTP_METHODS else "OTHER", str(status)] += 1


class ServerState:
    """The state that all requests of one server share.

    Attributes
    ----------
    tasks : set
        The tasks of requests whose application is running.
    connections : set
        The open connections, except for those of WebSockets.
    sockets : set
        The open WebSockets.
    is_draining : bool
        Whether each response is the last on its connection.
    refusals : Refusals
        Counts the requests that the server has refused.
    limits : Limits
        The limits of clients and of memory.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        head_limits: HeadLimits,
        max_body_bytes: int,
        idle_timeout_s: float,
        clock: Clock,
        max_message_bytes: int,
        deflates_messages: bool,
        tls: ssl.SSLContext | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.app = app
        self.limits = Limits() if limits is None else limits
        self.tls = tls
        self.idle_timeout_s = idle_timeout_s
        self.head_limits = head_limits
        #: The arguments of each WebSocket.
        self.websocket_options: dict[str, Any] = {
            "max_message_bytes": max_message_bytes,
            "deflates_messages": deflates_messages,
        }
        self.tasks: set[asyncio.Task[None]] = set()
        self.connections: set[Connection] = set()
        #: The streams of connections and WebSockets, until they are closed.
        self.streams: set[Stream] = set()
        self.sockets: set[WebSocketSession] = set()
        self.is_draining = False
        self.refusals = Refusals()
        #: Called with a connection that stays open although the client's data has ended.
        self.on_eof: Callable[[Connection], object] = lambda connection: None
        #: Returns the maximum size of any body; the application may set a lower one for each.
        self.largest_body_bytes: Callable[[], float] = lambda: max_body_bytes
        #: Returns whether requests of the endpoint of a path wait for a slot.
        self.is_crowded: Callable[[str], bool] = lambda path: False
        self.moves = Moves()
        #: Refuses another body to make room for one that exceeds the budget; returns whether it did.
        self.make_room: Callable[[RequestBody], bool] = lambda body: False
        self.idle_watch = IdleWatch(idle_timeout_s, self._end_idle)
        self.clock = clock
        self.heads = HeadCache(DateHeader(clock))

    def _end_idle(self, connection: Connection) -> None:
        self.limits.hit(IDLE)
        connection.close()

    def add_task(self, task: asyncio.Task[None]) -> None:
        """Keep a task until it ends; `HTTPServer.stop` cancels it."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def cancel(self, task: asyncio.Task[None]) -> None:
        """Cancel a task, unless it is cleaning up after an earlier cancellation."""
        if not task.cancelling():
            task.cancel()
            # A task that is cancelled before its first step does not remove itself.
            task.add_done_callback(self.tasks.discard)


TakerOf: TypeAlias = Callable[[str | None], Callable[[MovedConnection], bool] | None]


def no_taker(path: str | None = None) -> None:
    """Return None: no other process accepts connections."""


@dataclass
class Moves:
    """When the connections of a server move to another process."""

    #: Returns whether another process has to answer requests for a path.
    is_elsewhere: Callable[[str], bool] = lambda path: False
    #: See `daskserve.proxies.server.server.HTTPServer.give_to`; None while no process takes connections.
    taker_of: TakerOf | None = None
    #: Whether connections without a request are given back to the proxy.
    gives_back: bool = False


class Connection(asyncio.Protocol):
    """One open connection: its stream, its addresses and its current request.

    A `daskserve.proxies.exchange.http_connection.HTTPConnection` reads the requests.
    """

    stream: Stream
    client: tuple[str, int] | None
    #: The scope that each request copies and fills in, which takes half as long as building one.
    scope: dict[str, Any]
    #: Set if a proxy has given the connection to this process.
    taken: TakenConnection | None = None
    #: Set if the request had begun at a replica whose process has ended.
    lost: LostAttempt | None = None
    #: Whether the connection must not move to another process.
    stays = False

    def __init__(self, server_state: ServerState) -> None:
        self.server_state = server_state
        self.exchange: OngoingRequest | None = None
        #: Whether a request's head is incomplete, or no request was received yet.
        self.awaits_head = True
        #: The path of the last request.
        self.path = ""
        #: The last valid host, because most clients never change it.
        self.host: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Add the connection to those of the server."""
        self.stream = stream = Stream(transport, self.server_state.streams)
        self.client, server = addresses_of(stream.socket)
        self.scope = {
            "type": "http",
            "asgi": ASGI_VERSIONS,
            "scheme": "http" if self.server_state.tls is None else "https",
            "root_path": "",
            "client": self.client,
            "server": server,
            **dict.fromkeys(("http_version", "method", "path", "raw_path", "query_string", "headers")),
        }
        self.server_state.connections.add(self)
        self.server_state.idle_watch.watch(self)

    def check_host(self, framing: Mapping[str, str], version: str) -> None:
        """Check the host of a request, and keep it; raise `RefusedRequestError` if it is not valid."""
        check_host(framing, version)
        host = framing.get("Host", "")
        self.host = host if len(host) <= _KEPT_HOST else None

    def is_idle(self) -> bool:
        """Return whether the connection has no request in progress and no unsent response."""
        return (self.exchange is None or self.exchange.is_over) and not self.stream.writing()

    def is_incomplete(self) -> bool:
        """Return whether the connection waits for the rest of a request's head."""
        return self.awaits_head and self.is_idle()

    def await_head(self) -> None:
        """Record that a part of a head was received. The timeout of a head begins with its first byte."""
        if not self.awaits_head:
            self.awaits_head = True
            self.server_state.idle_watch.watch(self)

    def finish(self, *, closes: bool) -> None:
        """Continue with the next request, unless this one ``closes`` the connection or is incomplete."""
        raise NotImplementedError

    def close_when_sent(self) -> None:
        """Close the connection once all written data is sent."""
        raise NotImplementedError

    def lingering_close(self) -> None:
        """End this side of the connection, and drop further data, until the client ends its side.

        Closing a socket with unread data resets the connection, and may destroy the response.
        """
        raise NotImplementedError

    def detach(self) -> None:
        """Stop reading, and hand the stream over to a WebSocket."""
        raise NotImplementedError

    def give_back(self) -> bool:
        """Let the proxy continue with the connection, and with the request that is about to begin, if any.

        Returns False if the connection cannot move.
        """
        raise NotImplementedError

    def note_answer(self, size_bytes: int) -> None:
        """Record that a response is written next: its size, or 0 if that is not known."""

    def close(self) -> None:
        """Close the connection, and cancel its request."""
        if self.exchange is not None:
            self.exchange.on_connection_close()
        self.stream.close()

    def __str__(self) -> str:
        return "{}:{}".format(*self.client) if self.client else "unknown client"
