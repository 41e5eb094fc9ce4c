"""The requests of one process that wait for a replica of a backend, and the choice of a replica for each.

Most go to any replica. One that names a model waits for a replica that has it, and a router that an option
names may want certain replicas, too. Such requests are passed over while others have room.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from daskserve.common.clock import Clock
from daskserve.common.types import BackendTag, Envelope
from daskserve.data.caller.request_routers.interface import Setup
from daskserve.data.caller.request_routers.routing import Body, RequestRouting
from daskserve.data.caller.routing.multiplexing.model_routing import MATCHING_TIMEOUT_S, ModelRouting
from daskserve.data.caller.routing.replica_pool import Pick, PooledReplica, ReplicaPool, has_room

#: How many of the requests that wait are considered when a slot becomes free, and for how many of them a
#: router may be asked in vain.
CONSIDERED = 256
MAX_ASKED = 32

#: Begins to pass on what is published of the models of the replicas.
WatchModels: TypeAlias = Callable[[ModelRouting], object]


class WaitingRequests(OrderedDict["asyncio.Future[PooledReplica]", tuple[Envelope, float]]):
    """The requests, in order, each with the time since when it waits.

    Ordered, because a cancelled request leaves from any position.
    """

    def __init__(
        self, tag: BackendTag, pool: ReplicaPool, clock: Clock, rng: random.Random, watch: WatchModels | None
    ) -> None:
        super().__init__()
        self._tag = tag
        self._pool = pool
        self._clock = clock
        self._rng = rng
        self._watch = watch
        #: Chooses by model; made by the first request that names one.
        self.models: ModelRouting | None = None
        #: Chooses replicas if an option names a router.
        self.routing: RequestRouting | None = None
        #: When the first request gives up to wait for a replica with its model, or a router is asked again;
        #: None if none waits for that.
        self.next_at: float | None = None

    def choose_by(self, published: Mapping[str, Any] | None) -> None:
        """Use the router that the controller has published; None for none."""
        setup = None if published is None else Setup(**published)
        present = self.routing
        if setup == (None if present is None else present.setup):
            return
        if present is not None:
            present.close()
        self.routing = None if setup is None else RequestRouting(setup, self._tag, self._pool, self._rng)

    async def read(self, envelope: Envelope, body: Body) -> None:
        """Show the router the beginning of a request's body."""
        if self.routing is not None:
            await self.routing.read(envelope, body)

    def take(self, envelope: Envelope, since: float | None = None) -> PooledReplica | None:
        """Return the replica for a request, counting one more in flight; None if it has to wait.

        ``since`` says since when it waits; None if it has just arrived.
        """
        now = self._clock.now()
        if self.routing is not None:
            return self._routed(self.routing, envelope, now)
        pick = self._picker(envelope.model_id, now, since) if envelope.model_id else None
        return self._pool.take(now, self._rng, pick)

    def _picker(self, model_id: str, now: float, since: float | None) -> Pick:
        """Return what chooses the replica for a request by its model."""
        return self._known_models().picker(model_id, now, since)

    def _known_models(self) -> ModelRouting:
        if self.models is None:
            self.models = ModelRouting()
            if self._watch is not None:
                self._watch(self.models)
        return self.models

    def _routed(self, routing: RequestRouting, envelope: Envelope, now: float) -> PooledReplica | None:
        """Return the replica that the router of an option chooses, which may know the models."""
        if not envelope.model_id:
            found: PooledReplica | None = routing.take(envelope, now)
            return found
        models = self._known_models()
        routing.show_models(partial(models.models_of, now=now))
        found = routing.take(envelope, now)
        if found is not None:
            models.assume(found.tag, envelope.model_id, now)
        return found

    def ended(self, envelope: Envelope) -> None:
        """Note that a request has ended at a replica; another one may follow."""
        if self.routing is not None:
            self.routing.ended(envelope, self._clock.now())

    @property
    def is_selective(self) -> bool:
        """Whether a request may wait although some replica has room."""
        return self.routing is not None or self.models is not None

    def serve(self, release: Callable[[PooledReplica], None]) -> bool:
        """Give free replicas to the requests, in order; return whether some still wait."""
        if self.is_selective:
            self._serve_selectively(release)
            return bool(self)
        now = self._clock.now()
        while self:
            replica = self._pool.take(now, self._rng)
            if replica is None:
                return True
            waiter, _ = self.popitem(last=False)
            _give(waiter, replica, release)
        return False

    def _serve_selectively(self, release: Callable[[PooledReplica], None]) -> None:
        now, self.next_at = self._clock.now(), None
        passed: set[str] = set()
        left = MAX_ASKED
        for waiter, (envelope, since) in list(islice(self.items(), CONSIDERED)):
            if not left or not has_room(self._pool):
                break  # until a request ends
            model_id = envelope.model_id
            if self.routing is None and model_id in passed:
                continue
            replica = self.take(envelope, since)
            if replica is not None:
                del self[waiter]
                _give(waiter, replica, release)
            elif self.routing is not None:
                left -= 1
            else:
                passed.add(model_id)
                if model_id and now - since < MATCHING_TIMEOUT_S:
                    self._wake_at(since + MATCHING_TIMEOUT_S)
        if self.routing is not None and self:
            self._wake_at(self.routing.ask_again_at)

    def _wake_at(self, at: float | None) -> None:
        if at is not None:
            self.next_at = at if self.next_at is None else min(at, self.next_at)


def _give(
    waiter: asyncio.Future[PooledReplica], replica: PooledReplica, release: Callable[[PooledReplica], None]
) -> None:
    if waiter.done():
        release(replica)
    else:
        waiter.set_result(replica)
