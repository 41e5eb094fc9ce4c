"""Tornado as the server of an ASGI application: its sockets, streams and header parser, not ``tornado.web``.

Connections are in `daskserve.proxies.server.tornado_connection`, the lifecycle of the server is in
`daskserve.proxies.server.life`.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from daskserve.loops.tasks import TaskSet
from daskserve.proxies.exchange.server_state import ServerState
from daskserve.proxies.server.life import HTTPServer, ServerListener
from daskserve.proxies.server.tornado_connection import RequestStream, TLSRequestStream, TornadoConnection

log = logging.getLogger("daskserve.proxies")


class TornadoServer(HTTPServer):
    """Carries the application on Tornado."""

    def _make_listener(self, server_state: ServerState) -> ServerListener:
        return _TornadoListener(server_state)


class _TornadoListener:
    """Sets up connections, which Tornado's streams read."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state
        self._serving = TaskSet(log)

    def take(self, sock: socket.socket, made: Callable[[], object]) -> None:
        tls = self._server_state.tls
        try:
            if tls is None:
                stream = RequestStream(sock)
            else:
                stream = TLSRequestStream(
                    tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                )
        except OSError as error:
            log.debug("A client disconnected before its connection was set up: %r", error)
            sock.close()
            return
        self._serving.spawn(TornadoConnection(self._server_state, stream).serve())

    async def wait_made(self) -> None:
        """Return: connections are set up when they are accepted."""

    async def wait_closed(self) -> None:
        await self._serving.wait()
