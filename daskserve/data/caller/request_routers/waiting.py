"""The requests of one process that wait for a replica of a backend."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from daskserve.common.clock import Clock
from daskserve.common.types import BackendTag, Envelope
from daskserve.data.caller.request_routers.interface import Setup
from daskserve.data.caller.request_routers.routing import Body, Pool, RequestRouting

#: How many requests that wait for certain replicas are passed over for others when one has room.
CONSIDERED = 32


class WaitingRequests(OrderedDict["asyncio.Future[Any]", Envelope]):
    """The requests, in order, and the choice of a replica for each of them.

    Ordered, because a cancelled request leaves from any position.

    Parameters
    ----------
    has_room : callable
        Returns whether any replica may take a request.
    """

    def __init__(
        self, tag: BackendTag, pool: Pool, clock: Clock, rng: random.Random, has_room: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._tag = tag
        self._pool = pool
        self._clock = clock
        self._rng = rng
        self._has_room = has_room
        #: Chooses replicas if an option names a router.
        self.routing: RequestRouting | None = None
        #: Whether the router looks at the bodies of HTTP requests.
        self.wants_body = False

    def choose_by(self, published: Mapping[str, Any] | None) -> None:
        """Use the router that the controller has published; None for none."""
        setup = None if published is None else Setup(**published)
        present = self.routing
        if setup == (None if present is None else present.setup):
            return
        if present is not None:
            present.close()
        self.routing = None if setup is None else RequestRouting(setup, self._tag, self._pool, self._rng)
        self.wants_body = setup is not None

    async def read(self, envelope: Envelope, body: Body) -> None:
        """Show the router the beginning of a request's body."""
        if self.routing is not None:
            await self.routing.read(envelope, body)

    def take(self, envelope: Envelope) -> Any:
        """Return the replica for a request, counting one more in flight; None if it has to wait."""
        if self.routing is None:
            return self._pool.take(self._clock.now(), self._rng)
        return self.routing.take(envelope, self._clock.now())

    def ended(self, envelope: Envelope) -> None:
        """Note that a request has ended at a replica; another one may follow."""
        if self.routing is not None:
            self.routing.ended(envelope, self._clock.now())

    @property
    def next_at(self) -> float | None:
        """When to serve again although nothing has happened; None for no such time."""
        return None if self.routing is None or not self else self.routing.ask_again_at

    def serve(self, release: Callable[[Any], None]) -> bool:
        """Give free replicas to the requests, in order; return whether some still wait.

        With a router, those that wait for certain replicas are passed over.
        """
        if self.routing is not None:
            self._serve_chosen(release)
            return bool(self)
        now = self._clock.now()
        while self:
            replica = self._pool.take(now, self._rng)
            if replica is None:
                return True
            waiter, _ = self.popitem(last=False)
            _give(waiter, replica, release)
        return False

    def _serve_chosen(self, release: Callable[[Any], None]) -> None:
        left = CONSIDERED
        for waiter, envelope in list(islice(self.items(), 4 * CONSIDERED)):
            if not left or not self._has_room():
                return
            replica = self.take(envelope)
            if replica is None:
                left -= 1
            else:
                del self[waiter]
                _give(waiter, replica, release)


def _give(waiter: asyncio.Future[Any], replica: Any, release: Callable[[Any], None]) -> None:
    if waiter.done():
        release(replica)
    else:
        waiter.set_result(replica)
