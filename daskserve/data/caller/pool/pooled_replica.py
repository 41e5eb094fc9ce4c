"""One replica of a backend as a router sees it."""

from __future__ import annotations

import math
from collections.abc import Callable

from daskserve.common.types import (
    ActorAddress,
    ActorRequest,
    Envelope,
    Reachability,
    ReplicaTag,
    WorkerAddress,
)
from daskserve.data.caller.deferred_requests import DeferredRequests

#: Load reports older than this are ignored.
REPORT_S = 1.0
#: Time for which a replica gets no more requests of batch jobs after it refused one although it had free
#: slots.
BATCH_REFUSAL_S = 3.0
#: The `PooledReplica.batch_refusal` of a replica that has not refused a request of a batch job.
NEVER_REFUSED = (-math.inf, 0)


class PooledReplica:
    """One replica, and the requests that this process has in flight there."""

    __slots__ = (
        "address",
        "batch_refusal",
        "busy_since",
        "concurrency",
        "deferred",
        "handle",
        "has_queued_request",
        "in_flight",
        "index",
        "is_full",
        "is_hinted",
        "is_suspended",
        "not_before",
        "pace_s",
        "peers",
        "reported",
        "reported_at",
        "route",
        "sockets",
        "tag",
    )

    #: Takes a request: the replica's own ``handle`` if it is local, or the current connection's function.
    handle: Callable[[Envelope], ActorRequest]

    def __init__(self, tag: ReplicaTag, address: ActorAddress) -> None:
        self.tag = tag
        self.address = address
        self.concurrency = 1
        self.in_flight = 0
        #: Number of these requests that are WebSockets.
        self.sockets = 0
        #: Mean time between two answers while requests are in flight; infinite until there is an answer.
        #: WebSockets do not count.
        self.pace_s = math.inf
        #: When the last answer arrived, or when the first request was sent if none was in flight.
        self.busy_since = 0.0
        self.reported = 0
        self.reported_at = -REPORT_S
        self.is_suspended = False
        self.not_before = 0.0
        #: Whether the replica's last report said that it is full, and whether this process has a request
        #: queued at it.
        self.is_full = False
        self.has_queued_request = False
        #: The requests of batch jobs that wait at the replica for a slot.
        self.deferred = DeferredRequests()
        #: When the replica last refused a batch request although it had free slots, and how many batch
        #: requests it ran at that time; 0 if it accepts none.
        self.batch_refusal = NEVER_REFUSED
        #: How this process reaches the replica's worker; None if that is not known yet.
        self.route: Reachability | None = None
        #: The list that contains the replica while it has room: local, remote or relayed; None after removal.
        self.peers: list[PooledReplica] | None = None
        #: Whether the replica is in a queue of replicas that are probably idle.
        self.is_hinted = False
        #: The replica's index in `peers`, or in the list of full replicas; -1 while it gets no requests.
        self.index = -1

    @property
    def worker(self) -> WorkerAddress:
        """The address of the replica's worker."""
        return self.address.worker

    def room_for_batch(self, now: float) -> int:
        """Return how many requests of batch jobs the replica accepts at a time.

        If it has several slots, one slot is kept for live requests. If it recently refused requests although
        it had free slots, the limit is the number that ran at that time.
        """
        refused_at, found = self.batch_refusal
        return found if now - refused_at < BATCH_REFUSAL_S else max(1, self.concurrency - 1)

    def score(self, now: float) -> float:
        """Return the number of requests at the replica, as far as this process knows."""
        if self.reported > self.in_flight and now - self.reported_at < REPORT_S:
            return self.reported
        return self.in_flight + self.deferred.count
