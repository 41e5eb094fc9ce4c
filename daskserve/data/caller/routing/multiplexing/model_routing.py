"""The choice of replicas for requests that name a model, in one process and for one backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from daskserve.common import settings
from daskserve.common.types import Reachability, ReplicaTag
from daskserve.data.caller.choice import hash_of
from daskserve.data.caller.pool.pooled_replica import PooledReplica
from daskserve.data.caller.pool.replica_pool import Pick
from daskserve.data.caller.routing.multiplexing.demand import ModelDemand
from daskserve.data.caller.routing.multiplexing.placement import KnownModels, choose_place
from daskserve.data.multiplexing.ids import short_id

#: How long a replica is assumed to have a model that was requested there but is not published yet.
ASSUMED_S = 3.0
#: Maximum number of assumed models for each replica.
MAX_ASSUMED = 1000
#: Number of stopped replicas that are remembered, beyond the number of running ones.
SPARE_KNOWN = 16


class ModelRouting:
    """Chooses replicas by the models that they have loaded."""

    def __init__(self, note_new: Callable[[ReplicaTag], object] = bool) -> None:
        #: How long a request waits for a slot at a replica with its model, even if other replicas have free
        #: slots.
        self.matching_timeout_s = settings.routing().model_matching_timeout_s
        #: Called with a replica that is about to load a model.
        self._note_new = note_new
        self._demand = ModelDemand()
        self._known: dict[ReplicaTag, KnownModels] = {}

    def update(self, published: Mapping[ReplicaTag, Mapping[str, Any]] | None) -> None:
        """Apply the controller's published list of the models of all replicas."""
        reports = published or {}
        for tag, facts in reports.items():
            known = self._of(tag)
            known.loaded, known.coming = frozenset(facts["loaded"]), frozenset(facts["coming"])
            known.capacity = facts["capacity"]
        for tag in self._known.keys() - reports.keys():
            self._known[tag].loaded = self._known[tag].coming = frozenset()

    def picker(self, model_id: str, now: float, since: float | None = None) -> Pick:
        """Return the choice of the replica for a request, for `ReplicaPool.take`; it may choose none.

        ``since`` is when the request began to wait; None if it has just arrived.
        """
        key = short_id(model_id)
        if since is None:
            self._demand.note(key)
        return partial(self._pick, key, now, since is None or now - since < self.matching_timeout_s)

    def _pick(
        self, key: str, now: float, is_patient: bool, entries: Sequence[PooledReplica]
    ) -> PooledReplica | None:
        open_ = [each for each in entries if each.index >= 0]
        near = [each for each in open_ if each.route is not Reachability.SCHEDULER] or open_
        # If all are full with requests of other processes, this request is queued at one of them.
        free = [each for each in near if not each.is_full] or near
        if not free:
            return None
        for each in entries:
            if each.tag not in self._known:
                self._of(each.tag)
        if len(self._known) > 2 * len(entries) + SPARE_KNOWN:  # replicas come and go
            self._known = {each.tag: self._known[each.tag] for each in entries}
        chosen = choose_place(
            key,
            entries,
            free,
            self._known,
            share=self._demand.share(key),
            concurrency=free[0].concurrency,
            now=now,
            is_patient=is_patient,
        )
        if chosen is not None:
            self.assume(chosen.tag, key, now)
        return chosen

    def models_of(self, tag: ReplicaTag, now: float) -> frozenset[str]:
        """Return the models of a replica, by their short ids."""
        known = self._of(tag)
        assumed = [key for key, until in known.assumed.items() if until > now]
        return known.loaded | known.coming | frozenset(assumed)

    def has_loaded(self, tag: ReplicaTag, model_id: str) -> bool:
        """Return whether a replica has published that it has a model."""
        return short_id(model_id) in self._of(tag).loaded

    def assume(self, tag: ReplicaTag, model_id: str, now: float) -> None:
        """Record that a request for a model goes to a replica, which will load the model."""
        key = short_id(model_id)
        known = self._of(tag)
        assumed = known.assumed
        if key not in assumed and key not in known.loaded and key not in known.coming:
            self._note_new(tag)
        assumed.pop(key, None)
        assumed[key] = now + ASSUMED_S
        while len(assumed) > MAX_ASSUMED or next(iter(assumed.values())) <= now:
            del assumed[next(iter(assumed))]

    def _of(self, tag: ReplicaTag) -> KnownModels:
        known = self._known.get(tag)
        if known is None:
            known = self._known[tag] = KnownModels(hash_of(tag))
        return known
