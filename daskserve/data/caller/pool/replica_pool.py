"""The replicas of one backend as a router sees them, and the choice of the next one.

Problem: a router may know a thousand replicas, most of them full or suspended. It must not scan them for each
request. Choice: the replicas with room are in a separate list, from which one is drawn in constant time.
A replica that fills up leaves the list by swapping places with the last entry, and returns with its first
answer. Suspended replicas wait in a heap.

A replica in the router's own process costs no hop, so among equals it is preferred. Replicas count as equal
if waiting in the longer queue of the local one takes less time than a hop: each request of that queue takes
the replica's *pace*, the mean time between its answers while it is busy. The CPU time of a hop delays that
queue as well. So no-ops stay in their process, and a model that computes for 10 ms gets no request while
another copy of it is idle. An idle replica is also found in constant time. A replica that joins a backend
gets the next request.

Light requests that arrive together all go to the same local replica, even if there are several: see
`daskserve.data.caller.pool.request_groups`.

An open WebSocket counts like a request, until the messages of its backend are known to be light
(`daskserve.data.caller.pool.websocket_cost`). Then new WebSockets go to local replicas.

A replica that is full with requests of other processes reports it when it refuses one, and in its answers.
From then on it gets only requests for which no other replica has room. They queue there, one at a time per
router, until the replica reports room, or has reported nothing for `REPORT_S`.

A replica whose worker this process cannot reach gets no requests until there is a connection again. A
replica that is reached only through the scheduler gets requests only if no replica with a direct route has
room.

Pure: time and randomness are arguments.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from daskserve.common.types import (
    ActorAddress,
    ActorRequest,
    Envelope,
    Load,
    Reachability,
    ReplicaTag,
    WorkerAddress,
)
from daskserve.common.value_places import ValuePlaces
from daskserve.data.caller.choice import choose, nearest
from daskserve.data.caller.pool.pooled_replica import REPORT_S, PooledReplica
from daskserve.data.caller.pool.request_groups import RequestGroups
from daskserve.data.caller.pool.websocket_cost import WebSocketCost
from daskserve.options.fields.priority import BATCH_PRIORITY

#: How much longer, in seconds and as a factor, the queue of a local replica may be than that of a remote one.
#: A hop takes some 0.2 ms; the rest is a margin, so that random differences between busy replicas do not move
#: requests.
HOP_S = 0.001
LOCAL_FACTOR = 1.1
#: The additional CPU time of a hop in this process, compared with a local request.
HOP_CPU_S = 0.0001
#: At this pace or a slower one, the choice among idle replicas is rarely random; see `_draw`.
SLOW_S = 0.01
RANDOM_SHARE = 0.05
#: The weight of the newest answer in a replica's pace.
PACE_WEIGHT = 0.1
#: How long a replica is suspended after its queue was full, or after a request timed out in it.
BUSY_BACKOFF_S = 0.02


#: Chooses one of some replicas for a request, or none.
Pick: TypeAlias = Callable[[Sequence[PooledReplica]], PooledReplica | None]


class ReplicaPool:
    """The replicas of one backend.

    Parameters
    ----------
    is_local : callable
        ``is_local(address)`` returns whether the replica at the address runs in this process.
    route_to : callable
        Returns how this process reaches a worker; None if that is not known yet.
    handler_of : callable
        ``handler_of(address)`` returns the function that takes the requests to the replica at the address.
    """

    def __init__(
        self,
        is_local: Callable[[ActorAddress], bool],
        route_to: Callable[[WorkerAddress], Reachability | None] = lambda _: Reachability.DIRECT,
        handler_of: Callable[[ActorAddress], Callable[[Envelope], ActorRequest]] = lambda _: _refuse,
    ) -> None:
        self._is_local = is_local
        self._handler_of = handler_of
        self._route_to = route_to
        self._entries: dict[ReplicaTag, PooledReplica] = {}
        self._local: list[PooledReplica] = []
        self._remote: list[PooledReplica] = []
        self._relayed: list[PooledReplica] = []
        self._full: list[PooledReplica] = []
        # Local replicas whose last request has ended. A replica with a new request is dropped when it is
        # drawn.
        self._idle_local: deque[PooledReplica] = deque()
        self._idle_remote: deque[PooledReplica] = deque()
        self._idle_relayed: deque[PooledReplica] = deque()
        self._newcomers: deque[PooledReplica] = deque()
        self._suspended: list[tuple[float, int, PooledReplica]] = []
        #: All replicas that are not suspended, for `Pick`; None until the list is built again after a change.
        self._usable: list[PooledReplica] | None = None
        self._numbers = itertools.count()
        #: The number of this process's requests at the replicas, including replicas that are no longer used,
        #: and the number of these requests that are queued there.
        self.in_flight = 0
        self.queued = 0
        #: The cost of the messages of this process's WebSockets.
        self.websocket_cost = WebSocketCost()
        #: The groups of requests to the replicas of this process; None until there are two to choose from.
        self._groups: RequestGroups | None = None

    def __repr__(self) -> str:
        return " ".join(f"{each.tag}={each.in_flight}/{each.concurrency}" for each in self._entries.values())

    @property
    def is_empty(self) -> bool:
        """Whether there are no replicas, with or without room."""
        return not self._entries

    def entries(self) -> Mapping[ReplicaTag, PooledReplica]:
        """Return all replicas by tag; the mapping is replaced when they change."""
        return self._entries

    def addresses(self) -> list[ActorAddress]:
        """Return the addresses of all replicas, with or without room, ordered by tag."""
        return [self._entries[tag].address for tag in sorted(self._entries)]

    @property
    def size(self) -> int:
        """The number of replicas, with or without room."""
        return len(self._entries)

    def update(
        self,
        published: Mapping[ReplicaTag, tuple[WorkerAddress, int]],
        concurrency: int,
        name_of: Callable[[ReplicaTag], str],
    ) -> None:
        """Replace the replicas by the published ones, each with its worker and incarnation."""
        known = self._entries
        newcomers: list[PooledReplica] = []
        entries: list[PooledReplica] = []
        for tag, (worker, incarnation) in published.items():
            entry = known.get(tag)
            if entry is None or entry.address.worker != worker or entry.address.incarnation != incarnation:
                entry = PooledReplica(tag, ActorAddress(name_of(tag), worker, incarnation))
                newcomers.append(entry)
            entry.concurrency = concurrency
            entries.append(entry)
        self._replace(entries)
        if len(newcomers) < len(entries):
            self._newcomers.extend(each for each in newcomers if each.peers is self._remote)

    def forget_worker(self, worker: WorkerAddress) -> None:
        """Stop using the replicas of a worker."""
        if self.has_worker(worker):
            self._replace([each for each in self._entries.values() if each.address.worker != worker])

    def has_worker(self, worker: WorkerAddress) -> bool:
        """Return whether one of the replicas is on a worker."""
        return any(each.address.worker == worker for each in self._entries.values())

    def note_route(self, worker: WorkerAddress) -> None:
        """Record that the route to a worker has changed."""
        if self.has_worker(worker):
            self._replace(list(self._entries.values()))

    def _replace(self, entries: Iterable[PooledReplica]) -> None:
        for entry in self._entries.values():
            entry.peers = None
            entry.index = -1
            entry.is_hinted = False
        for each in (self._local, self._remote, self._relayed, self._full):
            each.clear()
        for hints in (self._idle_local, self._idle_remote, self._idle_relayed):
            hints.clear()
        self._entries = {entry.tag: entry for entry in entries}
        self._usable = None
        for entry in self._entries.values():
            entry.handle = self._handler_of(entry.address)
            if self._is_local(entry.address):
                entry.route, entry.peers = Reachability.DIRECT, self._local
            else:
                entry.route = self._route_to(entry.address.worker)
                entry.peers = self._relayed if entry.route is Reachability.SCHEDULER else self._remote
            self._add(entry)
        self._newcomers = deque(each for each in self._newcomers if each.peers is self._remote)

    def take(self, now: float, rng: random.Random, pick: Pick | None = None) -> PooledReplica | None:
        """Return the replica for a request, or None; the request counts as in flight from now on.

        If no replica has room, this returns a full one and sets ``has_queued_request``. If ``pick`` is given,
        it chooses one of all replicas that are not suspended; replicas with a negative index get no requests.
        """
        if self._suspended and self._suspended[0][0] <= now:
            self._resume_due(now)
        if self._full:
            # It is enough to try one random entry: frequent calls soon reach all of them.
            entry = self._full[int(rng.random() * len(self._full))]
            if now - entry.reported_at >= REPORT_S:
                self._set_full(entry, is_full=False)
        local, remote = self._local, self._remote
        if pick is not None:
            if self._usable is None:
                self._usable = [each for each in self._entries.values() if not each.is_suspended]
            picked = pick(self._usable)
            if picked is None:
                return None
            entry = picked
            if entry.is_full:
                entry.has_queued_request = True
                self.queued += 1
        elif local:
            if len(local) == 1:
                entry = local[0]
            else:
                if self._groups is None:
                    self._groups = RequestGroups(now)
                entry = self._groups.next(now) or _draw(local, self._idle_local, now, rng)
                self._groups.add(entry, now)
            if remote and entry.score(now) * entry.pace_s > HOP_S:
                work = _work(entry, now, self.websocket_cost)
                saved = work - (work * HOP_CPU_S + HOP_S) / entry.pace_s
                if saved > 0:
                    other = self._newcomer() or _draw(remote, self._idle_remote, now, rng)
                    if saved > LOCAL_FACTOR * _work(other, now, self.websocket_cost):
                        entry = other
        elif remote:
            entry = (self._newcomers and self._newcomer()) or (
                remote[0] if len(remote) == 1 else _draw(remote, self._idle_remote, now, rng)
            )
        elif self._relayed:
            entry = _draw(self._relayed, self._idle_relayed, now, rng)
        elif self._full:
            entry = choose(self._full, now, rng)
            entry.has_queued_request = True
            self.queued += 1
        else:
            return None
        if self._groups is not None and not self.in_flight:
            self._groups.resume(now)
        self.in_flight += 1
        if entry.in_flight == entry.sockets:
            entry.busy_since = now
        entry.in_flight += 1
        if entry.has_queued_request or entry.in_flight >= entry.concurrency:
            self._remove(entry)
        return entry

    def leave_queue(self, entry: PooledReplica) -> None:
        """Record that the request queued at a replica has its slot, or has left."""
        if entry.has_queued_request:
            entry.has_queued_request = False
            self.queued -= 1
            self._add(entry)

    def release(self, entry: PooledReplica) -> None:
        """Record that a request has ended."""
        self.in_flight -= 1
        entry.in_flight -= 1
        if entry.index < 0:
            self._add(entry)
        elif not entry.in_flight and not entry.is_hinted:
            self._hint(entry)

    def report(self, entry: PooledReplica, load: Load, now: float, *, is_answer: bool = True) -> None:
        """Record the load that a replica reports with an answer, or with the end of a WebSocket."""
        if is_answer:
            if self._groups is not None and entry.peers is self._local:
                self._groups.note_answer(now)
            wait_s = now - entry.busy_since
            entry.busy_since = now
            if entry.pace_s == math.inf:
                entry.pace_s = wait_s
            else:
                entry.pace_s += PACE_WEIGHT * (wait_s - entry.pace_s)
        entry.reported = load.ongoing + load.queued
        entry.reported_at = now
        is_full = load.ongoing >= entry.concurrency
        if is_full is not entry.is_full:
            self._set_full(entry, is_full=is_full)

    def note_busy(
        self, entry: PooledReplica, ongoing: int, now: float, *, was_queued: bool, priority: int = 0
    ) -> None:
        """Record that a replica refused a request, at once or after it was queued there."""
        if priority <= BATCH_PRIORITY and ongoing < entry.concurrency:
            entry.batch_refusal = (now, ongoing)  # the replica has room for other requests
            return
        pace_s = entry.pace_s
        self.report(entry, Load(max(ongoing, entry.concurrency)), now)
        entry.pace_s = pace_s  # a refusal does not count as an answer
        if was_queued:
            self.suspend(entry, now + BUSY_BACKOFF_S)

    def _set_full(self, entry: PooledReplica, *, is_full: bool) -> None:
        if entry.index < 0:
            entry.is_full = is_full
        else:
            self._remove(entry)
            entry.is_full = is_full
            self._add(entry)

    def suspend(self, entry: PooledReplica, until: float) -> None:
        """Suspend a replica until the given time."""
        entry.is_suspended = True
        self._usable = None
        entry.not_before = max(until, entry.not_before)
        heapq.heappush(self._suspended, (until, next(self._numbers), entry))
        if entry.index >= 0:
            self._remove(entry)

    def next_resume_at(self) -> float | None:
        """Return when the first suspended replica may be used again; None if none is suspended."""
        while self._suspended and self._suspended[0][2].peers is None:
            heapq.heappop(self._suspended)
        return self._suspended[0][0] if self._suspended else None

    def _newcomer(self) -> PooledReplica | None:
        while self._newcomers:
            entry = self._newcomers.popleft()
            if entry.index >= 0 and not entry.is_full:
                return entry
        return None

    def _resume_due(self, now: float) -> None:
        while self._suspended and self._suspended[0][0] <= now:
            _, _, entry = heapq.heappop(self._suspended)
            if entry.is_suspended and entry.not_before <= now:
                entry.is_suspended = False
                self._usable = None
                if entry.index < 0:
                    self._add(entry)

    def _add(self, entry: PooledReplica) -> None:
        if (
            entry.is_suspended
            or entry.route is Reachability.NONE
            or entry.has_queued_request
            or entry.peers is None
            or entry.in_flight >= entry.concurrency
        ):
            return
        peers = self._full if entry.is_full else entry.peers
        entry.index = len(peers)
        peers.append(entry)
        if not entry.in_flight and not entry.is_hinted:
            self._hint(entry)

    def _hint(self, entry: PooledReplica) -> None:
        entry.is_hinted = True
        if entry.peers is self._local:
            self._idle_local.append(entry)
        else:
            (self._idle_remote if entry.peers is self._remote else self._idle_relayed).append(entry)

    def _remove(self, entry: PooledReplica) -> None:
        peers = self._full if entry.is_full else entry.peers
        assert peers is not None
        last = peers.pop()
        if last is not entry:
            peers[entry.index] = last
            last.index = entry.index
        entry.index = -1


def _work(entry: PooledReplica, now: float, websocket_cost: WebSocketCost) -> float:
    """Return the score of a replica for the choice between local and remote replicas."""
    score = entry.score(now)
    if entry.sockets and websocket_cost.is_light(now, HOP_S):
        return max(0.0, score - entry.sockets)
    return score


def has_room(pool: ReplicaPool, now: float) -> bool:
    """Return whether any replica may take a request, or queue it."""
    pool._resume_due(now)
    return bool(pool._local or pool._remote or pool._relayed or pool._full)


def defer(pool: ReplicaPool, entry: PooledReplica) -> None:
    """Record that a request of a batch job waits at a replica for its slot, until `end_deferral`."""
    entry.deferred.count += 1
    entry.in_flight -= 1
    if entry.index < 0:
        pool._add(entry)


def end_deferral(pool: ReplicaPool, entry: PooledReplica) -> None:
    """Record that a request that was deferred has its slot, or was refused."""
    entry.deferred.count -= 1
    entry.in_flight += 1
    if entry.index >= 0 and entry.in_flight >= entry.concurrency:
        pool._remove(entry)


def near(pool: ReplicaPool, places: ValuePlaces, now: float, rng: random.Random) -> Pick | None:
    """Return a choice near a request's values; None if no replica is on a worker that has any of them."""
    if not any(pool.has_worker(worker) for worker in places.nbytes):
        return None

    def pick(_: Sequence[PooledReplica]) -> PooledReplica | None:
        with_room = [*pool._local, *pool._remote] or pool._relayed or pool._full
        return nearest(with_room, places, now, rng) if with_room else None

    return pick


def _refuse(envelope: Envelope) -> ActorRequest:
    raise NotImplementedError("The replicas of this pool take no requests.")


def _draw(
    peers: list[PooledReplica], hints: deque[PooledReplica], now: float, rng: random.Random
) -> PooledReplica:
    """Return a replica without requests if there is one, or the less loaded of two random ones.

    The choice among idle replicas is also random. But if requests take long, the replica that answered last
    is usually chosen, because the others may have received requests from other processes since.
    """
    entry = choose(peers, now, rng)
    is_idle = not entry.score(now)
    if is_idle and entry.pace_s <= SLOW_S:
        return entry
    while hints:
        hint = hints[-1]
        if hint.index >= 0 and not hint.is_full and not hint.score(now):
            is_known = hint.pace_s > SLOW_S and now - hint.reported_at < REPORT_S
            return entry if is_idle and not (is_known and rng.random() >= RANDOM_SHARE) else hint
        hints.pop().is_hinted = False
    return entry
