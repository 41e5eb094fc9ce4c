"""Routers: from an endpoint's name to a running replica, with a bounded queue in between.

One `Routers` per process and instance holds a `Router` per endpoint and a `ReplicaSet` per backend; what a
process has in flight is thus counted once, whoever sends it. What they know comes by long poll and stays
good while the controller is away.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from daskserve.clock import Clock, stopwatch
from daskserve.cluster.base import Cluster
from daskserve.cluster.long_poll import LongPollClient
from daskserve.data.load_reports import LoadReports
from daskserve.data.place import Place
from daskserve.data.replay import Replay
from daskserve.data.roster import ReplicaEntry, Roster
from daskserve.data.router_figures import BUSY, LOST, CallFigures, SetFigures
from daskserve.data.routing import TrafficPolicy, shard_draw
from daskserve.data.shadow import Shadow
from daskserve.errors import (
    ActorLostError,
    BackPressureError,
    NotFoundError,
    ReplicaBusyError,
    RequestTimeoutError,
    UnavailableError,
)
from daskserve.metric_table import Sample
from daskserve.types import BackendTag, EndpointTag, Envelope, EnvelopeKind, Load, Message, Receive, Send

logger = logging.getLogger("daskserve.router")

#: A replica that could not be reached is left alone for this long, unless it is published anew.
EJECTED_S = 1.0
#: One whose connection broke is left alone until the scheduler has told of its end, if that is why.
BROKEN_S = 0.05
#: How long a process waits to learn of an endpoint that somebody uses.
KNOWN_S = 10.0


class ReplicaSet:
    """The running replicas of one backend, and the requests of this process that wait for one."""

    def __init__(
        self,
        tag: BackendTag,
        cluster: Cluster,
        clock: Clock,
        rng: random.Random,
        *,
        reports: LoadReports | None = None,
    ) -> None:
        self.tag = tag
        #: Whether the controller wants to know what waits here.
        self.is_autoscaled = False
        self._reports = reports
        self._cluster = cluster
        self._clock = clock
        self._rng = rng
        self._roster = Roster(cluster.is_local)
        # Ordered, because whoever gives up leaves from anywhere in the line.
        self._waiting: OrderedDict[asyncio.Future[ReplicaEntry], None] = OrderedDict()
        self._max_queued = 1000
        self._is_known = False
        self._is_deleted = False
        #: Whether the instance is to have none of its replicas, so that there is nothing to wait for.
        self._is_off = False
        self._timer: asyncio.TimerHandle | None = None
        self._figures = SetFigures()

    def __repr__(self) -> str:
        return f"<ReplicaSet {self.tag} waiting={self.waiting} {self._roster!r}>"

    @property
    def waiting(self) -> int:
        """How many requests wait for a replica with room: here, or in line at one that is full."""
        return len(self._waiting) + self._roster.in_line

    @property
    def in_flight(self) -> int:
        """How many requests of this process its replicas have, but for those that wait in line."""
        return self._roster.in_flight - self._roster.in_line

    def samples(self) -> list[Sample]:
        """Return the figures as metrics; nothing once the backend is deleted."""
        if self._is_deleted and not (self.waiting or self.in_flight):
            return []
        return self._figures.samples(
            self._cluster.instance, self.tag, waiting=self.waiting, in_flight=self.in_flight
        )

    @property
    def is_starving(self) -> bool:
        """Whether requests wait, and there is no replica that they could wait for."""
        return bool(self._waiting) and self._roster.is_empty

    def update(self, value: Any) -> None:
        """Take over what the controller published of the backend."""
        self._is_known = True
        self._is_deleted = value is None
        if value is None:
            self._roster.update({}, 1, self._name_of)
            self._fail_waiting()
            return
        published = {tag: (worker, incarnation) for tag, worker, incarnation in value["replicas"]}
        self._roster.update(published, value["concurrency"], self._name_of)
        self._max_queued = value["max_queued"]
        self.is_autoscaled = value.get("autoscaled", False)
        self._is_off = value.get("off", False)
        if self._is_off and self._roster.is_empty:
            self._fail_waiting()
        self._serve_waiting()
        self._report_load()

    def _report_load(self) -> None:
        if self.is_autoscaled and self._reports is not None:
            self._reports.poke(is_urgent=self.is_starving)

    def _name_of(self, tag: str) -> str:
        return f"{self._cluster.instance}/replica/{tag}"

    def forget_worker(self, worker: str) -> None:
        """Stop using the replicas of a worker that left the cluster."""
        self._roster.forget_worker(worker)

    async def send(self, envelope: Envelope, receive: Receive, send: Send) -> None:
        """Carry a request to a replica, waiting for one with room if need be.

        Raises
        ------
        BackPressureError
            More requests than ``max_queued_requests`` wait already.
        UnavailableError
            The backend was deleted, or is to have no replica, as the target capacity is 0.
        ActorLostError
            The replica was lost after the request had begun, and it may not be repeated.
        """
        replay = None
        if envelope.kind is EnvelopeKind.HTTP:  # calls have no messages to repeat
            replay = Replay(envelope, receive, send)
            receive, send = replay.receive, replay.send
        roster = self._roster
        figures = self._figures
        figures.sent += 1
        is_rejected = False
        in_line_since: float | None = None
        while True:
            replica = None
            if is_rejected or not self._waiting:  # else those that wait already go first
                replica = roster.take(self._clock.now(), self._rng)
            if replica is None:
                replica = await self._wait(is_rejected)
            is_in_line = replica.is_in_line
            try:
                if is_in_line:
                    if in_line_since is None:
                        in_line_since = self._clock.now()
                    load = await self._stand_in_line(replica, in_line_since, envelope, receive, send)
                else:
                    load = await self._cluster.request(replica.address, envelope, receive, send)
            except ReplicaBusyError as error:
                roster.note_busy(replica, error.ongoing, self._clock.now(), was_in_line=is_in_line)
                self._rewind(replay, error)
                figures.retries[BUSY] += 1
                is_rejected = True
            except ActorLostError as error:
                patience_s = BROKEN_S if error.is_disconnected else EJECTED_S
                roster.set_aside(replica, self._clock.now() + patience_s)
                self._rewind(replay, error)
                figures.retries[LOST] += 1
                is_rejected = True
            else:
                roster.report(replica, load, self._clock.now())
                return
            finally:
                roster.give_back(replica)
                if self._waiting:
                    self._serve_waiting()

    @staticmethod
    def _rewind(replay: Replay | None, error: ReplicaBusyError | ActorLostError) -> None:
        """Let the request be sent to another replica, or raise what became of it at this one."""
        begun = isinstance(error, ActorLostError) and error.begun
        may_go_on = not begun if replay is None else replay.rewind(begun=begun)
        if not may_go_on:
            raise error

    async def _stand_in_line(
        self, replica: ReplicaEntry, since: float, envelope: Envelope, receive: Receive, send: Send
    ) -> Load:
        """Carry a request to a replica that is full; the next may go there as soon as this one has a slot."""
        place = Place(self._roster, replica, self._clock, send, self._figures.waits, self._serve_waiting)
        envelope = replace(envelope, patience=place.patience(since))
        try:
            return await self._cluster.request(replica.address, envelope, receive, place.send)
        finally:
            place.leave()

    async def _wait(self, is_rejected: bool) -> ReplicaEntry:
        """Return a replica with one more request in flight, when it is this one's turn."""
        if self._is_deleted or (self._is_off and self._roster.is_empty):
            raise self._gone()
        # One that a replica has just refused has had its turn in the queue already.
        if not is_rejected and 0 <= self._max_queued <= self.waiting and self._is_known:
            self._figures.rejected += 1
            raise BackPressureError(
                f"{self.waiting} requests wait for backend '{self.tag}' already, as many as "
                "max_queued_requests allows; try again later.",
                num_queued_requests=self.waiting,
                max_queued_requests=self._max_queued,
            )
        waiter: asyncio.Future[ReplicaEntry] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        if is_rejected:
            self._waiting.move_to_end(waiter, last=False)
        if len(self._waiting) == 1 and self._roster.is_empty:
            self._report_load()
        self._arm_timer()
        began = stopwatch()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in self._waiting:
                del self._waiting[waiter]
            elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._return(waiter.result())
                self._serve_waiting()  # the turn that came to us goes to the next
            raise
        finally:
            self._figures.waits.observe(stopwatch() - began)

    def _serve_waiting(self) -> None:
        """Give those that wait whatever is free, in their order."""
        now = self._clock.now()
        while self._waiting:
            replica = self._roster.take(now, self._rng)
            if replica is None:
                self._arm_timer()
                return
            waiter, _ = self._waiting.popitem(last=False)
            if waiter.done():
                self._return(replica)
            else:
                waiter.set_result(replica)

    def _return(self, replica: ReplicaEntry) -> None:
        """Let others have a replica to which nothing was sent after all."""
        self._roster.leave_line(replica)
        self._roster.give_back(replica)

    def _fail_waiting(self) -> None:
        while self._waiting:
            waiter, _ = self._waiting.popitem(last=False)
            if not waiter.done():
                waiter.set_exception(self._gone())

    def _gone(self) -> UnavailableError:
        if self._is_deleted:
            return UnavailableError(f"Backend '{self.tag}' was deleted.")
        return UnavailableError(
            f"Backend '{self.tag}' has no replicas, as the target capacity of its instance is 0 %."
        )

    def _arm_timer(self) -> None:
        """Look again when the first replica that is only set aside may be used again."""
        at = self._roster.next_return()
        if at is None:
            return
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._serve_waiting()

    def close(self) -> None:
        """Fail whatever still waits."""
        self._is_deleted = True
        self._roster.update({}, 1, self._name_of)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._fail_waiting()


class Router:
    """Sends the requests of one endpoint."""

    def __init__(self, endpoint: EndpointTag, routers: Routers) -> None:
        self.endpoint = endpoint
        self._routers = routers
        self._policy: TrafficPolicy | None = None
        #: Where all requests go, if that is always the same.
        self._only: ReplicaSet | None = None
        self._is_legacy = True
        self._changed = asyncio.Event()
        self._is_deleted = False
        #: What is counted of the calls by handle.
        self.calls = CallFigures()

    @property
    def is_legacy(self) -> bool:
        """Whether the endpoint's backends get one ``ServeRequest`` instead of the caller's arguments."""
        return self._is_legacy

    @property
    def is_known(self) -> bool:
        """Whether requests can be sent at once."""
        return self._policy is not None and not self._is_deleted

    @property
    def is_deleted(self) -> bool:
        """Whether the endpoint is known not to exist."""
        return self._is_deleted

    def update(self, value: Any) -> None:
        """Take over what the controller published of the endpoint."""
        self._is_deleted = value is None
        self._only = None
        if value is not None:
            self._is_legacy = value["legacy"]
            self._policy = policy = TrafficPolicy(value["traffic"], value["shadows"])
            for backend in policy.backends:
                self._routers.replica_set(backend)
            if policy.only is not None and not policy.has_shadows:
                self._only = self._routers.replica_set(policy.only)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_until_known(self) -> None:
        """Return once the endpoint's traffic is known here; `NotFoundError` if there is no such endpoint."""
        while self._policy is None and not self._is_deleted:
            try:
                await self._routers.clock.wait_for(self._changed.wait(), KNOWN_S)
            except TimeoutError:
                raise RequestTimeoutError(
                    f"Nothing was heard of endpoint '{self.endpoint}' for {KNOWN_S:g} s; the controller may "
                    "be starting anew, try again."
                ) from None
        if self._is_deleted:
            raise NotFoundError(f"Endpoint '{self.endpoint}' does not exist.")

    def send(
        self, envelope: Envelope, receive: Receive, send: Send, *, shard_key: str = ""
    ) -> Coroutine[Any, Any, None]:
        """Carry a request to a replica of one of the endpoint's backends."""
        if self._only is not None:
            return self._only.send(envelope, receive, send)
        policy = self._policy
        if policy is None or self._is_deleted:
            return self._send_when_known(envelope, receive, send, shard_key)
        backend = policy.only
        rng = self._routers.rng
        if backend is None:
            backend = policy.draw(shard_draw(shard_key) if shard_key else rng.random())
            if backend is None:
                raise UnavailableError(f"Endpoint '{self.endpoint}' has no backend with traffic.")
        shadows = policy.shadows(rng) if policy.has_shadows else None
        if shadows:
            return self._send_with_copies(backend, shadows, envelope, receive, send)
        return self._routers.replica_set(backend).send(envelope, receive, send)

    async def _send_when_known(
        self, envelope: Envelope, receive: Receive, send: Send, shard_key: str
    ) -> None:
        await self.wait_until_known()
        await self.send(envelope, receive, send, shard_key=shard_key)

    async def _send_with_copies(
        self, backend: BackendTag, shadows: list[BackendTag], envelope: Envelope, receive: Receive, send: Send
    ) -> None:
        copies = [self._routers.send_shadow(shadow, envelope) for shadow in shadows]
        if not envelope.has_body:
            for copy in copies:
                copy.put({"type": "http.request", "body": b"", "more_body": False})

        async def receive_and_copy() -> Message:
            message = await receive()
            if envelope.has_body:
                for copy in copies:
                    copy.put(message)
            return message

        try:
            await self._routers.replica_set(backend).send(envelope, receive_and_copy, send)
        except asyncio.CancelledError:
            # Nobody wants it any more; and a copy of a stream without an end would never end.
            for copy in copies:
                copy.task.cancel()
            raise
        finally:
            for copy in copies:
                copy.end()


class Routers:
    """All routers of one process for one instance. Runs on one event loop."""

    def __init__(self, cluster: Cluster, listener: LongPollClient, clock: Clock, rng: random.Random) -> None:
        self.clock = clock
        self.rng = rng
        self._cluster = cluster
        self._listener = listener
        self._routers: dict[EndpointTag, Router] = {}
        self._sets: dict[BackendTag, ReplicaSet] = {}
        self._stop_watching: list[Callable[[], None]] = []
        self._shadows: set[asyncio.Task[None]] = set()
        self._reports = LoadReports(cluster, clock, self._sets)
        listener.on_worker_left(self._forget_worker)
        listener.on_ended(self.close)

    async def start(self) -> None:
        """Begin to listen; idempotent."""
        await self._listener.start()

    def router(self, endpoint: EndpointTag) -> Router:
        """Return the router of an endpoint, made on first use."""
        router = self._routers.get(endpoint)
        if router is None:
            router = self._routers[endpoint] = Router(endpoint, self)
            self._stop_watching.append(self._listener.watch(f"endpoint/{endpoint}", router.update))
        return router

    def replica_set(self, backend: BackendTag) -> ReplicaSet:
        """Return the replicas of a backend, watched from the first use on."""
        found = self._sets.get(backend)
        if found is None:
            found = self._sets[backend] = ReplicaSet(
                backend, self._cluster, self.clock, self.rng, reports=self._reports
            )
            self._stop_watching.append(self._listener.watch(f"backend/{backend}", found.update))
        return found

    def samples(self) -> list[Sample]:
        """Return the figures of all routers as metrics; see `daskserve.collectors.Source`."""
        instance = self._cluster.instance
        found = [sample for each in list(self._sets.values()) for sample in each.samples()]
        for router in list(self._routers.values()):
            if not router.is_deleted:
                found += router.calls.samples(instance, router.endpoint)
        return found

    def send_shadow(self, backend: BackendTag, envelope: Envelope) -> Shadow:
        """Send a copy of a request whose answer is dropped; its messages are to be put into it."""
        shadow = Shadow(backend, envelope, self.replica_set(backend).send)
        self._shadows.add(shadow.task)
        shadow.task.add_done_callback(self._shadows.discard)
        return shadow

    def _forget_worker(self, worker: str) -> None:
        for each in self._sets.values():
            each.forget_worker(worker)

    def close(self) -> None:
        """Stop watching and fail what waits."""
        for stop in self._stop_watching:
            stop()
        self._stop_watching.clear()
        self._reports.close()
        for task in self._shadows:
            task.cancel()
        for each in self._sets.values():
            each.close()
        for router in self._routers.values():
            router.update(None)
