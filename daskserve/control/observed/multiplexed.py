"""The multiplexed models of all replicas, as they last reported them, for routers and for the status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from daskserve.common.types import BackendTag, ReplicaTag

#: How many models of a replica the status names, the most recently used first.
MAX_SHOWN = 100


class MultiplexedModels:
    """The reports of replicas; see `daskserve.data.multiplexing.multiplexer.Multiplexer.facts`."""

    def __init__(self) -> None:
        self._reports: dict[BackendTag, dict[ReplicaTag, Mapping[str, Any]]] = {}
        self._changed: set[BackendTag] = set()
        #: Looks at replicas at once, and often while they load models.
        self.look: Callable[[Iterable[ReplicaTag]], object] = bool

    def learn(self, backend: BackendTag, tag: ReplicaTag, facts: Mapping[str, Any]) -> bool:
        """Keep a report; return whether routers must get to know of a change."""
        reports = self._reports.setdefault(backend, {})
        before = reports.get(tag)
        reports[tag] = facts
        if before is None or _for_routers(before) != _for_routers(facts):
            self._changed.add(backend)
        return backend in self._changed

    def forget_replica(self, tag: ReplicaTag) -> None:
        """Drop the report of a replica whose record is gone."""
        backend = tag.rpartition("#")[0]
        reports = self._reports.get(backend)
        if reports is not None and reports.pop(tag, None) is not None:
            self._changed.add(backend)
            if not reports:
                del self._reports[backend]

    def take_changes(self) -> dict[str, Any]:
        """Return the values to publish, by key, of what has changed since the last call."""
        changed, self._changed = self._changed, set()
        return {
            f"models/{backend}": {
                tag: _for_routers(facts) for tag, facts in self._reports.get(backend, {}).items()
            }
            or None
            for backend in sorted(changed)
        }

    def is_loading(self, tag: ReplicaTag) -> bool:
        """Return whether a replica has models on their way."""
        facts = self._reports.get(tag.rpartition("#")[0], {}).get(tag, {})
        return any(state != "loaded" for state in facts.get("models", {}).values())

    def of(self, tag: ReplicaTag) -> dict[str, Any]:
        """Return the models of a replica by id, with their states, for its status; empty without any."""
        facts = self._reports.get(tag.rpartition("#")[0], {}).get(tag)
        if facts is None:
            return {}
        models = dict(list(facts["models"].items())[:MAX_SHOWN])
        return {"count": facts["count"], "capacity": facts["capacity"], "models": models}


def _for_routers(facts: Mapping[str, Any]) -> dict[str, Any]:
    models = facts["models"]
    loaded = sorted(name for name, state in models.items() if state == "loaded")
    return {
        "loaded": loaded,
        "coming": sorted(models.keys() - set(loaded)),
        "capacity": facts["capacity"],
    }
