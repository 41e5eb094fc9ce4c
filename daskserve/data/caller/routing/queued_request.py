"""A request that is queued at a full replica, as its router sees it.

A request of a batch job is queued at a replica that keeps its free slots for others. It is set aside: the
router goes on to send live requests there.

`daskserve.data.replica.requests.slots` is the replica's side.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from daskserve.common.clock import Clock, stopwatch
from daskserve.common.types import DONE, SLOT_TAKEN, Envelope, Load, Message, QueueTimeout, Send
from daskserve.data.caller.routing.replica_pool import (
    ROOM_S,
    PooledReplica,
    ReplicaPool,
    come_back,
    set_aside,
)
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
        self._has_left = False
        self._is_aside = not replica.has_queued_request
        if self._is_aside:
            set_aside(pool, replica)

    def queue_timeout(self, since: float, priority: int) -> QueueTimeout:
        """Return how long a request may wait here if it has been in queues since the given time."""
        left_s = max(QUEUE_TIMEOUT_S / max(self._pool.size, 1), MIN_QUEUE_TIMEOUT_S)
        return QueueTimeout(left_s, self._clock.now() - since, priority)

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
            leave = come_back if self._is_aside else ReplicaPool.leave_queue
            leave(self._pool, self._replica)
            self._waits.observe(stopwatch() - self._began)
