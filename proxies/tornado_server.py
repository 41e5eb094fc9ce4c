"""Tornado as the server of an ASGI application.

``HTTP1ServerConnection`` with delegates of our own, without `tornado.web`: 1.7 times the requests per core.
What happens to one request is in `daskserve.proxies.exchange`; here is the life of the server, in order:
`TornadoServer.bind`, `start`, `drain`, `stop`.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import socket
import ssl
import sys
from typing import Any

from tornado import httputil
from tornado.http1connection import HTTP1Connection, HTTP1ConnectionParameters, HTTP1ServerConnection
from tornado.iostream import IOStream
from tornado.tcpserver import TCPServer

from daskserve.clock import Clock, LoopClock
from daskserve.proxies.asgi import ASGIApp
from daskserve.proxies.exchange import Carrier, Exchange, Link, cancel_once
from daskserve.proxies.hangup import HangupWatch
from daskserve.proxies.http1_connection import IngressConnection
from daskserve.proxies.listen import bind_sockets

log = logging.getLogger("daskserve.proxies")

#: A request line with headers longer than this ends the connection.
MAX_HEADER_BYTES = 64 * 1024
#: While draining, how long a kept connection may stay silent before it counts as one nobody needs.
_QUIET_S = 0.1
#: How long cancelled requests may take to clean up.
_CANCEL_S = 5.0

_WILDCARDS = frozenset(("", "0.0.0.0", "::", "[::]"))


class TornadoServer:
    """Carries an ASGI application over HTTP/1.1 on the running event loop.

    Parameters
    ----------
    app : ASGI application
        Gets ``http`` scopes. Cancelled when its client goes away.
    host, port
        Where to listen: a name, an IPv4 or an IPv6 address; port 0 takes a free one.
    reuse_port : bool
        Let further servers of this user listen on the same port.
    claims_port : bool
        Whether a port that is shared already counts as taken; False for the second and later servers of one
        instance on a host.
    max_body_bytes : int
        A larger request body is answered with 413.
    max_message_bytes : int
        A WebSocket whose client sends a larger message is closed with code 1009.
    keep_alive_timeout_s : float
        Close a connection on which for so long no request came in, or nothing more of one that is not whole
        while nothing was answered either.
    public_host : str
        Stands in `urls` for a host that means every address, such as ``0.0.0.0``.
    tls : ssl.SSLContext, optional
        Speak HTTPS, with this certificate.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        reuse_port: bool = False,
        claims_port: bool = True,
        max_body_bytes: int = 1 << 30,
        max_message_bytes: int = 16 << 20,
        keep_alive_timeout_s: float = 90.0,
        public_host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._reuse_port = reuse_port
        self._claims_port = claims_port
        self._public_host = public_host
        self._clock: Clock = clock or LoopClock()
        self._carrier = Carrier(
            app,
            max_body_bytes=max_body_bytes,
            max_message_bytes=max_message_bytes,
            idle_timeout_s=keep_alive_timeout_s,
            clock=self._clock,
            tls=tls,
        )
        self._hangups = HangupWatch(self._carrier)
        self._sockets: list[socket.socket] = []
        self._listener: _Listener | None = None

    @property
    def port(self) -> int:
        """The port; the real one once `bind` has found a free one."""
        return self._port

    @property
    def urls(self) -> tuple[str, ...]:
        """Where clients reach the server."""
        host = self._public_host if self._host in _WILDCARDS else self._host
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        scheme = "http" if self._carrier.tls is None else "https"
        return (f"{scheme}://{host}:{self._port}",)

    def bind(self) -> None:
        """Take the port.

        Raises
        ------
        PortInUseError
            Something listens there.
        BadRequestError, InstanceError
            The host is not one of this machine's, or the operating system refuses.
        """
        self._sockets = bind_sockets(
            self._host, self._port, reuse_port=self._reuse_port, claims_port=self._claims_port
        )
        self._port = self._sockets[0].getsockname()[1]

    def start(self) -> None:
        """Begin to accept connections."""
        self._listener = _Listener(self._carrier)
        self._listener.add_sockets(self._sockets)
        self._hangups.start()
        log.info("Listening on %s", self.urls[0])

    async def drain(self, grace_s: float) -> None:
        """Accept nothing new and let what runs finish, for up to ``grace_s``.

        Responses now end their connections. Connections still in the backlog are accepted first, because
        closing the socket would reset them.
        """
        self._carrier.is_draining = True
        deadline = self._clock.now() + grace_s
        if self._listener is not None:
            while self._clock.now() < deadline and _has_backlog(self._sockets):
                await self._clock.sleep(0)
        self._close_sockets()
        for session in list(self._carrier.sockets):
            session.leave()
        while (left_s := deadline - self._clock.now()) > 0 and (self._carrier.links or self._carrier.sockets):
            if self._carrier.tasks:
                await asyncio.wait(self._carrier.tasks, timeout=left_s)
            else:
                # A client may be about to use its connection once more.
                await self._clock.sleep(min(left_s, _QUIET_S))
                if not self._carrier.tasks:
                    break

    async def stop(self) -> None:
        """End everything at once: listeners, requests, connections. Idempotent."""
        self._carrier.is_draining = True
        self._close_sockets()
        self._carrier.watch.stop()
        self._hangups.stop()
        tasks = set(self._carrier.tasks)
        for link in list(self._carrier.links):
            link.close()
        for session in list(self._carrier.sockets):
            session.close()
        for task in tasks:
            cancel_once(task)
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_CANCEL_S)
            if stuck:
                log.warning(
                    "%d requests did not end within %g s of their cancellation", len(stuck), _CANCEL_S
                )
        if self._listener is not None:
            await self._listener.wait_closed()

    def __repr__(self) -> str:
        carrier = self._carrier
        state = "draining" if carrier.is_draining else "open"
        return (
            f"<TornadoServer {self.urls[0]} {state}, {len(carrier.links)} links, {len(carrier.tasks)} tasks>"
        )

    def _close_sockets(self) -> None:
        if self._listener is not None:
            self._listener.stop()
        for sock in self._sockets:
            sock.close()  # a second time does no harm
        self._sockets = []


class _Listener(TCPServer):
    """Makes a `Link` of each accepted socket, and an `Exchange` of each request on it."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(ssl_options=carrier.tls)
        self._carrier = carrier
        self._delegate = _ConnectionDelegate(carrier)
        # Bodies are limited by the exchange, and times by the watch: Tornado's own limits answer 400, and
        # cost a timer per request.
        self._params = HTTP1ConnectionParameters(
            max_header_size=MAX_HEADER_BYTES, max_body_size=sys.maxsize, header_timeout=None
        )

    def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        link = Link(stream)
        self._carrier.links.add(link)
        connection = IngressConnection(stream, self._params, link, self._carrier.clock)
        self._delegate.connections.add(connection)
        connection.start_serving(self._delegate)

    async def wait_closed(self) -> None:
        """Close all connections and wait for Tornado's loops over them."""
        await asyncio.gather(*[connection.close() for connection in self._delegate.connections])


class _ConnectionDelegate(httputil.HTTPServerConnectionDelegate):
    """Follows the connections: each has its `Link` as Tornado's context."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self.connections: set[HTTP1ServerConnection] = set()

    def start_request(self, server_conn: object, request_conn: httputil.HTTPConnection) -> Exchange:
        assert isinstance(request_conn, HTTP1Connection)
        link = request_conn.context
        assert isinstance(link, Link)
        return Exchange(self._carrier, link, request_conn)

    def on_close(self, server_conn: object) -> None:
        assert isinstance(server_conn, HTTP1ServerConnection)
        link = server_conn.context
        assert isinstance(link, Link)
        self.connections.discard(server_conn)
        self._carrier.links.discard(link)
        self._carrier.watch.unwatch(link)
        link.exchange = None


def _has_backlog(sockets: list[socket.socket]) -> bool:
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(0))
