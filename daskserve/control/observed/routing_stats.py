"""The last results of the user's ``record_routing_stats`` in all replicas, for the status and for routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.common.types import BackendTag, ReplicaTag


class RoutingStats(dict[ReplicaTag, Mapping[str, Any]]):
    """The values by replica."""

    def __init__(self) -> None:
        super().__init__()
        self._changed: set[BackendTag] = set()
        self._published: set[BackendTag] = set()

    def learn(self, backend: BackendTag, tag: ReplicaTag, stats: Mapping[str, Any], *, is_used: bool) -> bool:
        """Keep what a replica reports; return whether there are changes to publish.

        ``is_used`` says whether the backend has a router that may read it.
        """
        if is_used and self.get(tag) != stats:
            self._changed.add(backend)
        self[tag] = stats
        return backend in self._changed

    def forget_replica(self, tag: ReplicaTag) -> None:
        """Drop the values of a replica whose record is gone."""
        backend = tag.rpartition("#")[0]
        if self.pop(tag, None) is not None and backend in self._published:
            self._changed.add(backend)

    def take_changes(self) -> dict[str, Any]:
        """Return the values to publish, by key, of what has changed since the last call."""
        changed, self._changed = self._changed, set()
        found: dict[BackendTag, dict[ReplicaTag, Any]] = {backend: {} for backend in changed}
        for tag, stats in self.items() if changed else ():
            if (values := found.get(tag.rpartition("#")[0])) is not None:
                values[tag] = stats
        self._published -= changed
        self._published.update(backend for backend, values in found.items() if values)
        return {f"stats/{backend}": values or None for backend, values in found.items()}
