"""A router that sends each session to one replica, by consistent hashing.

Each replica has many places on a ring, by hashes of its tag, which are the same in all processes. A session
belongs to the replica at the next place after the session's own hash. So if a replica stops, only its
sessions move, and a new replica takes its share evenly from all others.

Bounded load: a replica with more than `BOUND` times the mean number of requests is skipped, and the next one
on the ring gets the request. So one busy session does not overload its replica, and a replica that stops does
not overload its neighbor.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator

from daskserve.data.caller.choice import hash_of
from daskserve.data.caller.request_routers.interface import PendingRequest, RequestRouter, RunningReplica
from daskserve.data.caller.request_routers.load_balancing import two_of

#: Number of places of each replica on the ring.
VIRTUAL_NODES = 100
#: Maximum number of requests of a replica, as a multiple of the mean.
BOUND = 1.25
#: Number of replicas that are tried for a request before it may go to any.
MAX_STEPS = 64
#: Number of 64-bit numbers in one hash.
_PER_HASH = 8


def places_of(tag: str, count: int) -> list[int]:
    """Return the hashes of a replica's places on the ring."""
    found: list[int] = []
    for number in range(-(-count // _PER_HASH)):
        digest = hashlib.blake2b(f"{tag}:{number}".encode(), digest_size=64).digest()
        found += (int.from_bytes(digest[at : at + 8], "big") for at in range(0, 64, 8))
    return found[:count]


class Ring:
    """The places of replicas. A change sorts a nearly sorted list, and hashes only new replicas."""

    def __init__(self, virtual_nodes: int) -> None:
        self._virtual_nodes = virtual_nodes
        self._hashes: list[int] = []
        self._owners: list[str] = []
        self._tags: set[str] = set()

    def update(self, tags: set[str]) -> None:
        """Replace the replicas on the ring by these."""
        if tags == self._tags:
            return
        gone, added = self._tags - tags, tags - self._tags
        pairs = [
            pair for pair in zip(self._hashes, self._owners, strict=True) if not gone or pair[1] not in gone
        ]
        for tag in sorted(added):
            pairs += ((place, tag) for place in places_of(tag, self._virtual_nodes))
        pairs.sort()
        self._hashes = [place for place, _ in pairs]
        self._owners = [tag for _, tag in pairs]
        self._tags = set(tags)

    def owner(self, key: int) -> str:
        """Return the tag of the replica to which a key belongs; the ring must not be empty."""
        return self._owners[bisect.bisect_right(self._hashes, key) % len(self._owners)]

    def walk(self, key: int) -> Iterator[str]:
        """Yield the tags of all replicas in the order of the ring, beginning with the owner of a key."""
        first, count = bisect.bisect_right(self._hashes, key), len(self._hashes)
        seen: set[str] = set()
        for step in range(count):
            tag = self._owners[(first + step) % count]
            if tag not in seen:
                seen.add(tag)
                yield tag
                if len(seen) == len(self._tags):
                    return


class ConsistentHashRouter(RequestRouter):
    """Sends all requests of a session to one replica while it has room and is not overloaded.

    A request without a session goes to the less loaded of two random replicas.
    """

    _bound = BOUND
    _fallbacks: int | None = None

    def initialize_state(
        self,
        virtual_nodes: int = VIRTUAL_NODES,
        bound: float = BOUND,
        fallback_replicas: int | None = None,
        num_virtual_nodes: int | None = None,
        num_fallback_replicas: int | None = None,
        affinity_rate_window_size: int | None = None,
    ) -> None:
        """Set the number of places of each replica, the bound of the load, and the number of fallbacks.

        Parameters
        ----------
        bound
            Maximum number of requests of a replica, as a multiple of the mean; infinity for no bound.
        fallback_replicas
            Number of replicas that a session may use beside its own; a request waits while all of them are
            full. None: any.
        affinity_rate_window_size
            An option of Ray Serve; without effect.
        """
        nodes = virtual_nodes if num_virtual_nodes is None else num_virtual_nodes
        fallbacks = fallback_replicas if num_fallback_replicas is None else num_fallback_replicas
        if not isinstance(nodes, int) or not 1 <= nodes <= 10_000:
            raise ValueError(f"virtual_nodes must be a whole number from 1 to 10000, got {nodes!r}")
        if not isinstance(bound, (int, float)) or not bound > 1:
            raise ValueError(f"bound must be more than 1, got {bound!r}")
        if fallbacks is not None and (not isinstance(fallbacks, int) or fallbacks < 0):
            raise ValueError(f"fallback_replicas must be a whole number from 0, got {fallbacks!r}")
        self._ring = Ring(nodes)
        self._bound, self._fallbacks = bound, fallbacks

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Put new replicas on the ring."""
        super().update_replicas(replicas)
        self._by_tag = {each.replica_id.unique_id: each for each in replicas}
        self._ring.update(set(self._by_tag))

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the first replica on the ring that may take the request."""
        session = "" if pending_request is None else pending_request.metadata.session_id
        if not session:
            return two_of(candidate_replicas, self.rng)
        return self.ranked(hash_of(session))

    def ranked(self, key: int) -> list[list[RunningReplica]]:
        """Return the first replica after a key that may take a request; if there is none, the fallbacks."""
        if not self._replicas_list:
            return []
        most = most_ongoing(self._replicas_list, self.total_ongoing, self._bound)
        owner = self._by_tag[self._ring.owner(key)]
        if owner.has_room and owner.ongoing_requests < most:
            return [[owner]]  # the usual case
        limit = MAX_STEPS if self._fallbacks is None else self._fallbacks + 1
        over: list[RunningReplica] = []
        for step, tag in enumerate(self._ring.walk(key)):
            if step == limit:
                break
            each = self._by_tag[tag]
            if not each.has_room:
                over.append(each)
            elif each.ongoing_requests < most:
                return [[each], *([one] for one in over)]
            else:
                over.append(each)
        return [over] if self._fallbacks is not None else [over, self._replicas_list]


def most_ongoing(replicas: list[RunningReplica], total: int, bound: float) -> float:
    """Return the number of requests at which a replica is overloaded; the mean counts the new request."""
    return bound * (total + 1) / max(len(replicas), 1)
