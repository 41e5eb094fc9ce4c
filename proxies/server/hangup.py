"""Detects clients that disconnect while they wait for a response.

While a request is answered, the end of the client's data does not mean that the client has left: it may have
shut down its side of the connection only (half-closed), and wait for the response. Or nothing is read from
the connection, because the client has sent more data, and the end comes after that. The operating system
knows both, and whether the connection was reset. It is asked twice a second, about connections that wait.

To tell clients that have left from those that wait, something is written to the connection: if the client
has left, its operating system resets the connection. See `Exchange.probe_client`.
"""

from __future__ import annotations

import asyncio
import select

from daskserve.proxies.exchange.carrier import Carrier, Connection, can_tell_hangups
from daskserve.proxies.exchange.websocket import WebSocketSession

#: How often the operating system is asked.
PERIOD_S = 0.5


class HangupWatch:
    """Cancels the requests of clients that have disconnected, with one timer for a server."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer. Does nothing where the operating system cannot tell."""
        if can_tell_hangups():
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
        for number, events in poll.poll(0):
            holder = unread[number]
            is_reset = bool(events & (select.POLLERR | select.POLLHUP))
            if isinstance(holder, Connection) and holder.exchange is not None and not is_reset:
                holder.exchange.probe_client()
            else:
                holder.close()
