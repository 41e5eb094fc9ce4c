"""Chooses the replica for a request that names a model.

Problem: requests for a model should go where it is loaded. But a replica with a popular model must not be
overloaded while others are idle, and a burst of requests for a rare model must not push popular models out of
several replicas. Several processes choose at the same time, without knowing each other's choices.

Choice: all processes order the replicas in the same way for each model, by a hash of both (rendezvous
hashing). A request goes to:

1. The first replica in this order that has or loads the model, and is not overloaded. So a second copy is
   used only while it is needed. Later it becomes the least recently used model there, and is dropped.
2. If all replicas with the model are overloaded: another replica, which then loads it, if the model's share
   of all requests justifies another copy. A quarter of the requests justifies one of four replicas.
3. If no replica with the model has a free slot: no replica for a while, then one without the model.
4. If no replica has the model: the replica with the fewest models if one has room for it, else the least
   loaded one; among equals the first in order. Each load may push out another model. Several loads at one
   replica would push out popular models there, while rare ones stay at other replicas.

Pure: the load of replicas and the time are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from daskserve.data.caller.choice import hash_of
from daskserve.data.caller.pool.pooled_replica import PooledReplica

#: A replica is overloaded if its number of requests is at least this number, this share of its slots, and
#: this multiple of the mean load.
LEAST_LOAD = 2
SLOTS_SHARE = 0.25
MEAN_FACTOR = 2.0
#: A model may have as many copies as its share of the requests, times the number of replicas, times this.
COPIES_FACTOR = 1.25

_MASK = (1 << 64) - 1


@dataclass(slots=True)
class KnownModels:
    """The models of one replica, as far as they are known."""

    seed: int
    #: The models that the replica has published as loaded, and as loading.
    loaded: frozenset[str] = frozenset()
    coming: frozenset[str] = frozenset()
    #: How many models the replica may hold; None for no limit, or while the limit is unknown.
    capacity: int | None = None
    #: Models assumed to be loaded because a request for them was sent, each with the end of this assumption.
    assumed: dict[str, float] = field(default_factory=dict)

    def has(self, key: str, now: float) -> bool:
        """Return whether the replica has a model or is about to have it."""
        return key in self.loaded or key in self.coming or self.assumed.get(key, 0.0) > now

    def count(self, now: float) -> int:
        """Return how many models the replica has or is about to have."""
        known = self.loaded | self.coming
        return len(known) + sum(until > now and key not in known for key, until in self.assumed.items())


def rank(key_hash: int, seed: int) -> int:
    """Return the place of a replica in the order of a model; the greatest number is the first place."""
    mixed = ((key_hash ^ seed) * 0xBF58476D1CE4E5B9) & _MASK
    mixed ^= mixed >> 31
    mixed = (mixed * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 29)


def choose_place(
    key: str,
    places: Sequence[PooledReplica],
    free: Collection[PooledReplica],
    known: Mapping[str, KnownModels],
    *,
    share: float,
    concurrency: int,
    now: float,
    is_patient: bool,
) -> PooledReplica | None:
    """Return the replica for a request; None if it should wait.

    Parameters
    ----------
    places, free
        All replicas, and those that have a free slot; not empty.
    share : float
        The model's share of all requests.
    is_patient : bool
        Whether the request may still wait for a replica that has the model.
    """
    loads = {each.tag: each.score(now) for each in places}
    mean = (sum(loads.values()) + 1) / len(places)
    bound = max(LEAST_LOAD, SLOTS_SHARE * concurrency, MEAN_FACTOR * mean)
    having = {each.tag for each in places if known[each.tag].has(key, now)}
    with_model = [each for each in free if each.tag in having]
    fit = [each for each in with_model if loads[each.tag] < bound]
    if len(fit) > 1:
        # Replicas that have loaded the model come before those that may still be loading it.
        sure = [each for each in fit if key in known[each.tag].loaded]
        return ordered(key, sure or fit, known)[0]
    if fit:
        return fit[0]
    others = [each for each in free if each.tag not in having]
    if having:
        worth = math.ceil(share * len(places) * COPIES_FACTOR)
        calm = [each for each in others if loads[each.tag] < bound]
        if with_model and not (calm and len(having) < worth):
            return min(with_model, key=lambda each: loads[each.tag])
        if not with_model and is_patient and len(having) >= worth:
            return None
        others = calm or others
    return _emptiest(ordered(key, others, known), known, loads, now)


def ordered(
    key: str, places: Sequence[PooledReplica], known: Mapping[str, KnownModels]
) -> list[PooledReplica]:
    """Return replicas in the order of a model."""
    key_hash = hash_of(key)
    return sorted(places, key=lambda each: rank(key_hash, known[each.tag].seed), reverse=True)


def _emptiest(
    places: Sequence[PooledReplica], known: Mapping[str, KnownModels], loads: Mapping[str, float], now: float
) -> PooledReplica | None:
    """Return the replica with the fewest models if it has room for one more, else the least loaded one."""
    if not places:
        return None
    counts = [(known[each.tag].count(now), known[each.tag].capacity) for each in places]
    roomy = [place for place, (count, most) in enumerate(counts) if most is None or count < most]
    if roomy:
        return places[min(roomy, key=lambda place: counts[place][0])]
    return min(places, key=lambda each: loads[each.tag])
