"""The last reported multiplexed models of all replicas, for routers and for the status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from daskserve.common.types import ReplicaTag
from daskserve.control.observed.reports import PublishedReports

#: How many models of a replica the status names, the most recently used first.
MAX_SHOWN = 100


class MultiplexedModels(PublishedReports):
    """The reports of replicas; see `daskserve.data.multiplexing.multiplexer.Multiplexer.facts`."""

    def __init__(self) -> None:
        super().__init__("models", _for_routers)
        #: Queries replicas at once, and often while they load models.
        self.on_loading: Callable[[Iterable[ReplicaTag]], object] = bool

    def is_loading(self, tag: ReplicaTag) -> bool:
        """Return whether a replica is loading models."""
        return any(state != "loaded" for state in self.get(tag).get("models", {}).values())

    def of(self, tag: ReplicaTag) -> dict[str, Any]:
        """Return the models of a replica by id, with their states, for its status; empty if it has none."""
        facts = self.get(tag)
        if not facts:
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
