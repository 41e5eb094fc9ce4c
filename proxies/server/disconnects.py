"""Detects clients that disconnect while they wait for a response.

While a request is being answered, the end of the client's data does not mean that the client has left: it may
have shut down only its side of the connection (half-closed), and wait for the response. The server may not
have read the end yet, because the client has sent other data before it. In both cases, the operating system
knows whether the data has ended and whether the connection was reset. So connections that wait for a response
are polled twice per second.

To distinguish the two, the server writes a few bytes: if the client has left, its operating system resets the
connection. See `Exchange.probe_client`. After the end of a client's data, the first checks come sooner, so
that no replica works for a client that has left.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Container, Iterable

from daskserve.proxies.exchange.server_state import Connection, ServerState
from daskserve.proxies.exchange.stream import can_detect_disconnects
from daskserve.proxies.exchange.websocket.session import WebSocketSession

#: Interval at which connections are polled.
PERIOD_S = 0.5
#: Interval and number of the first checks of a client whose data has ended. The first check is in the next
#: iteration of the event loop, the second writes a few bytes, and the third finds the connection reset if the
#: client has left. The interval is short, because a request that waits for a slot must not get one after its
#: client has left.
QUICK_S = 0.001
QUICK_CHECKS = 5
#: Interval of the next checks, and the time between the end of the data and the last check.
SOON_S = 0.01
LATE_S = 0.1


class DisconnectWatch:
    """Cancels the requests of clients that have disconnected, with two timers for a server."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state
        self._timer: asyncio.TimerHandle | None = None
        self._soon_timer: asyncio.TimerHandle | None = None
        #: The connections whose data has ended, each with the time of its last check.
        self._ended: dict[Connection, float] = {}
        #: The number of checks at the shorter interval that are left.
        self._quick = 0
        server_state.on_eof = self.check_soon

    def start(self) -> None:
        """Start the timer. Does nothing if the operating system cannot detect disconnects."""
        if can_detect_disconnects():
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._check)

    def stop(self) -> None:
        """Stop the timers. Idempotent."""
        for timer in (self._timer, self._soon_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._soon_timer = None
        self._ended.clear()

    def check_soon(self, connection: Connection) -> None:
        """Start the checks of a client whose data has ended."""
        self._ended[connection] = asyncio.get_running_loop().time() + LATE_S
        self._quick = QUICK_CHECKS
        self._start_soon(0.0)

    def _start_soon(self, delay_s: float) -> None:
        if self._soon_timer is not None:
            self._soon_timer.cancel()
        if self._timer is not None:
            self._soon_timer = asyncio.get_running_loop().call_later(delay_s, self._check_ended)

    def _check_ended(self) -> None:
        now = asyncio.get_running_loop().time()
        ended, self._ended = self._ended, {}
        late = {each for each, late_at in ended.items() if now >= late_at}
        waiting = self._check_connections(ended, late)
        self._ended |= {each: at for each, at in ended.items() if each in waiting and each not in late}
        self._quick -= 1
        if self._ended:
            self._start_soon(QUICK_S if self._quick > 0 else SOON_S)

    def _check(self) -> None:
        self.start()
        holders: list[Connection | WebSocketSession] = [
            *self._server_state.connections,
            *self._server_state.sockets,
        ]
        self._check_connections(holders, set(holders) - self._ended.keys())

    def _check_connections(
        self, holders: Iterable[Connection | WebSocketSession], late: Container[object]
    ) -> set[object]:
        """Close the connections of clients that have left; return those that may wait for their response.

        ``late`` contains those whose data has not ended within the last `LATE_S`.
        """
        unread: dict[int, Connection | WebSocketSession] = {}
        for holder in holders:
            request = holder.exchange if isinstance(holder, Connection) else holder
            stream = request.unread if request is not None else None
            if stream is not None and not stream.closed():
                unread[stream.socket.fileno()] = holder
        poll = select.poll()
        for number in unread:
            poll.register(number, select.POLLRDHUP)
        waiting: set[object] = set()
        for number, events in poll.poll(0):
            holder = unread[number]
            is_reset = bool(events & (select.POLLERR | select.POLLHUP))
            if isinstance(holder, Connection) and holder.exchange is not None and not is_reset:
                waiting.add(holder)
                holder.exchange.probe_client(is_late=holder in late)
            else:
                holder.close()
        return waiting
