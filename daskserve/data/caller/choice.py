"""The choice of the backend and the replica for a request. Pure: randomness is an argument."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from daskserve.common.types import BackendTag, WorkerAddress
from daskserve.common.value_places import ValuePlaces

#: The number of hash bits that a float in [0, 1) can hold exactly.
_HASH_BITS = 53
#: The assumed rate and latency of transfers of Dask's values between workers, for `nearest`. Processes of one
#: host and a network of 10 Gbit/s both reach this rate.
TRANSFER_BYTES_PER_S = 1e9
TRANSFER_S = 0.002
#: The assumed time between answers of a replica that has not answered yet.
UNKNOWN_PACE_S = 0.05


def shard_draw(shard_key: str) -> float:
    """Return the number in [0, 1) that a shard key always draws."""
    digest = hashlib.sha256(shard_key.encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> (64 - _HASH_BITS)) / (1 << _HASH_BITS)


def hash_of(text: str) -> int:
    """Return a number of 64 bits that is the same in all processes."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class TrafficPolicy:
    """The weighted draw over an endpoint's backends, and its shadows.

    Backends are ordered by name. A shard key thus draws the same backend in every process until the policy
    changes.
    """

    def __init__(self, traffic: Mapping[BackendTag, float], shadows: Mapping[BackendTag, float]) -> None:
        weighted = sorted((tag, weight) for tag, weight in traffic.items() if weight > 0)
        self._backends = [tag for tag, _ in weighted]
        self._bounds = list(itertools.accumulate(weight for _, weight in weighted))
        self._shadows = sorted(shadows.items())
        self.backends = frozenset({*traffic, *shadows})
        #: The backends with traffic, ordered by name.
        self.active: Sequence[BackendTag] = self._backends
        #: The only backend with traffic; None if there are several, or none.
        self.only = self._backends[0] if len(self._backends) == 1 else None
        self.has_shadows = bool(self._shadows)

    def draw(self, number: float) -> BackendTag | None:
        """Return the backend for a number in [0, 1); None if no backend has any weight."""
        if not self._backends:
            return None
        index = bisect.bisect_right(self._bounds, number * self._bounds[-1])
        return self._backends[min(index, len(self._backends) - 1)]

    def shadows(self, rng: random.Random) -> list[BackendTag]:
        """Return the backends that get a copy of a request; each is drawn independently."""
        return [tag for tag, proportion in self._shadows if rng.random() < proportion]


class Candidate(Protocol):
    """A candidate for `choose`."""

    def score(self, now: float) -> float:
        """Return the replica's load; less is better."""


C = TypeVar("C", bound=Candidate)


def choose(candidates: Sequence[C], now: float, rng: random.Random) -> C:
    """Return the less loaded of two random candidates; ``candidates`` must not be empty.

    Power of two choices: close to the best candidate, at a cost that does not depend on the number of
    candidates.
    """
    count = len(candidates)
    if count == 1:
        return candidates[0]
    place = int(rng.random() * count)
    other = int(rng.random() * (count - 1))
    first, second = candidates[place], candidates[other + (other >= place)]
    return second if second.score(now) < first.score(now) else first


class PlacedCandidate(Candidate, Protocol):
    """A candidate for `nearest`."""

    @property
    def worker(self) -> WorkerAddress: ...

    @property
    def pace_s(self) -> float: ...


P = TypeVar("P", bound=PlacedCandidate)


def nearest(candidates: Sequence[P], places: ValuePlaces, now: float, rng: random.Random) -> P:
    """Return the candidate at which a request can begin first; ``candidates`` must not be empty."""
    costs = [_ready_s(each, places.total - places.nbytes.get(each.worker, 0), now) for each in candidates]
    least = min(costs)
    return choose(
        [each for each, cost in zip(candidates, costs, strict=True) if cost - least < TRANSFER_S / 2],
        now,
        rng,
    )


def _ready_s(candidate: PlacedCandidate, missing: int, now: float) -> float:
    """Return the estimated time until a candidate has finished its requests and fetched the missing bytes."""
    score = candidate.score(now)
    pace_s = UNKNOWN_PACE_S if candidate.pace_s == math.inf else candidate.pace_s
    return score * pace_s + (TRANSFER_S + missing / TRANSFER_BYTES_PER_S if missing > 0 else 0.0)
