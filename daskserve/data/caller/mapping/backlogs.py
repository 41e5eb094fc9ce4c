"""The items of maps that no router has yet, because each map sends only what the replicas take.

Without them, a job of a million items would look like a handful of requests to autoscaling.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping
from typing import Any
from weakref import WeakSet

from daskserve.common.types import BackendTag, EndpointTag
from daskserve.data.caller.mapping.window import Window

_KEY = "batches"


def batches_of(shared: MutableMapping[str, Any]) -> WeakSet[Window]:
    """Return the maps of a process and instance that are under way; add to it on the connection's loop."""
    found: WeakSet[Window] = shared.setdefault(_KEY, WeakSet())
    return found


def backlogs(
    batches: Iterable[Window], backends_of: Callable[[EndpointTag], Collection[BackendTag]]
) -> dict[BackendTag, int]:
    """Return the number of items that wait in maps, by backend."""
    found: dict[BackendTag, int] = {}
    for each in batches:
        waiting = each.waiting
        backends = backends_of(each.endpoint) if waiting else ()
        for tag in backends:
            found[tag] = found.get(tag, 0) + -(-waiting // len(backends))
    return found
