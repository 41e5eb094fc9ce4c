"""The replicas of one backend for the requests of one process, behind a bounded queue."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from daskserve.cluster.protocols.base import Cluster, Routes
from daskserve.common.clock import Clock, stopwatch
from daskserve.common.formatting import counted
from daskserve.common.types import (
    ActorAddress,
    BackendTag,
    BodyUse,
    Envelope,
    EnvelopeKind,
    Load,
    Receive,
    Send,
)
from daskserve.data.caller.pool.pooled_replica import NEVER_REFUSED, PooledReplica
from daskserve.data.caller.pool.replica_pool import ReplicaPool
from daskserve.data.caller.request_routers.routing import noting_failure
from daskserve.data.caller.routing.availability import ReplicaAvailability
from daskserve.data.caller.routing.controller_watch import ControllerWatch
from daskserve.data.caller.routing.load_reports import LoadReports
from daskserve.data.caller.routing.metrics import ReplicaSetMetrics
from daskserve.data.caller.routing.multiplexing.waiting import WaitingRequests, WatchFacts, configure
from daskserve.data.caller.routing.queued_request import QueuedRequest, place_in_queue
from daskserve.data.caller.routing.replay import Replay
from daskserve.data.caller.routing.suspects.suspect_queue import SuspectQueue
from daskserve.data.caller.routing.suspects.suspects import Suspects, SuspectTrial
from daskserve.data.caller.routing.versions import Versions, backend_of
from daskserve.data.caller.routing.waiting_calls import WaitingCalls
from daskserve.errors import ActorLostError, BackPressureError, ReplicaBusyError
from daskserve.loops.alarm import Alarm
from daskserve.telemetry.table import MetricSample
from daskserve.telemetry.tracing.carrier import TRACE
from daskserve.telemetry.tracing.current import routing_span_starter

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.routing import RoutingSpan

#: How long an unreachable replica is suspended, unless the controller publishes it again.
UNREACHABLE_BACKOFF_S = 1.0
#: How long a replica is suspended after its connection broke: time for the scheduler to report its end.
DISCONNECTED_BACKOFF_S = 0.05
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ReplicaSet:
    """The running replicas of one backend, and the requests of this process that wait for one."""

    def __init__(
        self,
        tag: BackendTag,
        cluster: Cluster,
        clock: Clock,
        rng: random.Random,
        routes: Routes,
        *,
        suspects: Suspects,
        waiting_calls: WaitingCalls,
        controller_watch: ControllerWatch,
        reports: LoadReports,
        watch_facts: WatchFacts,
    ) -> None:
        self.tag = tag
        #: Whether the controller needs reports of this queue.
        self.is_autoscaled = False
        #: How request bodies are read, None until it is known; their size limit, None for that of the proxy.
        self.bodies: BodyUse | None = None
        self.max_body_bytes: int | None = None
        self._reports = reports
        self._waiting_calls = waiting_calls
        self._cluster = cluster
        self._clock = clock
        self._rng = rng
        self._routes = routes
        #: The replicas.
        self.pool = ReplicaPool(cluster.is_local, routes.to, cluster.handler_of)
        #: Whether waiting requests can expect a replica.
        self.availability = ReplicaAvailability(backend_of(tag), controller_watch)
        #: The two versions during a rollout, in which these replicas are the old version; otherwise None.
        self.versions: Versions | None = None
        #: The replicas of the new version, during a rollout.
        self.candidate: ReplicaSet | None = None
        self._waiting = WaitingRequests(tag, self.pool, clock, rng, watch_facts, cluster, reports)
        #: The requests that may have killed a process.
        self._apart = SuspectQueue(self.availability, self.pool, suspects, clock, rng, self._serve_waiting)
        #: None until the controller has published it; requests that arrive earlier wait.
        self.max_queued: int | None = None
        #: Set by the first update from the controller.
        self._known = asyncio.Event()
        #: Fires when the first suspended replica may be used again.
        self._alarm = Alarm(self._serve_waiting)
        self.metrics = ReplicaSetMetrics()

    def __repr__(self) -> str:
        return f"<ReplicaSet {self.tag} waiting={self.waiting} {self.pool!r}>"

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot, here or in the queue of a full replica."""
        return len(self._waiting) + len(self._apart.waiters) + self.pool.queued

    @property
    def in_flight(self) -> int:
        """The number of this process's requests at the replicas, without those queued there."""
        return self.pool.in_flight - self.pool.queued

    def samples(self) -> list[MetricSample]:
        """Return the metric samples; none once the backend is deleted."""
        if self.availability.is_deleted and not (self.waiting or self.in_flight):
            return []
        found = self.metrics.samples(
            self._cluster.instance, self.tag, waiting=self.waiting, in_flight=self.in_flight
        )
        for each in (self._waiting.routing, self._waiting.hedging):
            if each is not None:
                found += each.samples((self._cluster.instance, self.tag))
        return found

    async def wait_until_known(self) -> None:
        """Wait for the first update."""
        await self._known.wait()

    async def addresses(self) -> list[ActorAddress]:
        """Return the addresses of the running replicas of all versions by tag, once they are known."""
        await self._known.wait()
        others = [] if self.candidate is None else self.candidate.pool.addresses()
        return sorted([*self.pool.addresses(), *others], key=lambda each: each.name)

    @property
    def is_starving(self) -> bool:
        """Whether requests wait although there are no replicas."""
        return bool(self._waiting or self._apart.waiters) and self.pool.is_empty

    def update(self, value: Any) -> None:
        """Apply the state of the backend that the controller published."""
        self._known.set()
        self.availability.update(value)
        if value is None:
            self.bodies = "gather"
            self.pool.update({}, 1, str)
            self._waiting.choose_by(None)
            self.fail_waiting()
            return
        published = {tag: (worker, incarnation) for tag, worker, incarnation in value["replicas"]}
        name_of = f"{self._cluster.instance}/replica/{{}}".format
        configure(self._waiting, value, published)
        self.pool.update(published, value["concurrency"], name_of)
        is_first = self.max_queued is None
        self.max_queued = value["max_queued"]
        self._apart.max_crash_retries = value["max_crash_retries"]
        self.is_autoscaled = value.get("autoscaled", False)
        self.bodies = value.get("bodies", "gather")
        self.max_body_bytes = value.get("max_body_bytes")
        self.fail_waiting()
        self._serve_waiting()
        if is_first:
            self._reject_excess()
        self._report_load()

    def _report_load(self) -> None:
        if self.is_autoscaled or self.versions is not None:
            self._reports.report_soon(is_urgent=self.is_starving)

    def split(self, candidate: ReplicaSet | None, versions: Versions | None) -> None:
        """Begin or end the split of the requests between these replicas and those of a new version."""
        self.candidate, self.versions = candidate, versions
        self._report_load()

    def note_route(self, worker: str) -> None:
        """Record that the route to a worker has changed."""
        self.pool.note_route(worker)
        self._serve_waiting()

    def take_now(self, envelope: Envelope) -> PooledReplica | None:
        """Return the replica for a request, counting one more in flight; None if it has to wait."""
        if self._waiting or (not self._waiting.is_plain and self._waiting.may_hedge(envelope)):
            return None
        return _take(self, envelope)

    def release(
        self, replica: PooledReplica, outcome: Load | Exception | None, envelope: Envelope | None = None
    ) -> None:
        """Record the end of a request to a replica, and the replica's load or failure."""
        self.pool.release(replica)  # first, so that the slot is free whatever fails below
        if envelope is not None and envelope.routed is not None:
            self._waiting.ended(envelope, outcome)
        if type(outcome) is Load:
            # otherwise the request was a WebSocket
            is_answer = envelope is None or envelope.note_turn is None
            self.pool.report(replica, outcome, self._clock.now(), is_answer=is_answer)
        elif isinstance(outcome, (ReplicaBusyError, ActorLostError)):
            self._note_refusal(replica, outcome, envelope, was_queued=False)
        if self._waiting or self._apart.waiters:
            self._serve_waiting()

    def _note_refusal(
        self,
        replica: PooledReplica,
        error: ReplicaBusyError | ActorLostError,
        envelope: Envelope | None,
        *,
        was_queued: bool,
        span: RoutingSpan | None = None,
    ) -> None:
        if span is not None:
            span.refused(error, replica.tag)
        now = self._clock.now()
        if isinstance(error, ReplicaBusyError):
            priority = 0 if envelope is None else self._waiting.priority_of(envelope)
            self.pool.note_busy(replica, error.ongoing, now, was_queued=was_queued, priority=priority)
        else:
            self.pool.suspend(
                replica, now + (DISCONNECTED_BACKOFF_S if error.is_disconnected else UNREACHABLE_BACKOFF_S)
            )

    def send(
        self,
        envelope: Envelope,
        receive: Receive,
        send: Send,
        *,
        is_rejected: bool = False,
        taken: PooledReplica | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Send a request to a replica; wait until one has room.

        A request that a replica has rejected before goes to the front of the queue. The first replica may be
        ``taken`` already, by `take_now`.

        Raises
        ------
        BackPressureError
            The queue already holds ``max_queued_requests`` requests.
        UnavailableError
            The backend was deleted, or has no replicas because the target capacity is 0 %.
        ActorLostError
            The replica was lost after the request had begun, and the request must not be retried.
        QuarantinedError
            Retries of the same request have ended several processes.
        """
        waiting = self._waiting
        if not waiting.is_plain:
            if not is_rejected and taken is None and waiting.may_hedge(envelope):
                return waiting.send_hedged(envelope, receive, send, self.send, self.release, self._apart)
            if waiting.routing is not None:
                send = noting_failure(waiting.routing, envelope, send)
        if TRACE in envelope.head:
            return _send_traced(self, envelope, receive, send, is_rejected=is_rejected)
        return self._send(envelope, receive, send, is_rejected, taken=taken)

    async def _send(
        self,
        envelope: Envelope,
        receive: Receive,
        send: Send,
        is_rejected: bool,
        span: RoutingSpan | None = None,
        taken: PooledReplica | None = None,
    ) -> None:
        replay = trial = since = load = None
        has_messages = envelope.has_body and envelope.kind is EnvelopeKind.HTTP  # calls have none to repeat
        if envelope.kind is EnvelopeKind.HTTP:
            trial = self._apart.trial_of(envelope) if self._apart.suspects.known else None
        if has_messages or envelope.lost:
            receive = (replay := Replay(envelope, receive)).receive
            if envelope.lost:
                trial = self._apart.rewind(envelope, replay, trial, *envelope.lost)
            if self._waiting.routing is not None and has_messages:
                await self._waiting.read(envelope, replay)
        if is_socket := envelope.head.get("type") == "websocket":
            envelope = replace(envelope, note_turn=self.pool.websocket_cost.note)
        self.metrics.sent += not is_rejected
        while True:
            found, taken = taken or _take_at_once(self, envelope, trial, is_rejected=is_rejected), None
            replica = found or await _turn_of(self, self._wait(is_rejected, trial, envelope), span)
            is_queued, is_deferred = replica.has_queued_request, False
            if replica.batch_refusal is not NEVER_REFUSED:
                replica, is_queued, is_deferred = place_in_queue(
                    self.pool, replica, envelope, self._waiting, self._clock.now(), self._rng
                )
            if span is not None:
                span.sent(replica.tag, replica.address.worker, is_queued=is_queued)
            replica.sockets += is_socket
            try:
                if replica.route is None:
                    await self._waiting_calls.during(self._routes.connect(replica.address.worker))
                if is_queued:
                    since = self._clock.now() if since is None else since
                    load = await self._in_queue(replica, envelope, receive, send, since, is_deferred)
                else:
                    load = await replica.handle(envelope).respond(receive, send)
                if trial is not None:
                    trial.passed()
                return
            except (ReplicaBusyError, ActorLostError) as error:
                self._note_refusal(replica, error, envelope, was_queued=is_queued, span=span)
                replay = replay or Replay(envelope, receive)
                trial = self._apart.rewind(envelope, replay, trial, error, replica.address.worker)
                self.metrics.note_retry(error)
                is_rejected = True
            except Exception as error:
                self._waiting.ended(envelope, error)
                if trial is not None:
                    trial.failed(error)
                raise
            finally:
                replica.sockets -= is_socket
                if trial is not None:
                    trial.leave()
                self.release(replica, load, envelope)

    def _in_queue(
        self,
        replica: PooledReplica,
        envelope: Envelope,
        receive: Receive,
        send: Send,
        since: float,
        is_deferred: bool,
    ) -> Coroutine[Any, Any, Load]:
        priority, on_slot = self._waiting.priority_of(envelope), self._serve_waiting
        about = self.pool, replica, self._clock, send, self.metrics.waits, on_slot, priority
        queued = QueuedRequest(*about, is_deferred=is_deferred)
        return queued.respond(envelope, receive, since)

    async def _wait(self, is_rejected: bool, trial: SuspectTrial | None, envelope: Envelope) -> PooledReplica:
        """Wait for this request's turn; return a replica, counting one more request in flight."""
        if not self.availability.may_wait(has_replicas=not self.pool.is_empty):
            raise self.availability.error()
        # A request that a replica refused has already passed the queue, so the limit does not apply to it.
        if not is_rejected:
            check_queue(self, envelope)
        waiter: asyncio.Future[PooledReplica] = asyncio.get_running_loop().create_future()
        if trial is not None:
            self._apart.put(waiter, trial)
        else:
            self._waiting.put(waiter, envelope, is_first=is_rejected)
        if len(self._waiting) + len(self._apart.waiters) == 1 and self.pool.is_empty:
            self._report_load()
            self.availability.controller_watch.watch()
        if self._waiting.is_selective:
            self._serve_waiting()  # earlier requests may wait for other replicas
        self._set_alarm()
        began = stopwatch()
        try:
            if self.max_queued is not None:
                return await waiter
            return await self._waiting_calls.during(waiter)
        except asyncio.CancelledError:
            if waiter in self._waiting:
                del self._waiting[waiter]
            elif waiter in self._apart.waiters:
                self._apart.remove(waiter)
            elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release_unused(waiter.result(), envelope)
                if trial is not None:
                    trial.leave()
                self._serve_waiting()  # the next request gets this turn
            raise
        finally:
            self.metrics.waits.observe(stopwatch() - began)

    def _serve_waiting(self) -> None:
        """Assign free replicas to the waiting requests, in order."""
        if self._apart.waiters:
            self._apart.serve()
            self._set_alarm()
        if self._waiting.serve(self.release_unused):
            self._set_alarm()

    def _reject_excess(self) -> None:
        """Reject the newest of the requests that arrived before their limit was known."""
        limit = self.max_queued
        while limit is not None and 0 <= limit < self.waiting and self._waiting:
            _refuse(self, self._waiting.popitem()[0], limit)

    def release_unused(self, replica: PooledReplica, envelope: Envelope) -> None:
        """Release a replica that was taken for a request but did not get it."""
        self.pool.leave_queue(replica)
        self.pool.release(replica)
        self._waiting.ended(envelope, None)

    def fail_waiting(self) -> None:
        """Fail the waiting requests, unless there is or may soon be a replica for them."""
        if self.availability.may_wait(has_replicas=not self.pool.is_empty):
            return
        waiters = [*self._apart.clear(), *self._waiting]
        self._waiting.clear()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(self.availability.error())

    def _set_alarm(self) -> None:
        for at in (self.pool.next_resume_at(), self._apart.next_at(), self._waiting.next_at):
            if at is not None:
                self._alarm.set(at)

    def close(self) -> None:
        """Fail the requests that still wait."""
        self.availability.update(None)
        self.pool.update({}, 1, str)
        self._waiting.close()
        self._alarm.cancel()
        self.fail_waiting()


async def _send_traced(
    replicas: ReplicaSet, envelope: Envelope, receive: Receive, send: Send, *, is_rejected: bool
) -> None:
    shared = getattr(replicas._cluster, "shared", _NOTHING)
    span = routing_span_starter()(shared, envelope.head, backend_of(replicas.tag))
    if span is None:
        await replicas._send(envelope, receive, send, is_rejected)
        return
    failure: BaseException | None = None
    envelope = envelope.with_head({**envelope.head, TRACE: span.carrier})
    try:
        await replicas._send(envelope, receive, send, is_rejected, span)
    except BaseException as error:
        failure = error
        raise
    finally:
        span.finish(failure)
        del failure  # otherwise an error and this frame reference each other


def _take_at_once(
    replicas: ReplicaSet, envelope: Envelope, trial: SuspectTrial | None, *, is_rejected: bool
) -> PooledReplica | None:
    if trial is not None:
        return replicas._apart.take(trial)
    # The requests that already wait go first.
    return _take(replicas, envelope) if is_rejected or not replicas._waiting else None


def _take(replicas: ReplicaSet, envelope: Envelope) -> PooledReplica | None:
    waiting = replicas._waiting
    if waiting.is_plain and not envelope.model_id and envelope.places is None and envelope.routed is None:
        return replicas.pool.take(replicas._clock.now(), replicas._rng)
    return waiting.take(envelope)


def _turn_of(
    replicas: ReplicaSet, turn: Coroutine[Any, Any, PooledReplica], span: RoutingSpan | None
) -> Coroutine[Any, Any, PooledReplica]:
    if span is None:
        return turn
    return span.wait(
        turn,
        waiting=replicas.waiting,
        ongoing=replicas.in_flight,
        replicas=replicas.pool.size,
        is_known=replicas.max_queued is not None,
    )


def priority_names(replicas: ReplicaSet) -> Collection[str]:
    """Return the names of priorities that calls may use."""
    return replicas._waiting.priority_names


def check_queue(replicas: ReplicaSet, envelope: Envelope | None = None) -> None:
    """Raise `BackPressureError` if no further request may wait for one of the replicas.

    A request with a higher priority replaces one with a lower priority. Without ``envelope``, the priority is
    not known yet.
    """
    limit, waiting = replicas.max_queued, replicas._waiting
    if limit is None or not 0 <= limit <= replicas.waiting or (envelope is None and waiting.may_overtake):
        return
    lower = None if envelope is None else waiting.lower_than(envelope)
    if lower is None:
        replicas.metrics.rejected += 1
        raise _queue_overflow(replicas.availability.name, replicas.waiting, limit)
    del waiting[lower]
    _refuse(replicas, lower, limit)


def _refuse(replicas: ReplicaSet, waiter: asyncio.Future[PooledReplica], limit: int) -> None:
    """Refuse a waiting request with the error of a full queue."""
    if not waiter.done():
        replicas.metrics.rejected += 1
        waiter.set_exception(_queue_overflow(replicas.availability.name, limit, limit))


def _queue_overflow(name: str, waiting: int, limit: int) -> BackPressureError:
    others = counted(waiting, "request already waits", "requests already wait")
    text = f"{others} for {name}, as many as max_queued_requests allows; try again later."
    return BackPressureError(text, num_queued_requests=waiting, max_queued_requests=limit)
