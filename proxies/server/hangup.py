"""Detects clients that disconnect behind data that is not read yet.

While a request is answered, nothing is read from its connection. If the client has sent more data, the end of
the connection comes after it, so that no read reports it and the application keeps working without a client.
The operating system knows: it is asked once a second, and only about such connections.
"""

from __future__ import annotations

import asyncio
import select

from daskserve.proxies.exchange.carrier import Carrier, Connection
from daskserve.proxies.exchange.websocket import WebSocketSession

#: How often the operating system is asked.
PERIOD_S = 1.0


class HangupWatch:
    """Cancels the requests of clients that have disconnected, with one timer for a server."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer. Does nothing where the operating system has no ``POLLRDHUP``, as outside Linux."""
        if hasattr(select, "POLLRDHUP"):
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._check)

    def stop(self) -> None:
        """Stop the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self.start()
        unread: dict[int, Connection | WebSocketSession] = {}
        holders: list[Connection | WebSocketSession] = [*self._carrier.connections, *self._carrier.sockets]
        for holder in holders:
            asked = holder.exchange if isinstance(holder, Connection) else holder
            stream = asked.unread if asked is not None else None
            if stream is not None and not stream.closed():
                unread[stream.socket.fileno()] = holder
        poll = select.poll()
        for number in unread:
            poll.register(number, select.POLLRDHUP)
        for number, _ in poll.poll(0):
            unread[number].close()
