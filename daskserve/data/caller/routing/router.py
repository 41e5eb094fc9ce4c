"""Routers, which send an endpoint's requests to running replicas through a bounded queue.

One `Routers` per process and instance holds a `Router` per endpoint and a `ReplicaSet` per backend. The
requests of a process to a backend are thus counted in one place. Updates arrive by long poll; the last known
state stays in use while the controller is down.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from daskserve.cluster.protocols.base import Cluster, Listener, Routes
from daskserve.common.clock import Clock
from daskserve.common.formatting import shown
from daskserve.common.types import (
    SILENT_WORKERS,
    TRACING,
    ActorAddress,
    BackendTag,
    BodyUse,
    EndpointTag,
    Envelope,
    Reachability,
    Receive,
    Send,
    WorkerAddress,
    short_tag,
)
from daskserve.data.caller.body_rules import BodyLimits, combined
from daskserve.data.caller.choice import TrafficPolicy, shard_draw
from daskserve.data.caller.mapping.backlogs import backlogs, batches_of
from daskserve.data.caller.routing.controller_watch import ControllerWatch
from daskserve.data.caller.routing.load_reports import LoadReports
from daskserve.data.caller.routing.metrics import CallMetrics
from daskserve.data.caller.routing.replica_set import ReplicaSet, check_queue
from daskserve.data.caller.routing.shadow import Shadow, ShadowBudget, ShadowResponse, send_with_copies
from daskserve.data.caller.routing.suspects.suspects import Suspects
from daskserve.data.caller.routing.versions import OLD, Versions, backend_of, candidate_of
from daskserve.data.caller.routing.waiting_calls import WaitingCalls
from daskserve.errors import NotFoundError, RequestTimeoutError, ServeError, UnavailableError
from daskserve.loops.tasks import TaskSet
from daskserve.telemetry.live import LIVE_METRICS
from daskserve.telemetry.table import MetricSample

#: The key of the share of calls that begin a trace, in the shared state of an instance and process.
SAMPLING = "sampling_ratio"
#: How long a request waits for the first update of its endpoint.
ENDPOINT_TIMEOUT_S = 10.0
#: Number of deleted endpoints and backends that a process remembers, so that calls of them fail at once.
MAX_DELETED = 200
#: Maximum number of deployments whose calls to one endpoint are counted separately in one process.
MAX_CALLERS = 1000

logger = logging.getLogger("daskserve.router")


class Router:
    """Sends the requests of one endpoint."""

    def __init__(self, endpoint: EndpointTag, routers: Routers) -> None:
        self.endpoint = endpoint
        self._routers = routers
        self._policy: TrafficPolicy | None = None
        #: The replica set of all requests, if there is only one set and the endpoint has no shadows.
        self.only: ReplicaSet | None = None
        #: Whether the endpoint's backends get a classic ``ServeRequest`` instead of the caller's arguments.
        self.is_legacy = True
        #: The state of the endpoint that the controller published last; None if unknown or deleted.
        self.published: Any = None
        self._changed = asyncio.Event()
        self._is_deleted = False
        #: The metrics of handle calls by the deployment that calls; "" for other code.
        self.calls: dict[BackendTag, CallMetrics] = {"": CallMetrics()}

    @property
    def backends(self) -> frozenset[BackendTag]:
        """The backends with traffic or copies of requests, as far as known."""
        return frozenset() if self._policy is None else self._policy.backends

    @property
    def is_known(self) -> bool:
        """Whether requests can be sent at once."""
        return self._policy is not None and not self._is_deleted

    @property
    def is_deleted(self) -> bool:
        """Whether the endpoint is known not to exist."""
        return self._is_deleted

    def calls_of(self, caller: BackendTag) -> CallMetrics:
        """Return the metrics of the calls of a deployment's code."""
        found = self.calls.get(caller)
        if found is None:
            if len(self.calls) >= MAX_CALLERS:
                return self.calls[""]
            found = self.calls[caller] = CallMetrics()
        return found

    def body_rules(self, default_max_bytes: int) -> tuple[BodyUse, int] | None:
        """Return how the bodies of HTTP requests are read, and their maximum size; None if not known yet.

        A request's backend is drawn later, so the rules of all backends are combined.
        """
        only = self.only
        if only is not None and only.bodies is not None:  # the usual case
            return only.bodies, default_max_bytes if only.max_body_bytes is None else only.max_body_bytes
        known = [self._routers.replica_set(each) for each in self.backends]
        sets = (*known, *(each.candidate for each in known))
        rules = [(each.bodies, each.max_body_bytes) for each in sets if each is not None]
        return None if self._policy is None and not self._is_deleted else combined(rules, default_max_bytes)

    async def wait_until_published(self) -> None:
        """Wait until the endpoint and its backends are known; raise the errors of `wait_until_known`."""
        await self.wait_until_known()
        for each in self.backends:
            await self._routers.replica_set(each).wait_until_known()

    def check_queue(self) -> None:
        """Raise `BackPressureError` if no further request may wait, as far as known."""
        if self.only is not None and self.only.waiting:
            check_queue(self.only)

    @property
    def has_choice(self) -> bool:
        """Whether a request may go to one of several replicas."""
        return self.only is None or self.only.pool.size > 1

    @property
    def is_crowded(self) -> bool:
        """Whether requests wait for a slot."""
        return any(self._routers.replica_set(each).waiting for each in self.backends)

    def update(self, value: Any) -> None:
        """Apply the state of the endpoint that the controller published."""
        self._is_deleted = value is None
        self.published = value
        if value is not None:
            self.is_legacy = value["legacy"]
            self._policy = policy = TrafficPolicy(value["traffic"], value["shadows"])
            for backend in policy.backends:
                self._routers.replica_set(backend)
        self.find_only()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def find_only(self) -> None:
        """Set `only`; called when the endpoint changes, and when a rollout of a backend begins or ends."""
        self.only, policy = None, self._policy
        if not self._is_deleted and policy is not None and policy.only is not None and not policy.has_shadows:
            only = self._routers.replica_set(policy.only)
            self.only = only if only.versions is None else None

    async def wait_until_known(self) -> None:
        """Wait until the endpoint is known.

        Raises
        ------
        NotFoundError
            It does not exist.
        DeploymentUnavailableError, DeploymentIsBeingDeletedError
            Its deployment failed to deploy, or is being deleted.
        """
        while self._policy is None and not self._is_deleted:
            try:
                await self._routers.clock.wait_for(self._changed.wait(), ENDPOINT_TIMEOUT_S)
            except TimeoutError:
                raise RequestTimeoutError(
                    f"The controller sent no update of endpoint '{short_tag(self.endpoint)}' for "
                    f"{shown(ENDPOINT_TIMEOUT_S)} s; it may be restarting, try again."
                ) from None
        if self._is_deleted:
            raise self._gone()

    def _gone(self) -> ServeError:
        """Return the error for requests to an endpoint that was deleted or never existed."""
        for backend in self._policy.backends if self._policy is not None else ():
            if (error := self._routers.replica_set(backend).availability.ending_error()) is not None:
                return error
        return NotFoundError(f"Endpoint '{short_tag(self.endpoint)}' does not exist.")

    def replica_sets(self) -> list[ReplicaSet]:
        """Return the replica sets of all backends with traffic."""
        return [self._routers.replica_set(each) for each in (self._policy.active if self._policy else ())]

    async def replicas(self) -> list[ActorAddress]:
        """Return the addresses of the running replicas of all backends with traffic."""
        return [address for each in self.replica_sets() for address in await each.addresses()]

    def send(
        self, envelope: Envelope, receive: Receive, send: Send, *, shard_key: str = ""
    ) -> Coroutine[Any, Any, None]:
        """Send a request to a replica of one of the endpoint's backends."""
        if self.only is not None:
            return self.only.send(envelope, receive, send)
        policy = self._policy
        if policy is None or self._is_deleted:
            return self._send_when_known(envelope, receive, send, shard_key)
        backend, rng = policy.only, self._routers.rng
        if backend is None:
            backend = policy.draw(shard_draw(shard_key) if shard_key else rng.random())
            if backend is None:
                raise UnavailableError(
                    f"Endpoint '{short_tag(self.endpoint)}' has no backend with traffic.", is_public=True
                )
        shadows = policy.shadows(rng) if policy.has_shadows else None
        if shadows:
            return self._send_with_copies(backend, shadows, envelope, receive, send, shard_key)
        return self._send_to(backend, envelope, receive, send, shard_key)

    def _send_to(
        self, backend: BackendTag, envelope: Envelope, receive: Receive, send: Send, shard_key: str
    ) -> Coroutine[Any, Any, None]:
        """Send a request to a backend, to one of its versions if there are two."""
        replicas = self._routers.replica_set(backend)
        if replicas.versions is None:
            return replicas.send(envelope, receive, send)
        versions, rng = replicas.versions, self._routers.rng
        chosen = versions.choose(envelope, shard_key, rng)
        if chosen == OLD and replicas.candidate is not None and versions.is_copied(envelope, rng):
            send_copy = partial(self._routers.send_shadow, replicas.candidate.tag, envelope)
            return versions.send_compared(send_copy, envelope, receive, send)
        return versions.send(chosen, envelope, receive, send)

    async def _send_when_known(
        self, envelope: Envelope, receive: Receive, send: Send, shard_key: str
    ) -> None:
        await self.wait_until_known()
        await self.send(envelope, receive, send, shard_key=shard_key)

    async def _send_with_copies(
        self,
        backend: BackendTag,
        shadows: list[BackendTag],
        envelope: Envelope,
        receive: Receive,
        send: Send,
        shard_key: str,
    ) -> None:
        if envelope.is_direct:
            envelope = replace(envelope, is_direct=False)  # the copies need the messages
        copies = [self._routers.send_shadow(shadow, envelope) for shadow in shadows]
        send_to = partial(self._send_to, backend, shard_key=shard_key)
        await send_with_copies(copies, send_to, envelope, receive, send)


class Routers:
    """All routers of one process for one instance. Runs on one event loop."""

    def __init__(
        self,
        cluster: Cluster,
        listener: Listener,
        clock: Clock,
        rng: random.Random,
        routes: Routes,
        waiting_calls: WaitingCalls,
        shared: dict[str, Any],
    ) -> None:
        self._shared = shared
        self.clock = clock
        self.rng = rng
        self._cluster = cluster
        self._listener = listener
        self._waiting_calls = waiting_calls
        self._routers: dict[EndpointTag, Router] = {}
        self._sets: dict[BackendTag, ReplicaSet] = {}
        #: The keys of the endpoints and backends that were deleted, the oldest first.
        self._deleted: dict[str, None] = {}
        #: Functions that stop watching a published value, by its key.
        self._watches: dict[str, Callable[[], None]] = {}
        self.body_limits = BodyLimits()
        self._shadows = TaskSet(logger)
        self._shadow_budget = ShadowBudget()
        self._reports = LoadReports(
            cluster,
            clock,
            self._sets,
            lambda: {tag: each.calls for tag, each in self._routers.items()},
            lambda: backlogs(batches_of(self._shared), lambda tag: self.router(tag).backends),
        )
        self._controller_watch = ControllerWatch(listener, clock, self._starving)
        #: The workers that do not answer the controller.
        self._silent: frozenset[WorkerAddress] = frozenset()
        self._routes = routes
        routes.watch(self._note_route, self._uses_worker)
        self._watches[TRACING] = listener.watch(TRACING, self._note_sampling)
        self._watches[SILENT_WORKERS] = listener.watch(SILENT_WORKERS, self._note_silent)
        self._watches[LIVE_METRICS] = listener.watch(LIVE_METRICS, self._reports.note_watched)
        #: The requests under which processes were lost, to all backends.
        self.suspects = Suspects()
        listener.on_worker_left(self._forget_worker)
        listener.on_ended(self.close)

    async def start(self) -> None:
        """Start to listen for updates; idempotent."""
        await self._listener.start()

    def router(self, endpoint: EndpointTag) -> Router:
        """Return the router of an endpoint; the first call creates it."""
        router = self._routers.get(endpoint)
        if router is None:
            router = self._routers[endpoint] = Router(endpoint, self)
            key = f"endpoint/{endpoint}"
            self._watch(key, router.update)
        return router

    def _watch(self, key: str, update: Callable[[Any], None]) -> None:
        """Watch an endpoint or a backend, and forget those that were deleted long ago."""

        def note(value: Any) -> None:
            update(value)
            self._deleted.pop(key, None)
            if value is None:
                self._deleted[key] = None
                if len(self._deleted) > MAX_DELETED:
                    oldest = next(iter(self._deleted))
                    del self._deleted[oldest]
                    kind, _, tag = oldest.partition("/")
                    self.forget(tag) if kind == "endpoint" else self._forget_unused([tag])

        self._watches[key] = self._listener.watch(key, self.body_limits.watched(key, note))

    def send(
        self, endpoint: EndpointTag, envelope: Envelope, receive: Receive, send: Send
    ) -> Coroutine[Any, Any, None]:
        """Send a request of the ingress to an endpoint."""
        shard_key = envelope.head["extensions"]["daskserve"]["shard_key"]
        return self.router(endpoint).send(envelope, receive, send, shard_key=shard_key or "")

    def forget(self, endpoint: EndpointTag) -> None:
        """Stop watching an endpoint, and its backends unless another endpoint uses them.

        Requests that were sent, or wait for a replica, continue.
        """
        router = self._routers.get(endpoint)
        if router is None or (router.published is None and not router.is_deleted):
            return  # keep it: calls may wait for the first update
        del self._routers[endpoint]
        self._stop_watching(f"endpoint/{endpoint}")
        self._forget_unused(router.backends)
        router.published = None

    def _forget_unused(self, backends: Iterable[BackendTag]) -> None:
        """Stop watching backends that no endpoint uses, and that no request waits for."""
        used = {backend for each in self._routers.values() for backend in each.backends}
        for backend in backends:
            if backend in self._sets and backend not in used and not self._sets[backend].waiting:
                self._stop_watching(f"backend/{backend}")
                for tag in (backend, candidate_of(backend)):
                    if tag in self._sets:
                        self._drop_set(tag)

    def _drop_set(self, tag: BackendTag) -> None:
        """Close a replica set, and stop watching what is published about its replicas."""
        for each in ("models", "stats/router"):
            self._watch_facts(tag, each, None)
        self._sets.pop(tag).close()

    def published(self, endpoint: EndpointTag) -> Mapping[str, Any] | None:
        """Return the state of an endpoint that the controller published last; None if it is not known."""
        router = self._routers.get(endpoint)
        return None if router is None else router.published

    def replica_set(self, backend: BackendTag) -> ReplicaSet:
        """Return the replica set of a backend; the first call creates it and watches the backend."""
        found = self._sets.get(backend)
        if found is None:
            found = self._new_set(backend)
            self._watch(f"backend/{backend}", partial(self._update_set, found))
        return found

    def _new_set(self, tag: BackendTag) -> ReplicaSet:
        found = self._sets[tag] = ReplicaSet(
            tag,
            self._cluster,
            self.clock,
            self.rng,
            self._routes,
            suspects=self.suspects,
            waiting_calls=self._waiting_calls,
            controller_watch=self._controller_watch,
            reports=self._reports,
            watch_facts=partial(self._watch_facts, tag),
        )
        return found

    def _watch_facts(self, tag: BackendTag, kind: str, note: Callable[[Any], None] | None) -> None:
        """Watch a published value about a backend's replicas; replaces an earlier watch of the same kind."""
        kind, _, user = kind.partition("/")
        self._stop_watching(f"{kind}/{tag}/{user}")
        if note is not None:
            watching = self._listener.watch(f"{kind}/{backend_of(tag)}", note)
            self._watches[f"{kind}/{tag}/{user}"] = watching

    def _stop_watching(self, key: str) -> None:
        self._watches.pop(key, bool)()
        self._deleted.pop(key, None)
        self.body_limits.forget(key)

    def _update_set(self, replicas: ReplicaSet, value: Any) -> None:
        replicas.update(value)
        rollout = None if value is None else value.get("rollout")
        if rollout is not None or replicas.versions is not None:
            self._update_versions(replicas, value, rollout)
        elif (new := self._sets.get(candidate_of(replicas.tag))) is not None:
            self._update_left(new, value)
        if replicas.is_starving:
            self._controller_watch.watch()

    def _update_left(self, new: ReplicaSet, value: Any) -> None:
        """Apply the state of a backend to the set of an ended rollout, until that set has no requests."""
        new.update(value)
        if not (new.waiting or new.in_flight):
            self._drop_set(new.tag)

    def _update_versions(self, replicas: ReplicaSet, value: Any, rollout: Mapping[str, Any] | None) -> None:
        """Apply the published state of a rollout, or its end."""
        tag, before = candidate_of(replicas.tag), replicas.versions
        new = self._sets.get(tag) or self._new_set(tag)
        if rollout is None:
            new.update(value)  # requests that wait for the new version go to the remaining replicas
            replicas.split(None, None)
        else:
            new.update(rollout["new"])
            if before is None or before.key != rollout["key"]:
                versions = Versions(rollout, replicas.tag, replicas.send, new.send, self.clock.now)
                replicas.split(new, versions.after(before))
        if new.is_starving:
            self._controller_watch.watch()
        for router in self._routers.values():
            if replicas.tag in router.backends:
                router.find_only()

    def _starving(self) -> list[Callable[[], None]]:
        return [each.fail_waiting for each in self._sets.values() if each.is_starving]

    def samples(self) -> list[MetricSample]:
        """Return the metric samples of all routers; see `daskserve.telemetry.table.Source`."""
        instance = self._cluster.instance
        found = [sample for each in list(self._sets.values()) for sample in each.samples()]
        for router in list(self._routers.values()):
            if not router.is_deleted:
                for each in list(router.calls.values()):
                    found += each.samples(instance, router.endpoint)
        return found

    def send_shadow(
        self, backend: BackendTag, envelope: Envelope, answer: ShadowResponse | None = None
    ) -> Shadow:
        """Send a copy of a request; put the request's messages into the returned shadow."""
        copied = replace(envelope, has_started=bool, call=None)
        send_to = self.replica_set(backend).send
        return Shadow(backend, copied, send_to, self._shadows, self._shadow_budget, answer)

    def _forget_worker(self, worker: str) -> None:
        for each in self._sets.values():
            each.pool.forget_worker(worker)
        self._controller_watch.watch()

    def _note_silent(self, workers: Sequence[WorkerAddress] | None) -> None:
        """Fail requests at workers that do not answer; idempotent requests go to other replicas."""
        before, self._silent = self._silent, frozenset(workers or ())
        for worker in sorted(self._silent - before):
            if self._routes.to(worker) is not None:
                logger.warning("Worker %s does not answer; its requests are abandoned", worker)
            self._routes.break_off(worker)

    def _note_sampling(self, ratio: float | None) -> None:
        self._shared[SAMPLING] = ratio

    def _note_route(self, worker: WorkerAddress, route: Reachability) -> None:
        for each in self._sets.values():
            each.note_route(worker)

    def _uses_worker(self, worker: WorkerAddress) -> bool:
        return any(each.pool.has_worker(worker) for each in self._sets.values())

    def close(self) -> None:
        """Stop watching, and fail the requests that wait."""
        self._routes.close()
        while self._watches:
            self._watches.popitem()[1]()
        self._reports.close()
        self._controller_watch.close()
        self._shadows.cancel()
        for replicas in self._sets.values():
            replicas.close()
        for router in self._routers.values():
            router.update(None)
