"""Reports of replicas for routers and for the status, such as the statistics of a user's method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from daskserve.common.types import BackendTag, ReplicaTag


class PublishedReports:
    """The last report of each replica. Routers get all reports of a backend together, when they change.

    Parameters
    ----------
    topic : str
        The kind of the published keys.
    part : callable
        Returns the part of a report that routers read.
    """

    def __init__(self, topic: str, part: Callable[[Mapping[str, Any]], Any] = dict) -> None:
        self._topic = topic
        self._part = part
        self._reports: dict[BackendTag, dict[ReplicaTag, Mapping[str, Any]]] = {}
        self._changed: set[BackendTag] = set()
        self._published: set[BackendTag] = set()

    def learn(
        self, backend: BackendTag, tag: ReplicaTag, report: Mapping[str, Any], *, is_used: bool = True
    ) -> bool:
        """Keep a report; return whether there are changes to publish.

        ``is_used`` says whether routers of the backend read it.
        """
        reports = self._reports.setdefault(backend, {})
        before = reports.get(tag)
        reports[tag] = report
        if is_used and (before is None or self._part(before) != self._part(report)):
            self._changed.add(backend)
        return backend in self._changed

    def forget_replica(self, tag: ReplicaTag) -> None:
        """Drop the report of a replica whose record was removed."""
        backend = tag.rpartition("#")[0]
        reports = self._reports.get(backend)
        if reports is not None and reports.pop(tag, None) is not None:
            if backend in self._published:
                self._changed.add(backend)
            if not reports:
                del self._reports[backend]

    def get(self, tag: ReplicaTag) -> Mapping[str, Any]:
        """Return the last report of a replica; empty if there is none."""
        return self._reports.get(tag.rpartition("#")[0], {}).get(tag, {})

    def take_changes(self) -> dict[str, Any]:
        """Return the values to publish, by key, that have changed since the last call."""
        changed, self._changed = self._changed, set()
        self._published = (self._published | changed) & self._reports.keys()
        return {
            f"{self._topic}/{backend}": {
                tag: self._part(report) for tag, report in self._reports.get(backend, {}).items()
            }
            or None
            for backend in sorted(changed)
        }
