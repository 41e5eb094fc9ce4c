"""Tornado as the server of an ASGI application.

``HTTP1ServerConnection`` with delegates of our own, without `tornado.web`: 1.7 times the requests per core.
What happens to one request is in `daskserve.proxies.exchange.exchange`, the life of the server in
`daskserve.proxies.server.life`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

from tornado import httputil
from tornado.http1connection import HTTP1Connection, HTTP1ConnectionParameters, HTTP1ServerConnection
from tornado.iostream import IOStream
from tornado.tcpserver import TCPServer

from daskserve.proxies.exchange.exchange import Exchange
from daskserve.proxies.exchange.request_head import MAX_HEADER_BYTES
from daskserve.proxies.server.carrier import Carrier, Link
from daskserve.proxies.server.life import HTTPServer, Listener
from daskserve.proxies.server.tornado_connection import IngressConnection, RequestStream


class TornadoServer(HTTPServer):
    """Carries the application on Tornado."""

    def _make_listener(self, carrier: Carrier) -> Listener:
        return _TornadoListener(carrier)


class _TornadoListener:
    """Accepts sockets and has Tornado read them."""

    def __init__(self, carrier: Carrier) -> None:
        self._server = _Server(carrier)

    def start(self, sockets: list[socket.socket]) -> None:
        self._server.add_sockets(sockets)

    def stop(self) -> None:
        self._server.stop()

    async def wait_made(self) -> None:
        """Return: Tornado makes a stream as soon as it accepts."""

    async def wait_closed(self) -> None:
        await self._server.wait_closed()


class _Server(TCPServer):
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

    def _handle_connection(self, connection: socket.socket, address: Any) -> None:
        if self.ssl_options is None:
            self.handle_stream(RequestStream(connection), address)
        else:
            super()._handle_connection(connection, address)

    def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        link = Link(stream, is_encrypted=self._carrier.tls is not None)
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
        self._carrier.watch.watch(link)
        return Exchange(self._carrier, link, request_conn)

    def on_close(self, server_conn: object) -> None:
        assert isinstance(server_conn, HTTP1ServerConnection)
        link = server_conn.context
        assert isinstance(link, Link)
        self.connections.discard(server_conn)
        self._carrier.links.discard(link)
        self._carrier.watch.unwatch(link)
        link.exchange = None
