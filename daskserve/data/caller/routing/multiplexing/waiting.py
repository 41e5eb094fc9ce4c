"""The requests of one process that wait for a replica of a backend, also those that wait for their model."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import TypeAlias

from daskserve.common.clock import Clock
from daskserve.data.caller.routing.multiplexing.model_routing import MATCHING_TIMEOUT_S, ModelRouting
from daskserve.data.caller.routing.replica_pool import Pick, PooledReplica, ReplicaPool, has_room

#: How many of the requests that wait are considered when a slot becomes free.
CONSIDERED = 256

#: Begins to pass on what is published of the models of the replicas.
WatchModels: TypeAlias = Callable[[ModelRouting], object]


class WaitingRequests(OrderedDict["asyncio.Future[PooledReplica]", tuple[str, float]]):
    """The requests, in order: each with its model, and since when it waits for that; "" for no model.

    Ordered, because a cancelled request leaves from any position.
    """

    def __init__(
        self, pool: ReplicaPool, clock: Clock, rng: random.Random, watch: WatchModels | None
    ) -> None:
        super().__init__()
        self._pool = pool
        self._clock = clock
        self._rng = rng
        self._watch = watch
        #: Chooses by model; made by the first request that names one.
        self.models: ModelRouting | None = None
        #: When the first request gives up to wait for a replica with its model; None if none waits for that.
        self.next_at: float | None = None

    def picker(self, model_id: str) -> Pick:
        """Return what chooses the replica for a request that has arrived, by its model."""
        if self.models is None:
            self.models = ModelRouting()
            if self._watch is not None:
                self._watch(self.models)
        return self.models.picker(model_id, self._clock.now())

    def serve(self, now: float, release: Callable[[PooledReplica], None]) -> None:
        """Give free replicas to the requests, in order; pass over those that wait for their model."""
        assert self.models is not None
        self.next_at = None
        passed: set[str] = set()
        for waiter, (model_id, since) in list(islice(self.items(), CONSIDERED)):
            if not has_room(self._pool):
                return  # until a request ends
            if model_id in passed:
                continue
            pick = self.models.picker(model_id, now, since) if model_id else None
            replica = self._pool.take(now, self._rng, pick)
            if replica is None:
                passed.add(model_id)
                if model_id and now - since < MATCHING_TIMEOUT_S:
                    at = since + MATCHING_TIMEOUT_S
                    self.next_at = at if self.next_at is None else min(at, self.next_at)
                continue
            del self[waiter]
            if waiter.done():
                release(replica)
            else:
                waiter.set_result(replica)
