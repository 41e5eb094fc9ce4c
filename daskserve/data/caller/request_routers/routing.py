"""Chooses replicas with the request router that an option names.

A built-in router runs where requests are sent. A router of the user is loaded and runs in its own thread
(`daskserve.data.caller.request_routers.thread`). Until it is loaded, and whenever it raises an error, is late
or returns no valid answer, requests are routed as without a router. Each kind of failure is logged once, and
all failures are counted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from types import NoneType
from typing import Any, Protocol, TypeAlias

from daskserve.common.clock import seeded_rng
from daskserve.common.types import (
    ON_DEMAND,
    BackendTag,
    Envelope,
    EnvelopeKind,
    Load,
    Message,
    Send,
)
from daskserve.data.caller.pool.pooled_replica import PooledReplica
from daskserve.data.caller.pool.replica_pool import ReplicaPool
from daskserve.data.caller.request_routers.errors import RouterErrors
from daskserve.data.caller.request_routers.hashing import ConsistentHashRouter
from daskserve.data.caller.request_routers.interface import (
    DeploymentID,
    PendingRequest,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
    Setup,
)
from daskserve.data.caller.request_routers.loading import BUILT_IN, load_router
from daskserve.data.caller.request_routers.thread import RouterError, RouterThread
from daskserve.data.caller.sessions import session_in
from daskserve.errors import ReplicaBusyError
from daskserve.options.fields.pickled import PICKLED
from daskserve.payload.error_text import summary_of
from daskserve.telemetry.table import MetricSample

logger = logging.getLogger("daskserve.router")

#: A failure counts as a latency of at least this multiple of the mean of all replicas, up to a maximum.
FAILED_FACTOR = 3.0
MAX_FAILED_S = 60.0
#: Maximum length of an answer, as a multiple of the number of replicas; the rest is ignored.
MAX_NAMED = 10


#: Chooses one of the replicas that are not suspended, or none.
Pick: TypeAlias = Callable[[Sequence[Any]], Any]


def _any() -> None:
    """Choose a replica by its load alone."""


class Body(Protocol):
    """The body of an HTTP request."""

    async def peek(self) -> bytes:
        """Return its first part, without consuming it."""


class RequestRouting:
    """Chooses the replicas of one deployment for one process."""

    def __init__(
        self,
        setup: Setup,
        tag: BackendTag,
        pool: ReplicaPool,
        rng: random.Random,
        self_node_id: str = "",
    ) -> None:
        self.setup = setup
        #: When to call the router again, because it has chosen no replica.
        self.ask_again_at: float | None = None
        self._attempts = 0
        self._tag = tag
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._rng = rng
        self._deployment = DeploymentID.of(tag)
        self._seen: object = None
        self._replicas: list[RunningReplica] = []
        self._stats: Mapping[str, Mapping[str, Any]] = {}
        self._known: dict[str, RunningReplica] = {}
        shown = "" if setup.router.startswith(PICKLED) else f" {setup.router}"
        self.errors = RouterErrors(f"the request router{shown}", tag, self._loop.time)
        self._thread: RouterThread | None = None
        self._router: RequestRouter | None = None
        self._notes_routed = self._notes_completed = False
        self._made = partial(
            self._new_router, self_node_id=self_node_id, count_ongoing=lambda: pool.in_flight
        )
        kind = BUILT_IN.get(setup.router)
        if kind is not None:
            try:
                self._ready(self._made(kind))
            except Exception as error:  # the kwargs were checked by another version
                self.errors.note(RouterError("load", f"cannot be made: {summary_of(error)}"))
        else:
            self._thread = RouterThread(f"daskserve-router-{tag}")
            self._thread.post(self._load, setup.router)

    # ---- creating the router

    def _new_router(self, kind: type[RequestRouter], **more: Any) -> RequestRouter:
        router = kind(self._deployment, rng=seeded_rng(self._rng.getrandbits(64)), **more)
        router.initialize_state(**self.setup.kwargs)
        return router

    def _load(self, named: str) -> None:
        """Create a user's router, in its thread."""
        try:
            router = self._made(load_router(named))
        except BaseException as error:  # SystemExit would end the thread
            text = f"cannot be loaded: {summary_of(error)}"
            self._post(self.errors.note, RouterError("load", text))
        else:
            self._post(self._ready, router)

    def _post(self, function: Callable[..., object], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _ready(self, router: RequestRouter) -> None:
        self._router = router
        self._notes_routed = _has_own(router, "on_request_routed")
        self._notes_completed = _has_own(router, "on_request_completed")
        self._seen = None

    def close(self) -> None:
        """Stop the router."""
        self._router = None
        if self._thread is not None:
            self._thread.close()

    # ---- choosing

    def note_stats(self, stats: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Apply the results of the replicas' ``record_routing_stats``."""
        self._stats = stats or {}
        self._show_facts()

    def _show_facts(self) -> None:
        for tag, each in self._known.items():
            each.routing_stats = self._stats.get(tag, {})

    def show_models(self, models_of: Callable[[str], frozenset[str]]) -> None:
        """Set the multiplexed models of each known replica; ``models_of`` takes a replica's tag."""
        for tag, each in self._known.items():
            each.multiplexed_model_ids = models_of(tag)

    def request_of(self, envelope: Envelope) -> PendingRequest:
        """Return the request in the form for routers; created once, and kept in the envelope."""
        found = envelope.routed
        if type(found) is not PendingRequest:
            found = PendingRequest(envelope, self._session_of(envelope), self._loop.time())
            found.session_place = self.setup.session
            envelope.routed = found
        elif found.session_place != self.setup.session:  # the options have changed while it waits
            found.metadata.session_id = self._session_of(envelope)
            found.session_place = self.setup.session
        return found

    async def read(self, envelope: Envelope, body: Body) -> None:
        """Read the beginning of a request's body if the router has ``wants_body``."""
        router = self._router
        if router is not None and router.wants_body and envelope.has_body is not ON_DEMAND:
            self.request_of(envelope).body = await body.peek()

    def take(self, envelope: Envelope, now: float, other: Callable[[], Pick | None] = _any) -> Any:
        """Return the replica for a request, counting one more in flight; None if it has to wait.

        ``other`` returns the choice that is made without a router.
        """
        request = self.request_of(envelope)
        request.replica = None
        if self._router is None or (self._thread is not None and not self._thread.is_usable):
            if self.errors.text:  # otherwise the router is still being loaded
                self.errors.count("load" if self._router is None else "late")
            return _take_without(self, other(), now)
        try:
            taken = self._pool.take(now, self._rng, lambda _: self._pick(request))
        except RouterError as error:
            self.errors.note(error)
            self.errors.count(error.kind)
            return _take_without(self, other(), now)
        if taken is None:
            return None
        chosen = request.replica = self._known[taken.tag]
        request.sent_at, request.sent_by = now, self
        self._attempts = 0
        if self._notes_routed:
            result = ReplicaResult(chosen.replica_id, request.metadata.request_id)
            self._notify(self._router.on_request_routed, request, chosen.replica_id, result)
        return taken

    def _pick(self, request: PendingRequest, but: str = "") -> PooledReplica | None:
        router = self._router
        assert router is not None
        entries = self._pool.entries()
        if entries is not self._seen:
            self._note_replicas(entries, router)
        if not self._replicas:
            return None
        if self._thread is not None:
            return self._best_of(self._thread.ask(self._choose, router, request), but)
        try:
            ranks = router.choose_replicas(self._replicas, request)
        except Exception as error:  # a request may contain anything
            raise RouterError("error", f"raised {summary_of(error)}") from error
        return self._best_of(ranks, but)

    def _choose(self, router: RequestRouter, request: PendingRequest) -> list[list[Any]]:
        """Return the answer of a user's router as lists; runs in its thread."""
        try:
            # a copy, because the router may change the list
            ask = partial(router.choose_replicas, [*self._replicas], request)
            found = ask()
            if isinstance(found, Coroutine):
                assert self._thread is not None
                found = self._thread.finished(found, ask)
        except BaseException as error:  # user code may raise anything, even SystemExit
            raise RouterError("error", f"raised {summary_of(error)}") from error
        try:
            left = MAX_NAMED * max(len(self._replicas), 1)
            ranks: list[list[Any]] = []
            for each in islice(found, left):
                ranks.append(list(islice(each, left)))
                left -= len(ranks[-1])
            return ranks
        except BaseException as error:
            text = f"returned {type(found).__name__}, which is not a list of lists of replicas: "
            raise RouterError("answer", text + summary_of(error)) from error

    def _best_of(self, ranks: Any, but: str = "") -> PooledReplica | None:
        """Return the least loaded replica with room of the first list that has one.

        If all are full with requests of other processes, the request queues at one of them. ``but`` is the
        replica of the first attempt: a second attempt needs another one, with room.
        """
        now = self._loop.time()
        waiting: PooledReplica | None = None
        is_empty = True
        for rank in ranks:
            best, least = None, 0.0
            for each in rank:
                if type(each) is not RunningReplica:
                    raise RouterError("answer", f"chose {each!r:.120}, which is not a replica")
                known = self._known.get(each._entry.tag)  # a router may return copies
                if known is None:
                    continue  # the replica has stopped in the meantime
                entry = known._entry
                is_empty = False
                if entry.index < 0 or entry.tag == but:
                    continue  # the replica has stopped in the meantime, or is excluded
                if entry.is_full:
                    waiting = waiting or entry
                    continue
                load = entry.score(now)
                if best is None or load < least:
                    best, least = entry, load
            if best is not None:
                return best
        if but:
            return None
        if is_empty:
            self._wait_to_ask()
        return waiting

    def _wait_to_ask(self) -> None:
        """Set when a router that has named no replica is asked again, even without an event."""
        setup = self.setup
        pause_s = min(setup.initial_backoff_s * setup.backoff_multiplier**self._attempts, setup.max_backoff_s)
        self._attempts = min(self._attempts + 1, 100)
        self.ask_again_at = self._loop.time() + pause_s

    def _note_replicas(self, entries: Mapping[str, PooledReplica], router: RequestRouter) -> None:
        known = self._known
        self._known = {
            tag: each
            if (each := known.get(tag)) is not None and each._entry is entry
            else RunningReplica(entry, self._deployment, self._loop.time)
            for tag, entry in entries.items()
        }
        self._show_facts()
        self._replicas = list(self._known.values())
        self._seen = entries
        self._notify(router.update_replicas, [*self._replicas])

    def moved(self, envelope: Envelope, tag: str) -> None:
        """Record the replica of a request, which may not be the one that the router chose."""
        request = envelope.routed
        if type(request) is PendingRequest and request.replica is not None and request.sent_by is self:
            request.replica = self._known.get(tag)

    def ended(self, envelope: Envelope, now: float, outcome: Load | Exception | None) -> None:
        """Record how a request has ended at a replica; None if the end says nothing about the replica.

        The request may be sent again. Idempotent.
        """
        request = envelope.routed
        if type(request) is not PendingRequest:
            return  # the request began before there was a router
        replica, request.replica = request.replica, None
        if replica is None or request.sent_by is not self:
            return  # an earlier router has chosen the replica
        latency_s, took_s = replica.latency_s, now - request.sent_at
        is_good = type(outcome) is Load and not request.has_failed
        if not is_good and (request.has_failed or type(outcome) not in (NoneType, ReplicaBusyError)):
            # Failing requests end quickly, but must not make a failing replica look fast. There may be no
            # replicas.
            mean_s = sum(each.latency_s for each in self._replicas) / (len(self._replicas) or 1)
            took_s = max(took_s, min(FAILED_FACTOR * mean_s, MAX_FAILED_S))
        # The weight of a user's router is not used, because a wrong value would fail the request.
        router: Any = RequestRouter if self._router is None or self._thread is not None else self._router
        weight = router.latency_weight
        changed = latency_s + (weight if latency_s else 1.0) * (took_s - latency_s)
        replica.latency_s = changed if is_good else max(latency_s, changed)
        request.has_failed = False
        if self._notes_completed and self._router is not None:
            self._notify(self._router.on_request_completed, replica.replica_id, request.metadata.request_id)

    def _notify(self, function: Callable[..., Any], *args: Any) -> None:
        if self._thread is None:
            self._call(function, *args)
        else:
            self._thread.post(self._call, function, *args)

    def _call(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:  # user code may raise anything, even SystemExit
            text = f"raised {summary_of(error)} in {getattr(function, '__name__', 'a method')}"
            self._post(self.errors.note, RouterError("error", text))

    # ---- errors

    def current_error(self) -> str:
        """Return the current failure of the router; empty if there is none."""
        return self.errors.current(is_made=self._router is not None)

    def samples(self, labels: tuple[str, ...]) -> list[MetricSample]:
        """Return the metric samples."""
        return self.errors.samples(labels)

    # ---- sessions

    def _session_of(self, envelope: Envelope) -> str:
        if envelope.kind is not EnvelopeKind.HTTP:
            return str(envelope.head.get("facts", {}).get("session_id", ""))
        found = session_in(envelope.head.get("headers", ()), self.setup.session)
        ours = envelope.head.get("extensions", {}).get("daskserve")
        if ours is not None and found != ours.get("session_id", ""):
            ours["session_id"] = found  # for user code
        return found


def bound_by(routing: RequestRouting, envelope: Envelope) -> str:
    """Return the session of a request if it alone decides which replicas may get it; otherwise empty."""
    is_by_session = BUILT_IN.get(routing.setup.router) is ConsistentHashRouter
    return routing.request_of(envelope).metadata.session_id if is_by_session else ""


def noting_failure(routing: RequestRouting, envelope: Envelope, send: Send) -> Send:
    """Return a function that passes on the messages of a response, and records a status of 500 or more."""
    if envelope.kind is not EnvelopeKind.HTTP:
        return send
    request = routing.request_of(envelope)

    def noting(message: Message) -> Awaitable[None]:
        if message.get("status", 0) >= 500:
            request.has_failed = True
        return send(message)

    return noting


def _take_without(routing: RequestRouting, pick: Pick | None, now: float) -> Any:
    taken = routing._pool.take(now, routing._rng, pick)
    if taken is None and pick is not None:
        routing._wait_to_ask()  # the router's choice depends on the time
    return taken


def take_other(routing: RequestRouting, envelope: Envelope, tag: str, now: float) -> Any:
    """Return a replica that the router chooses for a second attempt, counting one more in flight there.

    ``tag`` is the replica of the first attempt, which is excluded. Returns None if there is no other replica.
    """
    request = routing.request_of(envelope)
    thread = routing._thread
    if routing._router is None or (thread is not None and not thread.is_usable):
        return None
    try:
        return routing._pool.take(now, routing._rng, lambda _: routing._pick(request, tag))
    except RouterError as error:
        routing.errors.note(error)
        routing.errors.count(error.kind)
        return None


def _has_own(router: RequestRouter, method: str) -> bool:
    """Return whether a router's class overrides a method of `RequestRouter`."""
    return getattr(type(router), method) is not getattr(RequestRouter, method)
