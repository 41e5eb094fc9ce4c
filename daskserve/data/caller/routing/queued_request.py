"""A request that is queued at a full replica, as its router sees it.

A request of a batch job is queued at a replica that keeps its free slots for others. It is set aside: the
router goes on to send live requests there.

`daskserve.data.replica.requests.slots` is the replica's side.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from daskserve.common.clock import Clock, stopwatch
from daskserve.common.types import DONE, SLOT_TAKEN, Envelope, Load, Message, QueueTimeout, Receive, Send
from daskserve.data.caller.routing.replica_pool import (
    BUSY_BACKOFF_S,
    ROOM_S,
    PooledReplica,
    ReplicaPool,
    come_back,
    set_aside,
)
from daskserve.errors import ReplicaBusyError
from daskserve.options.fields.priority import BATCH_PRIORITY
from daskserve.telemetry.histogram import LatencyHistogram

#: How long a request waits in the queues of all replicas together. Each replica gets an equal share, but at
#: least `MIN_QUEUE_TIMEOUT_S`. Then the request moves to another replica.
QUEUE_TIMEOUT_S = 0.5
MIN_QUEUE_TIMEOUT_S = 0.025


def must_queue(
    replica: PooledReplica, envelope: Envelope, priority_of: Callable[[Envelope], int], now: float
) -> bool:
    """Return whether a request is sent to the queue of the replica that was chosen for it."""
    if replica.has_queued_request or now - replica.batch_room[0] >= ROOM_S:
        return replica.has_queued_request
    return priority_of(envelope) <= BATCH_PRIORITY


class QueuedRequest:
    """One request in a replica's queue, from when it is sent until it has its slot or is refused.

    Parameters
    ----------
    waits : LatencyHistogram
        Records the time in the queue.
    on_slot : callable
        Called when the request has its slot, so that the router may send the next one.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        replica: PooledReplica,
        clock: Clock,
        send: Send,
        waits: LatencyHistogram,
        on_slot: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._replica = replica
        self._clock = clock
        self._send = send
        self._waits = waits
        self._on_slot = on_slot
        self._began = stopwatch()
        self._has_left = self._has_turn = False
        self._is_aside = not replica.has_queued_request
        if self._is_aside:
            set_aside(pool, replica)

    async def respond(self, envelope: Envelope, receive: Receive, since: float, priority: int) -> Load:
        """Send the request to its replica, and pass on the response; ``since`` says when it was queued first.

        Raises
        ------
        ReplicaBusyError
            It had no slot in time, or the replica's queue is full.
        """
        try:
            if self._is_aside:
                self._on_slot()  # the replica has room for the requests behind it
                await self._replica.aside.take()
                self._has_turn = True
            left_s = max(QUEUE_TIMEOUT_S / max(self._pool.size, 1), MIN_QUEUE_TIMEOUT_S)
            queue_timeout = QueueTimeout(left_s, self._clock.now() - since, priority)
            request = self._replica.handle(replace(envelope, queue_timeout=queue_timeout))
            return await request.respond(receive, self.send)
        except ReplicaBusyError:
            if self._has_turn:
                # The replica has room for others, so it is not suspended, and may refuse this one at once.
                await self._clock.sleep(BUSY_BACKOFF_S)
            raise
        finally:
            self.leave()

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message to the caller; ``SLOT_TAKEN`` is for the router and stays here."""
        if message["type"] != SLOT_TAKEN:
            return self._send(message)
        self._pool.report(self._replica, Load(message["ongoing"], message["queued"]), self._clock.now())
        self.leave()
        self._on_slot()
        return DONE

    def leave(self) -> None:
        """Let the next request queue at the replica; idempotent."""
        if not self._has_left:
            self._has_left = True
            if self._has_turn:
                self._replica.aside.give_back()
            leave = come_back if self._is_aside else ReplicaPool.leave_queue
            leave(self._pool, self._replica)
            self._waits.observe(stopwatch() - self._began)
