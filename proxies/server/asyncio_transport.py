"""Connections on the transports of the running event loop: asyncio's, or uvloop's if it is installed.

The event loop's ``create_server`` is not used: when asyncio's server is closed, it drops connections that are
being set up, and neither asyncio's nor uvloop's reports when all connections have ended.
"""

from __future__ import annotations

import asyncio
import socket

from daskserve.proxies.exchange.http_connection import HTTPConnection
from daskserve.proxies.exchange.limits.limits import IDLE


async def connect(connection: HTTPConnection, sock: socket.socket) -> None:
    """Set up an accepted connection; raise `OSError` if it is lost."""
    server_state = connection.server_state
    connection.can_fill = server_state.tls is None
    try:
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: connection,
            sock,
            ssl=server_state.tls,
            ssl_handshake_timeout=None if server_state.tls is None else server_state.idle_timeout_s,
        )
    except ConnectionAbortedError:  # the handshake took too long
        server_state.limits.hit(IDLE)
        raise
