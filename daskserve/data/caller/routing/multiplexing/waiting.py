"""The requests of one process that wait for a replica of a backend, and the choice of a replica for each.

Most go to any replica. A request that names a model waits for a replica that has the model, and a request
router may also select certain replicas. While it waits, later requests may overtake it.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from daskserve.cluster.protocols.base import Cluster
from daskserve.common.clock import Clock
from daskserve.common.types import BackendTag, Envelope, Load, Receive, Send
from daskserve.data.caller.choice import choose
from daskserve.data.caller.pool.pooled_replica import PooledReplica
from daskserve.data.caller.pool.replica_pool import Pick, ReplicaPool, has_room, near
from daskserve.data.caller.request_routers.hedging import Hedging, Sent, no_body, note_sent, sent_to
from daskserve.data.caller.request_routers.interface import Setup, host_of
from daskserve.data.caller.request_routers.priorities import Order, RankedQueue
from daskserve.data.caller.request_routers.routing import (
    Body,
    RequestRouting,
    bound_by,
    take_other,
)
from daskserve.data.caller.routing.load_reports import LoadReports
from daskserve.data.caller.routing.multiplexing.model_load_reporter import ModelLoadReporter
from daskserve.data.caller.routing.multiplexing.model_routing import ModelRouting
from daskserve.data.caller.routing.shadow import SendTo
from daskserve.data.caller.routing.suspects.suspect_queue import SuspectQueue
from daskserve.errors import ActorLostError, ReplicaBusyError

#: Maximum number of waiting requests, and of models, that are considered when a slot becomes free.
CONSIDERED = 4096
MAX_MODELS = 256
#: Maximum number of requests for which a router finds no replica in one round, and the pause until the next
#: round.
MAX_ASKED = 32
ROUND_S = 0.02

Served: TypeAlias = "list[tuple[asyncio.Future[PooledReplica], PooledReplica]]"
#: Releases the replica of a request that has left in the meantime.
Unused: TypeAlias = Callable[[PooledReplica, Envelope], None]
Release: TypeAlias = Callable[[PooledReplica, Load | Exception | None], None]
#: Watches the published models or statistics of the replicas; None ends the watch.
WatchFacts: TypeAlias = Callable[[str, Callable[[Any], None] | None], object]


class WaitingRequests(OrderedDict["asyncio.Future[PooledReplica]", tuple[Envelope, float]]):
    """The requests in order, each with the time when its wait began.

    Ordered, because a cancelled request leaves from any position.
    """

    def __init__(
        self,
        tag: BackendTag,
        pool: ReplicaPool,
        clock: Clock,
        rng: random.Random,
        watch: WatchFacts,
        cluster: Cluster,
        reports: LoadReports,
    ) -> None:
        super().__init__()
        self._reports = reports
        self._tag = tag
        self._pool = pool
        self._clock = clock
        self._rng = rng
        self._watch = watch
        self._here: str = getattr(cluster, "here", "")
        self._model_load_reporter = ModelLoadReporter(cluster, clock)
        #: Chooses replicas by model; created by the first request that names a model.
        self.models: ModelRouting | None = None
        #: Chooses replicas if an option names a router.
        self.routing: RequestRouting | None = None
        #: Sends slow requests to a second replica, if an option enables that.
        self.hedging: Hedging | None = None
        self._order = Order()
        #: Whether priorities are names, which replicas cannot compare without the published order.
        self._names_priorities = False
        #: Whether no option chooses replicas, orders requests or hedges them, so that requests take replicas
        #: from the pool directly.
        self.is_plain = True
        #: The order of the requests, if any of them has a priority or they go by their deadlines.
        self._ranked: RankedQueue[asyncio.Future[PooledReplica]] | None = None
        #: The requests of this round for which the router has found no replica.
        self._asked: set[asyncio.Future[PooledReplica]] = set()
        #: When a request stops waiting for a replica with its model, or a router is asked again; None if
        #: neither will happen.
        self.next_at: float | None = None
        #: The names of priorities that calls may use.
        self.priority_names: Collection[str] = ()
        #: The time at which all requests are considered again, if there are many.
        self._all_at = 0.0

    def choose_by(self, published: Mapping[str, Any] | None) -> None:
        """Use the published request router; if None is published, use no router."""
        setup = None if published is None else Setup(**published)
        current = self.routing
        if setup == (None if current is None else current.setup):
            return
        if current is not None:
            current.close()
        self.routing = None
        if setup is not None:
            self.routing = RequestRouting(setup, self._tag, self._pool, self._rng, host_of(self._here))
        self.is_plain = _is_plain(self)
        routing = self.routing
        report = self._reports.watch_router(self._tag, None if routing is None else routing.current_error)
        self._watch("stats/router", None if routing is None else routing.note_stats)
        if routing is not None:
            routing.errors.on_new = report
            if routing.errors.text:
                report()

    def hedge_by(self, published: Mapping[str, Any] | None) -> None:
        """Hedge requests with the published options, or stop if None is published."""
        if published != (None if self.hedging is None else self.hedging.setup):
            self.hedging = None if published is None else Hedging(**published)
            self.is_plain = _is_plain(self)

    def may_hedge(self, envelope: Envelope) -> bool:
        """Return whether a request gets a second attempt if it takes long."""
        hedging = self.hedging
        return hedging is not None and envelope.routed is None and hedging.covers(envelope)

    async def send_hedged(
        self,
        envelope: Envelope,
        receive: Receive,
        send: Send,
        send_to: SendTo,
        release: Release,
        apart: SuspectQueue,
    ) -> None:
        """Send a request, and send it to a second replica if it takes long.

        A request that may have killed a process, according to ``apart``, does not get one.
        """
        hedging = self.hedging
        if hedging is None:  # the options changed before this began
            return await send_to(envelope, receive, send)
        envelope.routed = Sent()

        outcome: Load | Exception | None = None  # the outcome of the second attempt

        async def try_again(replica: PooledReplica, send: Send) -> None:
            nonlocal outcome
            try:
                outcome = await replica.handle(replace(envelope, call=None)).respond(no_body(), send)
            except (ReplicaBusyError, ActorLostError) as error:
                outcome = error
                apart.note_lost(envelope, replica, error)
                raise

        def second(send: Send) -> tuple[Coroutine[Any, Any, None], Callable[[], None]] | None:
            replica = self._take_other(envelope) if apart.may_repeat(envelope) else None
            return None if replica is None else (try_again(replica, send), lambda: release(replica, outcome))

        await hedging.send(partial(send_to, envelope), second, receive, send)

    def _take_other(self, envelope: Envelope) -> PooledReplica | None:
        """Return a replica with room for the second attempt of a request; None if there is none."""
        tag, now, model_id = sent_to(envelope), self._clock.now(), envelope.model_id
        if not tag or (model_id and self.models is None):
            return None
        if self.routing is not None and not model_id:
            other: PooledReplica | None = take_other(self.routing, envelope, tag, now)
            return other

        def pick(entries: Sequence[PooledReplica]) -> PooledReplica | None:
            others = [each for each in entries if each.index >= 0 and not each.is_full and each.tag != tag]
            if model_id and self.models is not None:  # a second replica must not also load the model
                others = [each for each in others if self.models.has_loaded(each.tag, model_id)]
            return choose(others, now, self._rng) if others else None

        return self._pool.take(now, self._rng, pick)

    def order_by(self, published: Mapping[str, Any] | None) -> None:
        """Order the requests as the controller has published; without an order, by arrival."""
        order = Order() if published is None else Order(**published)
        if order != self._order:
            self._order, self._ranked = order, None
            self._names_priorities = bool(order.header or order.classes)
            self.is_plain = _is_plain(self)
            if self:
                self._rank()

    def close(self) -> None:
        """Stop the request router, and the reports of loading models."""
        self.choose_by(None)
        self._model_load_reporter.close()

    def priority_of(self, envelope: Envelope) -> int:
        """Return the priority of a request; the greatest goes first."""
        return self._order.priority_of(envelope)

    def put(self, waiter: asyncio.Future[PooledReplica], envelope: Envelope, *, is_first: bool) -> None:
        """Add a request; ``is_first`` is for a request that a replica has refused."""
        self[waiter] = envelope, self._clock.now()
        if self._names_priorities:
            self._order.note_priority(envelope)
        if is_first:
            self.move_to_end(waiter, last=False)
        priority = self._order.priority_of(envelope)
        if self._ranked is not None:
            self._ranked.put(waiter, priority, envelope.deadline, is_first=is_first)
            self._ranked.forget_gone(len(self))
        elif priority or self._order.by_deadline:
            self._rank()

    def _rank(self) -> None:
        self._ranked = RankedQueue(self._order, self.__contains__)
        for waiter, (envelope, _) in self.items():
            self._ranked.put(waiter, self._order.priority_of(envelope), envelope.deadline)

    def lower_than(self, envelope: Envelope) -> asyncio.Future[PooledReplica] | None:
        """Return the last request of the lowest priority, if that is below a given request's priority."""
        priority = self._order.priority_of(envelope)
        if self._ranked is None:
            last = next(reversed(self)) if priority > 0 and self else None
            return last
        return self._ranked.lowest_below(priority)

    @property
    def may_overtake(self) -> bool:
        """Whether a request may enter a full queue in the place of one with a lower priority."""
        return bool(self._order.header) or self._ranked is not None

    async def read(self, envelope: Envelope, body: Body) -> None:
        """Let the request router see the beginning of a request's body."""
        if self.routing is not None:
            await self.routing.read(envelope, body)

    def take(self, envelope: Envelope, since: float | None = None) -> PooledReplica | None:
        """Return the replica for a request, counting one more in flight; None if it has to wait.

        ``since`` is when the request began to wait; None if it has just arrived.
        """
        now = self._clock.now()
        if self._names_priorities:
            self._order.note_priority(envelope)
        if self.routing is not None:
            return self._routed(self.routing, envelope, now, since)
        found = self._pool.take(now, self._rng, _plain_pick(self, envelope, now, since))
        if found is not None and envelope.routed is not None:
            note_sent(envelope, found.tag)
        return found

    def _known_models(self) -> ModelRouting:
        if self.models is None:
            self.models = ModelRouting(self._model_load_reporter.note)
            self._watch("models", self.models.update)
        return self.models

    def _routed(
        self, routing: RequestRouting, envelope: Envelope, now: float, since: float | None
    ) -> PooledReplica | None:
        """Return the replica that the request router chooses."""
        found: PooledReplica | None
        if not envelope.model_id and envelope.places is None:
            found = routing.take(envelope, now)
            return found
        if envelope.model_id:
            models = self._known_models()
            routing.show_models(partial(models.models_of, now=now))
        found = routing.take(envelope, now, partial(_plain_pick, self, envelope, now, since))
        if found is not None and envelope.model_id:
            models.assume(found.tag, envelope.model_id, now)
        return found

    def ended(self, envelope: Envelope, outcome: Load | Exception | None) -> None:
        """Record how a request has ended at a replica; None if that is unknown. Idempotent."""
        note_sent(envelope, "")
        if self.routing is not None:
            self.routing.ended(envelope, self._clock.now(), outcome)

    @property
    def is_selective(self) -> bool:
        """Whether a request may wait although some replica has room."""
        return self.routing is not None or self.models is not None

    def serve(self, release: Unused) -> bool:
        """Assign free replicas to the requests, in order; return whether some still wait."""
        if self.is_selective:
            self._serve_selectively(release)
            return bool(self)
        now = self._clock.now()
        while self:
            replica = self._pool.take(now, self._rng)
            if replica is None:
                return True
            waiter = None if self._ranked is None else self._ranked.pop()
            if waiter is None:
                waiter = next(iter(self))
            envelope, _ = self.pop(waiter)
            _give(waiter, replica, envelope, release)
        self._ranked = None  # created again by the next request with a priority
        return False

    def _serve_selectively(self, release: Unused) -> None:
        self.next_at = None
        served: Served = []
        try:
            if self.routing is None:
                self._choose_by_model(served)
            else:
                self._ask(self.routing, served)
        finally:
            for waiter, replica in served:
                envelope, _ = self.pop(waiter)
                if self._ranked is not None:
                    self._ranked.note_served(self._order.priority_of(envelope))
                _give(waiter, replica, envelope, release)
            if not self:
                self._ranked = None  # created again by the next request with a priority

    def _in_order(self, now: float) -> Iterable[asyncio.Future[PooledReplica]]:
        """Return the requests to consider: usually the first ones, and all of them from time to time.

        At the front, there may be many requests of one session or model that cannot be served now.
        """
        found = self if self._ranked is None else self._ranked.first()
        if len(self) <= CONSIDERED:
            return found
        if now >= self._all_at:
            self._all_at = now + ROUND_S * len(self) / CONSIDERED
            return found
        self._wake_at(self._all_at)
        return islice(found, CONSIDERED)

    def _choose_by_model(self, served: Served) -> None:
        now = self._clock.now()
        passed: set[str] = set()
        for waiter in self._in_order(now):
            if len(passed) == MAX_MODELS or not has_room(self._pool, now):
                break  # nothing changes until a request ends
            envelope, since = self[waiter]
            model_id = envelope.model_id
            if model_id in passed:
                continue
            replica = self.take(envelope, since)
            if replica is not None:
                served.append((waiter, replica))
                continue
            passed.add(model_id)
            if model_id and self.models is not None:
                until = since + self.models.matching_timeout_s
                self._wake_at(until if now < until else None)

    def _ask(self, routing: RequestRouting, served: Served) -> None:
        """Call the request router for requests that wait; each round covers other requests, until all have
        had a turn."""
        passed: set[str] = set()
        left, has_skipped = MAX_ASKED, False
        routing.ask_again_at = None
        now = self._clock.now()
        for waiter in self._in_order(now):
            if not left or not has_room(self._pool, now):
                break
            envelope, since = self[waiter]
            session = bound_by(routing, envelope)
            if waiter in self._asked or session in passed:
                has_skipped |= not session
                continue
            replica = self.take(envelope, since)
            if replica is not None:
                served.append((waiter, replica))
                continue
            left -= 1
            if session:
                passed.add(session)
            else:
                self._asked.add(waiter)
        else:
            left = not has_skipped
            self._asked.clear()
        if not left:
            self._wake_at(self._clock.now() + ROUND_S)
        self._wake_at(routing.ask_again_at)

    def _wake_at(self, at: float | None) -> None:
        if at is not None:
            self.next_at = at if self.next_at is None else min(at, self.next_at)


def configure(waiting: WaitingRequests, published: Mapping[str, Any], replicas: Collection[str]) -> None:
    """Apply the options that the controller has published, before the pool has the new replicas."""
    old = waiting._pool.entries()
    # A new deployment of this name starts with a new router, without the errors of a deleted one. An update
    # may cover both changes; then it replaces all replicas.
    if old and old.keys().isdisjoint(replicas):
        waiting.choose_by(None)
    waiting.choose_by(None if "ending" in published else published.get("router"))
    waiting.order_by(published.get("order"))
    waiting.hedge_by(published.get("hedging"))
    waiting.priority_names = waiting._order.classes.keys()


def _is_plain(waiting: WaitingRequests) -> bool:
    return waiting.routing is None and waiting.hedging is None and not waiting._names_priorities


def _plain_pick(waiting: WaitingRequests, envelope: Envelope, now: float, since: float | None) -> Pick | None:
    """Return the choice of the replica for a request without a router; None to choose by load only."""
    if envelope.model_id:
        return waiting._known_models().picker(envelope.model_id, now, since)
    return None if envelope.places is None else near(waiting._pool, envelope.places, now, waiting._rng)


def _give(
    waiter: asyncio.Future[PooledReplica], replica: PooledReplica, envelope: Envelope, release: Unused
) -> None:
    if waiter.done():
        release(replica, envelope)
    else:
        note_sent(envelope, replica.tag)
        waiter.set_result(replica)
