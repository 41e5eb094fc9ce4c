"""A request that is queued at a full replica, as its router sees it.

A request of a batch job may be queued at a replica although that has free slots, which it keeps for live
requests. Then the request is deferred: the router continues to send live requests to that replica.

`daskserve.data.replica.requests.slots` is the replica's side.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

from daskserve.common.clock import Clock, stopwatch
from daskserve.common.types import (
    DONE,
    SLOT_TAKEN,
    Envelope,
    Load,
    Message,
    QueueTimeout,
    Reachability,
    Receive,
    Send,
)
from daskserve.data.caller.choice import choose
from daskserve.data.caller.pool.pooled_replica import BATCH_REFUSAL_S, PooledReplica
from daskserve.data.caller.pool.replica_pool import BUSY_BACKOFF_S, ReplicaPool, defer, end_deferral
from daskserve.data.caller.request_routers.hedging import note_sent
from daskserve.data.caller.routing.multiplexing.waiting import WaitingRequests
from daskserve.errors import ReplicaBusyError
from daskserve.options.fields.priority import BATCH_PRIORITY
from daskserve.telemetry.histogram import LatencyHistogram

#: Total time that a request waits in the queues of replicas. Each replica gets an equal share, but at
#: least `MIN_QUEUE_TIMEOUT_S`. Then the request moves to another replica.
QUEUE_TIMEOUT_S = 0.5
MIN_QUEUE_TIMEOUT_S = 0.025


def place_in_queue(
    pool: ReplicaPool,
    replica: PooledReplica,
    envelope: Envelope,
    waiting: WaitingRequests,
    now: float,
    rng: random.Random,
) -> tuple[PooledReplica, bool, bool]:
    """Return the replica for a request, whether it is sent to the queue there, and whether it is deferred.

    This is the replica that was taken for the request, unless that replica accepts no requests of batch jobs.
    Then another replica is returned, even if a request router chose the first, which may be kept free for
    half a minute.
    """
    refused_at, ongoing = replica.batch_refusal
    if now - refused_at >= BATCH_REFUSAL_S or waiting.priority_of(envelope) > BATCH_PRIORITY:
        return replica, replica.has_queued_request, False
    if not ongoing and not envelope.model_id:
        others = [each for each in pool.entries().values() if _takes_batches(each, now)]
        if others:
            other = choose(others, now, rng)
            pool.leave_queue(replica)
            defer(pool, replica)  # not counted there, because the request goes to the other replica
            replica.deferred.count -= 1
            other.in_flight += 1
            note_sent(envelope, other.tag)
            if waiting.routing is not None:
                waiting.routing.moved(envelope, other.tag)
            return other, True, True
    return replica, True, not replica.has_queued_request


def _takes_batches(replica: PooledReplica, now: float) -> bool:
    refused_at, ongoing = replica.batch_refusal
    is_kept_free = not ongoing and now - refused_at < BATCH_REFUSAL_S
    return not (is_kept_free or replica.is_suspended or replica.route is Reachability.NONE)


class QueuedRequest:
    """One request in a replica's queue, from sending it until it gets a slot or is refused.

    Parameters
    ----------
    waits : LatencyHistogram
        Records the time in the queue.
    on_slot : callable
        Called when the request has its slot, so that the router may send the next one.
    is_deferred : bool
        Whether the request belongs to a batch job and is deferred.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        replica: PooledReplica,
        clock: Clock,
        send: Send,
        waits: LatencyHistogram,
        on_slot: Callable[[], None],
        priority: int,
        *,
        is_deferred: bool,
    ) -> None:
        self._pool = pool
        self._replica = replica
        self._clock = clock
        self._send = send
        self._waits = waits
        self._on_slot = on_slot
        self._priority = priority
        self._began = stopwatch()
        self._has_left = self._has_turn = False
        self._is_deferred = is_deferred
        if is_deferred:
            defer(pool, replica)

    async def respond(self, envelope: Envelope, receive: Receive, since: float) -> Load:
        """Send the request to its replica, and pass on the response; ``since`` is when it was first queued.

        Raises
        ------
        ReplicaBusyError
            It had no slot in time, or the replica's queue is full.
        """
        try:
            if self._is_deferred:
                self._on_slot()  # the replica also has room for the next requests
                await self._replica.deferred.wait()
                self._has_turn = True
            left_s = max(QUEUE_TIMEOUT_S / max(self._pool.size, 1), MIN_QUEUE_TIMEOUT_S)
            queue_timeout = QueueTimeout(left_s, self._clock.now() - since, self._priority)
            request = self._replica.handle(replace(envelope, queue_timeout=queue_timeout))
            return await request.respond(receive, self.send)
        except ReplicaBusyError:
            if self._has_turn:
                # The replica has room for live requests, so it is not suspended, and may refuse this request
                # at once.
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
                self._replica.deferred.release()
            leave = end_deferral if self._is_deferred else ReplicaPool.leave_queue
            leave(self._pool, self._replica)
            self._waits.observe(stopwatch() - self._began)
