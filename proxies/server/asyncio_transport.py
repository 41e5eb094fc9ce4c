"""Connections on the transports of the running event loop: asyncio's, or uvloop's where that is installed.

The event loop's own server is not used: asyncio's drops connections that are being set up when it is closed,
and neither asyncio's nor uvloop's reports when all have ended.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from daskserve.loops.tasks import TaskSet
from daskserve.proxies.exchange.http_connection import HTTPConnection
from daskserve.proxies.exchange.limits import IDLE
from daskserve.proxies.exchange.server_state import ServerState
from daskserve.proxies.exchange.stream import Stream

log = logging.getLogger("daskserve.proxies")

#: How long a server that closes its port waits for TLS handshakes.
_HANDSHAKES_S = 0.5


class AsyncioListener:
    """Sets up connections, which the event loop reads."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state
        self._loop = asyncio.get_running_loop()
        self._setups = TaskSet(log)
        self._open_streams: set[Stream] = set()

    def take(self, sock: socket.socket, made: Callable[[], object]) -> asyncio.Task[None]:
        return self._setups.spawn(self._set_up(sock, made))

    async def wait_made(self) -> None:
        # The duration of a TLS handshake is up to the client.
        await self._setups.wait(None if self._server_state.tls is None else _HANDSHAKES_S)

    async def wait_closed(self) -> None:
        self._setups.cancel()
        await self._setups.wait()
        while self._open_streams:
            await self._server_state.clock.sleep(0)

    async def _set_up(self, sock: socket.socket, made: Callable[[], object]) -> None:
        server_state = self._server_state
        timeout_s = None if server_state.tls is None else server_state.idle_timeout_s
        try:
            await self._loop.connect_accepted_socket(
                lambda: HTTPConnection(server_state, self._open_streams, made),
                sock,
                ssl=server_state.tls,
                ssl_handshake_timeout=timeout_s,
            )
        except OSError as error:
            if isinstance(error, ConnectionAbortedError):  # the handshake took too long
                server_state.limits.hit(IDLE)
            log.debug("A client disconnected before its connection was set up: %r", error)
            sock.close()
