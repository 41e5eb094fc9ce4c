"""Takes the connections that a proxy gives to this process.

For the messages, see `daskserve.data.replica.process.given_connections`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from daskserve.common.clock import Clock
from daskserve.loops.at_fork import call_in_forks
from daskserve.loops.connection_table import (
    EVICT,
    GIVE_BACK,
    SLOT_NUMBER,
    MovedConnection,
    map_table,
    receive_message,
)
from daskserve.loops.forks import redirect
from daskserve.proxies.exchange.http_connection import HTTPConnection, give_back_idle
from daskserve.proxies.exchange.taken_connection import TakenConnection

#: Maximum number of messages that are read in one iteration of the event loop.
_AT_ONCE = 128
#: The pause before messages that the proxy did not take are sent again.
_AGAIN_S = 0.01
#: How long a receiver that closes waits for the proxy to take its last messages.
FLUSH_S = 1.0


class ConnectionReceiver:
    """Takes connections on the running event loop, from `start` until `stop`.

    Parameters
    ----------
    files : sequence of int
        The descriptors from the proxy: this end of the socket pair, and the memory of the table. The receiver
        uses copies of them.
    serve : callable
        Serves a connection, and returns the object that reads its requests.
    evict : callable
        Closes the connection that has been idle longest.
    """

    def __init__(
        self,
        files: Sequence[int],
        serve: Callable[[MovedConnection, TakenConnection], HTTPConnection],
        evict: Callable[[], object],
        clock: Clock,
    ) -> None:
        pair, memory = files
        self._memory = map_table(memory)
        self._pair = socket.socket(fileno=os.dup(pair))
        self._pair.setblocking(False)
        self._serve, self._evict = serve, evict
        self._clock = clock
        self._connections: dict[int, HTTPConnection] = {}
        self._unsent: deque[int] = deque()
        self._is_reading = False

    def start(self) -> None:
        """Start taking connections."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pair, self._read)
        self._is_reading = True
        call_in_forks(self._forked)

    def stop(self) -> None:
        """Take no more connections. Idempotent."""
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._pair)

    async def close(self) -> None:
        """Close the pair once the proxy has the messages, or after `FLUSH_S`. Idempotent."""
        self.stop()
        ends_at = self._clock.now() + FLUSH_S
        while self._unsent and self._clock.now() < ends_at:
            await self._clock.sleep(_AGAIN_S)
        self._pair.close()

    def _forked(self) -> None:
        """In a forked process, replace the copies of the connections, which would keep them open."""
        # Its `daskserve.loops.forks.ForkGuard` knows only connections to ports that this process has bound.
        redirect([each.stream.socket.fileno() for each in self._connections.values() if each.is_made])

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                message = receive_message(self._pair)
            except BlockingIOError:
                return
            except OSError:
                message = None
            if message is None:  # the proxy has ended
                self.stop()
                return
            slot, files = message
            if slot == EVICT:
                self._evict()
            elif slot & GIVE_BACK:
                self._give_back(slot & ~GIVE_BACK)
            else:
                self._take(slot, files)

    def _take(self, slot: int, files: list[int]) -> None:
        if not files:  # this process has no file descriptors left
            self._notify(slot | GIVE_BACK)
            return
        sock = socket.socket(fileno=files[0])
        sock.setblocking(False)
        taken = TakenConnection(self._memory, slot, sock, self._notify)
        connection = self._serve(MovedConnection(sock), taken)
        if not taken.has_ended:
            self._connections[slot] = connection

    def _give_back(self, slot: int) -> None:
        connection = self._connections.get(slot)
        if connection is not None and connection.taken is not None:
            connection.taken.is_asked_back = True
            give_back_idle(connection)

    def _notify(self, message: int) -> None:
        """Tell the proxy about the end of a connection."""
        self._connections.pop(message & ~GIVE_BACK, None)
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._send()

    def _send(self) -> None:
        while self._unsent:
            try:
                self._pair.send(SLOT_NUMBER.pack(self._unsent[0]))
            except (BlockingIOError, InterruptedError):
                self._loop.call_later(_AGAIN_S, self._send)
                return
            except OSError:  # the proxy has ended
                self._unsent.clear()
                return
            self._unsent.popleft()
