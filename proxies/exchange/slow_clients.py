"""Ends requests whose bodies arrive too slowly, or whose responses are not read.

One timer checks all connections about once a second, so requests that make progress cost nothing. See
`daskserve.proxies.exchange.limits.limits` for what other servers do.
"""

from __future__ import annotations

import asyncio
import logging
from operator import itemgetter

from daskserve.proxies.exchange.limits.limits import BODY_RATE, BUFFERS, BUSY_WRITE_STALL, WRITE_STALL
from daskserve.proxies.exchange.request.body import NO_MEMORY, SMALL_BYTES, RequestBody
from daskserve.proxies.exchange.server_state import Connection, OngoingRequest, ServerState

log = logging.getLogger("daskserve.proxies")

#: Maximum interval of the checks, and their minimum number within the shortest limit.
PERIOD_S = 1.0
_CHECKS = 4
#: A body may be refused in favor of others if receiving the bytes that it holds took longer than this at its
#: current rate.
SLOW_S = 10.0


class BodyRate:
    """Checks one body against the minimum rate.

    Each byte extends the client's deadline, but never beyond the grace period: a client that has sent much
    may not pause for longer than others.
    """

    __slots__ = ("_due", "_grace_s", "_received_bytes", "_s_per_byte", "_seen_at", "bytes_per_s")

    def __init__(self, min_bytes_per_s: int, grace_s: float, received_bytes: int, now: float) -> None:
        self._s_per_byte = 1 / min_bytes_per_s
        self._grace_s = grace_s
        self._received_bytes = received_bytes
        self._due = now + grace_s
        self._seen_at = now
        #: The current rate.
        self.bytes_per_s = float("inf")

    def is_late(self, received_bytes: int, now: float) -> bool:
        """Record the number of received bytes; return whether the body is too slow."""
        gained_bytes = received_bytes - self._received_bytes
        self._received_bytes = received_bytes
        self._due = min(self._due + gained_bytes * self._s_per_byte, now + self._grace_s)
        if now > self._seen_at:
            self.bytes_per_s = gained_bytes / (now - self._seen_at)
            self._seen_at = now
        return now >= self._due


class SlowClientWatch:
    """Checks the connections of one server."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state
        self._limits = limits = server_state.limits
        shortest_s = min(limits.body_grace_s, limits.write_stall_timeout_s, limits.busy_write_stall_timeout_s)
        self._period_s = min(PERIOD_S, shortest_s / _CHECKS)
        self._timer: asyncio.TimerHandle | None = None
        server_state.make_room = self.make_room
        self._bodies: dict[OngoingRequest, BodyRate] = {}
        #: The number of sent bytes of each response that waits for its client, and since when it is the same.
        self._unsent: dict[Connection, tuple[int, float]] = {}

    def start(self) -> None:
        """Start the timer."""
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._tick)

    def stop(self) -> None:
        """Stop the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._bodies.clear()
        self._unsent.clear()

    def _tick(self) -> None:
        self.start()
        self._limits.trimmer.tick()
        self.check(asyncio.get_running_loop().time())

    def check(self, now: float) -> None:
        """Check all connections, and end the requests that make no progress."""
        bodies, self._bodies = self._bodies, {}
        unsent, self._unsent = self._unsent, {}
        for connection in list(self._server_state.connections):
            exchange = connection.exchange
            # Once the response has begun, the body may arrive at any rate.
            if exchange is not None and exchange.wants_body and not exchange.response_started:
                self._check_body(exchange, bodies.get(exchange), now)
            if connection.stream.writing():
                self._check_response(connection, unsent.get(connection), now)

    def make_room(self, body: RequestBody) -> bool:
        """Refuse the body that holds the most memory for its rate, in place of one that exceeds the budget.

        Otherwise a client could send the end of a large body so slowly that it keeps out all others for
        hours. Returns whether a body was refused.
        """
        if body.excess is not NO_MEMORY:
            return False
        self._limits.hit(BUFFERS)
        pace_s, worst = max(
            (
                (each.body.held_bytes / (rate.bytes_per_s + 1), each)
                for each, rate in self._bodies.items()
                if each.wants_body and each.body.held_bytes > SMALL_BYTES
            ),
            key=itemgetter(0),
            default=(0.0, None),
        )
        if worst is None or worst.body is body or pace_s < SLOW_S:
            return False
        body.excess = None
        worst.refuse(*NO_MEMORY)
        return True

    def _check_body(self, exchange: OngoingRequest, rate: BodyRate | None, now: float) -> None:
        limits, received_bytes = self._limits, exchange.body.received_bytes
        if exchange.body.is_full or not limits.min_body_bytes_per_s:
            return  # the body waits for the application
        if rate is None:
            rate = BodyRate(limits.min_body_bytes_per_s, limits.body_grace_s, received_bytes, now)
        elif rate.is_late(received_bytes, now):
            limits.hit(BODY_RATE)
            exchange.refuse(
                408,
                f"The request body arrived with less than {limits.min_body_bytes_per_s} bytes per second "
                "(min_body_bytes_per_s); send it again over a faster connection.",
            )
            return
        self._bodies[exchange] = rate

    def _check_response(self, connection: Connection, before: tuple[int, float] | None, now: float) -> None:
        limits, sent_bytes = self._limits, connection.stream.sent_bytes
        if before is None or before[0] != sent_bytes:
            self._unsent[connection] = sent_bytes, now
            return
        self._unsent[connection] = before
        stalled_s = now - before[1]
        if stalled_s >= limits.write_stall_timeout_s:
            limit = WRITE_STALL
        elif stalled_s >= limits.busy_write_stall_timeout_s and self._is_slot_needed(connection):
            limit = BUSY_WRITE_STALL
        else:
            return
        limits.hit(limit)
        log.info("%s has accepted no byte of its response for %.1f s", connection, stalled_s)
        connection.close()

    def _is_slot_needed(self, connection: Connection) -> bool:
        """Return whether other requests wait for the slot that a connection's request holds."""
        exchange = connection.exchange
        return (
            exchange is not None
            and not exchange.response_complete
            and self._server_state.is_crowded(connection.path)
        )
