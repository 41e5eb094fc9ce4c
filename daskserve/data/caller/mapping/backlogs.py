"""The items of maps that no router has yet, because each map sends only what the replicas take.

Without them, a job of a million items would look like a handful of requests to autoscaling.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping
from typing import Any, Protocol
from weakref import WeakSet

from daskserve.common.types import BackendTag, EndpointTag
from daskserve.data.caller.routing.replica_pool import ROOM_S

_KEY = "batches"


def room_of(routers: Any, endpoint: EndpointTag, now: float) -> tuple[int, int]:
    """Return how many replicas an endpoint has, and how many requests of a batch job they take at a time.

    One slot of each is for live requests, if it has several, and one request is on its way to each. A replica
    that has refused some lately, although it had free slots, takes as many as it had then. May be called from
    any thread; both are 0 while they are not known.
    """
    replicas = room = 0
    for tag in () if routers is None else routers.router(endpoint).backends:
        entries = routers.replica_set(tag).pool.entries()
        for each in entries.values():
            found_at, found = each.batch_room
            room += 1 + (found if now - found_at < ROOM_S else max(1, each.concurrency - 1))
        replicas += len(entries)
    return replicas, room


class Batch(Protocol):
    """The items of one map; a `daskserve.data.caller.mapping.window.Window`."""

    endpoint: EndpointTag

    @property
    def waiting(self) -> int:
        """How many items are still to be sent."""


def batches_of(shared: MutableMapping[str, Any]) -> WeakSet[Batch]:
    """Return the maps of a process and instance that are under way; add to it on the connection's loop."""
    found: WeakSet[Batch] = shared.setdefault(_KEY, WeakSet())
    return found


def backlogs(
    batches: Iterable[Batch], backends_of: Callable[[EndpointTag], Collection[BackendTag]]
) -> dict[BackendTag, int]:
    """Return the number of items that wait in maps, by backend."""
    found: dict[BackendTag, int] = {}
    for each in batches:
        waiting = each.waiting
        backends = backends_of(each.endpoint) if waiting else ()
        for tag in backends:
            found[tag] = found.get(tag, 0) + -(-waiting // len(backends))
    return found
