"""The unsent items of maps, which autoscaling counts like waiting requests.

A map sends only as many calls as the replicas run, so a job of a million items would look like a few
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping
from typing import Any
from weakref import WeakSet

from daskserve.common.types import BackendTag, EndpointTag
from daskserve.data.caller.mapping.window import Window

_KEY = "batches"


def batches_of(shared: MutableMapping[str, Any]) -> WeakSet[Window]:
    """Return the running maps of a process and instance; the connection's loop owns the set."""
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
