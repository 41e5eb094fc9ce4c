"""The lifecycle of an HTTP server: `HTTPServer.bind`, `start`, `drain` and `stop`.

Each accepted connection has a transport of Tornado or asyncio, and a
`daskserve.proxies.exchange.http_connection.HTTPConnection`, which reads its requests.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from daskserve.common.clock import Clock, LoopClock
from daskserve.common.formatting import shown
from daskserve.common.types import EVERY_ADDRESS
from daskserve.errors import PortInUseError
from daskserve.loops.connection_table import MovedConnection
from daskserve.proxies.asgi import ASGIApp
from daskserve.proxies.exchange.http_connection import HTTPConnection, give_back_idle
from daskserve.proxies.exchange.limits.limits import Limits
from daskserve.proxies.exchange.request.head import HeadLimits
from daskserve.proxies.exchange.server_state import NoteRefused, ServerState, TakerOf, no_taker
from daskserve.proxies.exchange.slow_clients import SlowClientWatch
from daskserve.proxies.server import asyncio_transport, tornado_transport
from daskserve.proxies.server.acceptor import (
    Acceptor,
    Connect,
    default_max_connections,
    descriptor_limit,
    is_readable,
)
from daskserve.proxies.server.disconnects import DisconnectWatch
from daskserve.proxies.server.listen import bind_sockets
from daskserve.proxies.server.receiver import ConnectionReceiver
from daskserve.telemetry.table import MetricSample

if TYPE_CHECKING:
    from daskserve.options.http import HTTPOptions

log = logging.getLogger("daskserve.proxies")

#: While draining, how long a connection may be silent before it counts as unused.
_QUIET_S = 0.1
#: While draining, the interval at which a pause in accepting is checked.
_PAUSED_S = 0.01
#: While draining, how many connections are given back in one iteration of the event loop.
_GIVE_AT_ONCE = 100
#: How long cancelled requests may take to end.
_CANCEL_S = 5.0


#: The transports, by their names in ``http_options``.
TRANSPORTS: Mapping[str, Connect] = {
    "tornado": tornado_transport.connect,
    "asyncio": asyncio_transport.connect,
}


class HTTPServer:
    """Serves an ASGI application over HTTP/1.1 on the running event loop.

    Parameters
    ----------
    app : ASGI application
        Receives ``http`` and ``websocket`` scopes. A call is cancelled when its client disconnects.
    options : HTTPOptions
        The address, and the limits of connections.
    reuse_port : bool
        Whether other servers of the same user may listen on the same port.
    claims_port : bool
        Whether to raise an error if other servers share the port. False for the second and later servers of
        an instance on a host.
    public_host : str
        The host in `urls` if the server listens on every address, as with ``0.0.0.0``.
    tls : ssl.SSLContext, optional
        The context for HTTPS.
    port_option : str
        The HTTP option that sets the port, for errors.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: HTTPOptions,
        *,
        reuse_port: bool = False,
        claims_port: bool = True,
        public_host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        clock: Clock | None = None,
        port_option: str = "port",
    ) -> None:
        assert options.host is not None  # without a host there are no proxies
        self._host = options.host
        self._port = options.port
        self._port_option = port_option
        self._reuse_port = reuse_port
        self._claims_port = claims_port
        self._public_host = public_host
        self._clock: Clock = clock or LoopClock()
        self.state = ServerState(
            app,
            head_limits=HeadLimits(options.max_header_bytes, options.max_headers),
            max_body_bytes=options.max_body_bytes,
            max_message_bytes=options.max_websocket_message_bytes,
            deflates_messages=options.websocket_compression,
            idle_timeout_s=options.keep_alive_timeout_s,
            clock=self._clock,
            tls=tls,
            limits=Limits(options),
        )
        self._disconnects = DisconnectWatch(self.state)
        self.max_connections = options.max_connections or default_max_connections(descriptor_limit())
        self._acceptor = Acceptor(self.state, self.max_connections, TRANSPORTS[options.server])
        self._slow_clients = SlowClientWatch(self.state)
        self._sockets: list[socket.socket] = []
        self._is_started = self._is_stopped = False
        self._taker_of: TakerOf = no_taker
        #: Takes connections in place of the acceptor; see `receive`.
        self._receiver: ConnectionReceiver | None = None

    @property
    def port(self) -> int:
        """The port; if it was 0, the actual one after `bind`."""
        return self._port

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the server."""
        host = self._public_host if self._host in EVERY_ADDRESS else self._host
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        scheme = "http" if self.state.tls is None else "https"
        return (f"{scheme}://{host}:{self._port}",)

    def samples(self, instance: str) -> list[MetricSample]:
        """Return the metrics of connections and limits, and of requests that the server itself has refused.

        Any thread may call this.
        """
        acceptor, limits, refusals = self._acceptor, self.state.limits, self.state.refusals
        causes, bodies = refusals.causes.copy(), refusals.bodies.copy()
        return [
            ("http_connections", (instance,), acceptor.open),
            ("http_evicted_connections", (instance,), acceptor.evicted),
            *(("http_accept_pauses", (instance, cause), count) for cause, count in acceptor.pauses.items()),
            *(("http_errors", (instance, "", "", cause), count) for cause, count in causes.items()),
            *(("http_requests", (instance, "", "", *found), count) for found, count in bodies.items()),
            *(("http_limited_requests", (instance, limit), count) for limit, count in limits.hits.items()),
            ("http_buffered_bytes", (instance, "received"), limits.received.used_bytes),
            ("http_buffered_bytes", (instance, "unsent"), limits.unsent.used_bytes),
        ]

    def set_callbacks(
        self, largest_body_bytes: Callable[[], float], is_crowded: Callable[[str], bool]
    ) -> None:
        """Set the functions that the server calls to query the routers.

        Parameters
        ----------
        largest_body_bytes : callable
            Returns the maximum size of a body for the endpoint that allows most.
        is_crowded : callable
            Returns whether requests of the endpoint of a path wait for a slot.
        """
        self.state.largest_body_bytes = largest_body_bytes
        self.state.is_crowded = is_crowded

    def on_refused(self, note: NoteRefused) -> None:
        """Call a function for each request that the server refuses in place of the application."""
        self.state.refusals.notify = note

    def give_to(
        self, taker_of: TakerOf, given: Callable[[], int] = int, evict_given: Callable[[], object] = int
    ) -> None:
        """Give connections to other processes, which serve them.

        Parameters
        ----------
        taker_of : callable
            Returns a function that gives a connection to a process that answers requests for a path, or for
            any if it is None; returns None if there is no such process.
        given : callable
            Returns how many connections other processes have.
        evict_given : callable
            Lets one of them close an idle connection.
        """
        self._taker_of = taker_of
        self._acceptor.given, self._acceptor.evict_given = given, evict_given

    def set_giving(self, is_giving: bool) -> None:
        """Set whether any process takes connections."""
        self._acceptor.taker = partial(self._taker_of, None) if is_giving else no_taker
        self.state.moves.taker_of = self._taker_of if is_giving else None

    def serve(self, moved: MovedConnection) -> None:
        """Serve a connection that another process has served, unless the server has stopped."""
        if self._is_stopped:
            moved.sock.close()
        else:
            self._acceptor.serve(moved)

    def receive(self, files: Sequence[int], is_elsewhere: Callable[[str], bool]) -> None:
        """Serve the connections that a proxy gives to this process; call this in place of `bind`.

        Parameters
        ----------
        files : sequence of int
            See `daskserve.proxies.server.receiver.ConnectionReceiver`.
        is_elsewhere : callable
            Returns whether another process has to answer requests for a path.
        """
        self.state.moves.is_elsewhere = is_elsewhere
        self._receiver = ConnectionReceiver(files, self._acceptor.serve, self._acceptor.evict, self._clock)

    async def bind(self, *, may_move: bool = False) -> None:
        """Bind the port; if another program uses it and the server ``may_move``, bind a free one.

        Raises
        ------
        PortInUseError
            Another program listens on the port.
        BadRequestError, InstanceError
            The host is not an address of this machine, or the operating system refuses.
        """
        bind = partial(
            bind_sockets,
            self._host,
            reuse_port=self._reuse_port,
            claims_port=self._claims_port,
            option=self._port_option,
        )
        try:
            self._sockets = await bind(self._port)
        except PortInUseError:
            if not may_move:
                raise
            self._sockets = await bind(0)
        self._port = self._sockets[0].getsockname()[1]

    def start(self) -> None:
        """Start accepting connections."""
        self._is_started = True
        self._disconnects.start()
        self._slow_clients.start()
        if self._receiver is not None:
            self._receiver.start()
            return
        self._acceptor.start(self._sockets)
        log.info("Listening on %s", self.urls[0])

    async def drain(self, grace_s: float, *, sends_away: bool = True, gives_back: bool = False) -> None:
        """Stop accepting connections, and wait up to ``grace_s`` for requests in flight.

        From now on, each response closes its connection. Connections in the backlog are accepted first,
        because closing the socket would reset them.

        Parameters
        ----------
        sends_away : bool
            Whether to close WebSockets, with code 1001.
        gives_back : bool
            Give connections back to the proxy instead of closing them, unless they have TLS.
        """
        gives_back = gives_back and self.state.tls is None
        self.state.moves.gives_back, self.state.is_draining = gives_back, not gives_back
        if self._receiver is not None:
            self._receiver.stop()
        deadline = self._clock.now() + grace_s
        if self._is_started and self._receiver is None:
            while self._clock.now() < deadline and is_readable(self._sockets):
                await self._clock.sleep(_PAUSED_S if self._acceptor.is_paused else 0)
        await self._close_sockets(accepts=True)
        for number, connection in enumerate(list(self.state.connections) if gives_back else ()):
            assert isinstance(connection, HTTPConnection)
            give_back_idle(connection)
            if number % _GIVE_AT_ONCE == _GIVE_AT_ONCE - 1:
                await self._clock.sleep(0)
        for session in list(self.state.sockets) if sends_away else ():
            session.go_away()
        while (left_s := deadline - self._clock.now()) > 0 and (self.state.connections or self.state.sockets):
            if self.state.tasks:
                await asyncio.wait(self.state.tasks, timeout=left_s)
            else:
                # A client may be about to send another request on its connection.
                await self._clock.sleep(min(left_s, _QUIET_S))
                if not self.state.tasks and not any(each.stream.writing() for each in self.state.connections):
                    break

    async def stop(self) -> None:
        """Stop listening, cancel all requests and close all connections. Idempotent."""
        self.state.is_draining = self._is_stopped = True
        await self._close_sockets()
        self.state.idle_watch.stop()
        self._disconnects.stop()
        self._slow_clients.stop()
        tasks = set(self.state.tasks)
        for connection in list(self.state.connections):
            connection.close()
        for session in list(self.state.sockets):
            session.close()
        for task in tasks:
            self.state.cancel(task)
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_CANCEL_S)
            if stuck:
                log.warning(
                    "%d requests did not end within %s s of their cancellation",
                    len(stuck),
                    shown(_CANCEL_S),
                )
        await self._acceptor.close()
        while self.state.streams:
            await self._clock.sleep(0)
        if self._receiver is not None:
            await self._receiver.close()

    def __repr__(self) -> str:
        server_state = self.state
        state = "draining" if server_state.is_draining else "open"
        return (
            f"<{type(self).__name__} {self.urls[0]} {state}, {len(server_state.connections)} connections, "
            f"{len(server_state.tasks)} tasks>"
        )

    async def _close_sockets(self, *, accepts: bool = False) -> None:
        self._acceptor.stop()
        for sock in self._sockets:
            if self._is_started and accepts:
                # Closing the socket resets connections that have arrived since the last check.
                self._acceptor.accept_last(sock)
            sock.close()  # idempotent
        self._sockets = []
        await self._acceptor.wait_set_up()
