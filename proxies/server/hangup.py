"""Detects clients that disconnect while they wait for a response.

While a request is answered, the end of the client's data does not mean that the client has left: it may have
shut down its side of the connection only (half-closed), and wait for the response. Or nothing is read from
the connection, because the client has sent more data, and the end comes after that. The operating system
knows both, and whether the connection was reset. It is asked twice a second, about connections that wait.

To tell clients that have left from those that wait, something is written to the connection: if the client
has left, its operating system resets the connection. See `Exchange.probe_client`. The server that has read
the end of a client's data has it checked sooner, because the work for a client that has left is wasted.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Container, Iterable

from daskserve.proxies.exchange.server_state import Connection, ServerState
from daskserve.proxies.exchange.stream import can_tell_hangups
from daskserve.proxies.exchange.websocket.session import WebSocketSession

#: How often the operating system is asked.
PERIOD_S = 0.5
#: The interval of the first checks of a client whose data has ended, and their number. At the second check,
#: something is written; at the third, the connection is reset if the client has left. Short, because a
#: request that waits for a slot must not get one after its client has left. The last `LATE_CHECKS` of them
#: are those after a tenth of a second.
SOON_S = 0.005
SOON_CHECKS = 24
LATE_CHECKS = 4


class HangupWatch:
    """Cancels the requests of clients that have disconnected, with two timers for a server."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state
        self._timer: asyncio.TimerHandle | None = None
        self._soon_timer: asyncio.TimerHandle | None = None
        #: The connections whose data has ended, with the number of checks that are left.
        self._ended: dict[Connection, int] = {}
        server_state.note_end = self.check_soon

    def start(self) -> None:
        """Start the timer. Does nothing where the operating system cannot tell."""
        if can_tell_hangups():
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._check)

    def stop(self) -> None:
        """Stop the timers. Idempotent."""
        for timer in (self._timer, self._soon_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._soon_timer = None
        self._ended.clear()

    def check_soon(self, connection: Connection) -> None:
        """Find out soon whether a client has left whose data has ended."""
        self._ended[connection] = SOON_CHECKS
        self._start_soon()

    def _start_soon(self) -> None:
        if self._timer is not None and self._soon_timer is None:
            self._soon_timer = asyncio.get_running_loop().call_later(SOON_S, self._check_ended)

    def _check_ended(self) -> None:
        self._soon_timer = None
        ended, self._ended = self._ended, {}
        late = {each for each, count in ended.items() if count <= LATE_CHECKS}
        waiting = self._look_at(ended, late)
        self._ended |= {each: count - 1 for each, count in ended.items() if each in waiting and count > 1}
        if self._ended:
            self._start_soon()

    def _check(self) -> None:
        self.start()
        holders: list[Connection | WebSocketSession] = [
            *self._server_state.connections,
            *self._server_state.sockets,
        ]
        self._look_at(holders, set(holders) - self._ended.keys())

    def _look_at(
        self, holders: Iterable[Connection | WebSocketSession], late: Container[object]
    ) -> set[object]:
        """Close the connections of clients that have left; return those that may wait for their response.

        ``late`` are those that have waited for some time.
        """
        unread: dict[int, Connection | WebSocketSession] = {}
        for holder in holders:
            asked = holder.exchange if isinstance(holder, Connection) else holder
            stream = asked.unread if asked is not None else None
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
