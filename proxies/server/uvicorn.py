"""uvicorn as the server of an ASGI application, on the event loop that runs already.

Connections are in `daskserve.proxies.server.uvicorn_connection`, the lifecycle of the server is in
`daskserve.proxies.server.life`. ``uvicorn.Server`` is not used: it handles signals and ends the event loop.
The event loop's own server is not used either: asyncio's drops connections that are being set up when it is
closed, and neither asyncio's nor uvloop's reports when all have ended.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from contextlib import suppress

from daskserve.amounts import shown
from daskserve.loops.tasks import TaskSet
from daskserve.proxies.exchange.carrier import Carrier
from daskserve.proxies.server.life import HTTPServer, ServerListener
from daskserve.proxies.server.uvicorn_connection import SharedState, UvicornConnection

log = logging.getLogger("daskserve.proxies")

#: How many connections are accepted in one turn of the event loop.
_ACCEPT_AT_ONCE = 128
#: The pause in accepting when the process has run out of file descriptors or memory.
_EXHAUSTED_S = 1.0
#: How long a server that closes its port waits for TLS handshakes.
_HANDSHAKES_S = 0.5
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class UvicornServer(HTTPServer):
    """Carries the application on uvicorn's protocol classes."""

    def _make_listener(self, carrier: Carrier) -> ServerListener:
        return _UvicornListener(carrier)


class _UvicornListener:
    """Accepts connections, which uvicorn's protocol reads."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._setups = TaskSet(log)
        self._pauses: set[asyncio.TimerHandle] = set()
        self._state = SharedState(carrier)

    def start(self, sockets: list[socket.socket]) -> None:
        self._sockets = list(sockets)
        for sock in sockets:
            self._loop.add_reader(sock, self._accept, sock)

    def stop(self) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock)
        for pause in self._pauses:
            pause.cancel()
        self._sockets = []
        self._pauses = set()

    def accept_last(self, listening: socket.socket) -> None:
        with suppress(OSError):  # nothing waits any more, or the process has run out of descriptors
            while True:
                self._take(listening.accept()[0])

    async def wait_made(self) -> None:
        # The duration of a TLS handshake is up to the client.
        await self._setups.wait(None if self._carrier.tls is None else _HANDSHAKES_S)

    async def wait_closed(self) -> None:
        self._setups.cancel()
        await self._setups.wait()
        while self._state.open_streams:
            await self._carrier.clock.sleep(0)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock, _address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.error("Accepting no connections for %s s: %s", shown(_EXHAUSTED_S), error)
                self._pause(listener)
                return
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._setups.spawn(self._set_up(sock))

    async def _set_up(self, sock: socket.socket) -> None:
        carrier = self._carrier
        timeout_s = None if carrier.tls is None else carrier.idle_timeout_s
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, sock, ssl=carrier.tls, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:
            log.debug("A client disconnected before its connection was set up: %r", error)
            sock.close()

    def _pause(self, listener: socket.socket) -> None:
        self._loop.remove_reader(listener)

        def go_on() -> None:
            self._pauses.discard(pause)
            self._loop.add_reader(listener, self._accept, listener)

        pause = self._loop.call_later(_EXHAUSTED_S, go_on)
        self._pauses.add(pause)

    def _make_protocol(self) -> UvicornConnection:
        return UvicornConnection(self._state)
