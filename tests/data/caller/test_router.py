"""Routers: the queue, the choice of a replica, and what happens when replicas are full or lost."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from by_task import by_task
from scripted_routes import ScriptedListener, ScriptedRoutes

from daskserve.cluster.long_poll import LongPollClient
from daskserve.cluster.protocols.base import Cluster
from daskserve.common.clock import LoopClock
from daskserve.common.types import (
    SILENT_WORKERS,
    SLOT_TAKEN,
    ActorAddress,
    Envelope,
    EnvelopeKind,
    Load,
    Message,
    QueueTimeout,
    Reachability,
    Receive,
    Send,
)
from daskserve.data.caller.pool.pooled_replica import REPORT_S
from daskserve.data.caller.pool.replica_pool import BUSY_BACKOFF_S
from daskserve.data.caller.routing.controller_watch import CHECK_S, CONTROLLER_S
from daskserve.data.caller.routing.queued_request import MIN_QUEUE_TIMEOUT_S, QUEUE_TIMEOUT_S
from daskserve.data.caller.routing.replay import KEPT_BYTES
from daskserve.data.caller.routing.replica_set import (
    DISCONNECTED_BACKOFF_S,
    UNREACHABLE_BACKOFF_S,
    ReplicaSet,
)
from daskserve.data.caller.routing.router import ENDPOINT_TIMEOUT_S, MAX_DELETED, Router, Routers
from daskserve.data.caller.routing.waiting_calls import WaitingCalls
from daskserve.data.replica.requests.slots import Slots
from daskserve.errors import (
    ActorLostError,
    BackPressureError,
    CodeUnavailableError,
    DeploymentIsBeingDeletedError,
    NotFoundError,
    ReplicaBusyError,
    RequestTimeoutError,
    UnavailableError,
    http_status_of,
)
from daskserve.telemetry.histogram import HistogramCounts
from daskserve.telemetry.replica import ReplicaMetrics

pytestmark = pytest.mark.virtual_time

CALL = Envelope(EnvelopeKind.CALL, {})
GET = Envelope(EnvelopeKind.HTTP, {"type": "http", "method": "GET"})
POST = Envelope(EnvelopeKind.HTTP, {"type": "http", "method": "POST"})

Handler = Callable[[str, Envelope, Receive, Send], Awaitable[Load]]


class Replicas:
    """The replicas of a test, behind the only method of a cluster that routers use."""

    instance = "i"
    #: Prevents searches for its controller.
    is_ended = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.addresses: list[ActorAddress] = []
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.cancelled: list[str] = []
        #: The worker whose replicas live in the router's own process.
        self.here = ""
        #: The behavior of a request to a replica; by default, it waits until `finish` is called for the
        #: replica.
        self.handler: Handler | None = None
        self._waiting: dict[str, list[asyncio.Future[Load]]] = {}

    def is_local(self, address: ActorAddress) -> bool:
        return address.worker == self.here

    def handler_of(self, address: ActorAddress) -> Any:
        return partial(self.request, address)

    @by_task
    async def request(self, address: ActorAddress, envelope: Envelope, receive: Receive, send: Send) -> Load:
        tag = address.name.rpartition("/")[2]
        self.asked.append(tag)
        self.addresses.append(address)
        self.running[tag] += 1
        self.most[tag] = max(self.most[tag], self.running[tag])
        try:
            if self.handler is not None:
                return await self.handler(tag, envelope, receive, send)
            future: asyncio.Future[Load] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tag, []).append(future)
            return await future
        except asyncio.CancelledError:
            self.cancelled.append(tag)
            raise
        finally:
            self.running[tag] -= 1

    def finish(self, tag: str, outcome: Load | Exception = Load()) -> None:  # noqa: B008  # it is frozen
        future = next(each for each in self._waiting[tag] if not each.done())
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


class Stage:
    """Routers and their replicas, which the test controls."""

    def __init__(self) -> None:
        self.replicas = Replicas()
        self.listener = ScriptedListener()
        self.clock = LoopClock()
        self.sent: list[asyncio.Task[None]] = []
        self.routes = ScriptedRoutes()
        self.waiting_calls = WaitingCalls()
        self.routers = Routers(
            cast(Cluster, self.replicas),
            cast(LongPollClient, self.listener),
            self.clock,
            random.Random(1),
            self.routes,
            self.waiting_calls,
            {},
        )

    def publish(
        self,
        *tags: str,
        backend: str = "b",
        concurrency: int = 1,
        max_queued: int = 100,
        incarnation: int = 1,
        **more: Any,
    ) -> None:
        replicas = [[tag, f"worker-of-{tag}", incarnation] for tag in tags]
        value = {
            "replicas": replicas,
            "concurrency": concurrency,
            "max_queued": max_queued,
            "max_crash_retries": 1,
            **more,
        }
        self.listener.tell(f"backend/{backend}", value)

    def backend(self, *tags: str, **fields: Any) -> ReplicaSet:
        """Return the replica set of backend ``b`` with these replicas."""
        found = self.routers.replica_set("b")
        if tags:
            self.publish(*tags, **fields)
        return found

    def endpoint(self, traffic: dict[str, float], shadows: dict[str, float] | None = None) -> Router:
        router = self.routers.router("e")
        self.listener.tell("endpoint/e", {"traffic": traffic, "shadows": shadows or {}, "legacy": True})
        return router

    def send(
        self, target: ReplicaSet | Router, envelope: Envelope = CALL, **options: Any
    ) -> asyncio.Task[None]:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"body", "more_body": False}

        async def drop(message: Message) -> None:
            pass

        task = asyncio.create_task(target.send(envelope, receive, drop, **options))
        self.sent.append(task)
        return task


async def quiet() -> None:
    """Run all code that takes no time."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    try:
        yield stage
    finally:
        for task in stage.sent:
            task.cancel()
        await asyncio.gather(*stage.sent, return_exceptions=True)


def now() -> float:
    return asyncio.get_running_loop().time()


# ---- room and the queue


async def test_a_replica_gets_as_many_requests_as_its_concurrency_and_the_rest_queue_in_order(
    stage: Stage,
) -> None:
    backend = stage.backend("r1", concurrency=2)
    sent = [stage.send(backend) for _ in range(5)]
    await quiet()
    assert stage.replicas.asked == ["r1", "r1"]
    assert "waiting=3 r1=2/2" in repr(backend)
    for number in range(5):
        stage.replicas.finish("r1")
        await quiet()
        assert [each.done() for each in sent] == [True] * (number + 1) + [False] * (4 - number)
    assert stage.replicas.most == {"r1": 2}


async def test_a_full_queue_rejects_with_its_size_and_limit(stage: Stage) -> None:
    backend = stage.backend("r1", max_queued=2)
    sent = [stage.send(backend) for _ in range(3)]
    await quiet()
    with pytest.raises(BackPressureError, match="2 requests already wait for deployment 'b'") as info:
        await stage.send(backend)
    assert (info.value.num_queued_requests, info.value.max_queued_requests) == (2, 2)
    assert info.value.http_status == 503
    for _ in sent:
        stage.replicas.finish("r1")
        await quiet()
    assert all(each.done() and each.exception() is None for each in sent)


@pytest.mark.parametrize(("max_queued", "accepted"), [(2, 3), (0, 1), (-1, 30)])
async def test_the_queue_limit_holds_for_requests_that_arrive_before_it_is_known(
    stage: Stage, max_queued: int, accepted: int
) -> None:
    backend = stage.backend()
    sent = [stage.send(backend) for _ in range(30)]
    await quiet()
    assert not any(each.done() for each in sent)
    stage.publish("r1", max_queued=max_queued)
    await quiet()
    # The oldest requests stay.
    assert [each.done() for each in sent] == [False] * accepted + [True] * (30 - accepted)
    for each in sent[accepted:]:
        with pytest.raises(BackPressureError, match="as many as max_queued_requests allows") as info:
            await each
        assert (info.value.num_queued_requests, info.value.max_queued_requests) == (
            max_queued,
            max_queued,
        )


@pytest.mark.parametrize(("max_queued", "waiting"), [(0, 0), (-1, 2000)])
async def test_no_queue_and_a_queue_without_limit(stage: Stage, max_queued: int, waiting: int) -> None:
    backend = stage.backend("r1", max_queued=max_queued)
    stage.send(backend)
    sent = [stage.send(backend) for _ in range(max(1, waiting))]
    await quiet()
    refused = sum(each.done() and isinstance(each.exception(), BackPressureError) for each in sent)
    assert refused == (0 if waiting else 1)


async def test_a_cancelled_request_leaves_the_queue(stage: Stage) -> None:
    backend = stage.backend("r1", max_queued=1)
    first, second = stage.send(backend), stage.send(backend)
    await quiet()
    second.cancel()
    await quiet()
    third = stage.send(backend)
    await quiet()
    stage.replicas.finish("r1")
    await quiet()
    assert first.done()
    assert stage.replicas.asked == ["r1", "r1"]
    stage.replicas.finish("r1")
    await third


async def test_the_turn_of_a_cancelled_request_goes_to_the_next(stage: Stage) -> None:
    backend = stage.backend("r1")
    stage.send(backend)
    second, third = stage.send(backend), stage.send(backend)
    await quiet()
    stage.replicas.finish("r1")
    await asyncio.sleep(0)  # the first request ends; the second is notified, but has not run yet
    second.cancel()
    await quiet()
    assert second.cancelled()
    assert stage.replicas.asked == ["r1", "r1"]
    stage.replicas.finish("r1")
    await third


async def test_a_caller_that_disconnects_cancels_its_request_and_frees_its_slot(stage: Stage) -> None:
    backend = stage.backend("r1")
    first, second = stage.send(backend), stage.send(backend)
    await quiet()
    first.cancel()
    await quiet()
    assert stage.replicas.cancelled == ["r1"]
    assert stage.replicas.running == {"r1": 1}
    stage.replicas.finish("r1")
    await second


# ---- which replica


async def test_requests_spread_by_requests_in_flight(stage: Stage) -> None:
    backend = stage.backend("r1", "r2", "r3", concurrency=10)
    for _ in range(15):
        stage.send(backend)
    await quiet()
    assert sorted(stage.replicas.running.values()) == [5, 5, 5]


async def test_a_fresh_load_report_counts_and_an_old_one_does_not(stage: Stage) -> None:
    backend = stage.backend("r1", "r2", concurrency=100)

    async def answer(tag: str, *_: Any) -> Load:
        return Load(ongoing=40, queued=2) if tag == "r1" else Load()

    stage.replicas.handler = answer
    while "r1" not in stage.replicas.asked:
        await stage.send(backend)
    stage.replicas.asked.clear()
    for _ in range(20):
        await stage.send(backend)
    assert set(stage.replicas.asked) == {"r2"}
    await asyncio.sleep(REPORT_S)
    for _ in range(20):
        await stage.send(backend)
    assert "r1" in stage.replicas.asked


async def test_a_busy_replica_is_skipped_for_a_moment(stage: Stage) -> None:
    """It is full with requests of other processes, which this process cannot know beforehand."""
    backend = stage.backend("r1", "r2", concurrency=2)
    began = now()

    async def answer(tag: str, *_: Any) -> Load:
        if tag == "r1":
            raise ReplicaBusyError("full", ongoing=2)
        return Load()

    stage.replicas.handler = answer
    for _ in range(10):
        await stage.send(backend)
    assert now() == began
    assert stage.replicas.asked.count("r2") == 10
    assert stage.replicas.asked.count("r1") <= 1
    await asyncio.sleep(REPORT_S)
    for _ in range(10):
        await stage.send(backend)
    assert stage.replicas.asked.count("r1") in (1, 2)


async def test_if_all_replicas_are_full_a_request_queues_at_each_in_turn(stage: Stage) -> None:
    backend = stage.backend("r1", "r2")
    queue_timeout: list[QueueTimeout | None] = []

    async def answer(tag: str, envelope: Envelope, *_: Any) -> Load:
        queue_timeout.append(envelope.queue_timeout)
        if envelope.queue_timeout is None:
            raise ReplicaBusyError("full", ongoing=1)
        if len(queue_timeout) < 5:
            await asyncio.sleep(envelope.queue_timeout.left_s)
            raise ReplicaBusyError("full", ongoing=1)
        return Load()

    stage.replicas.handler = answer
    await stage.send(backend, POST)
    assert {*stage.replicas.asked[:2]} == {*stage.replicas.asked[2:4]} == {"r1", "r2"}
    assert queue_timeout == [
        None,
        None,
        *(QueueTimeout(QUEUE_TIMEOUT_S / 2, n * QUEUE_TIMEOUT_S / 2) for n in range(3)),
    ]
    assert now() == QUEUE_TIMEOUT_S
    assert POST.queue_timeout is None


class OnlyReplica:
    """The only replica of a backend, which gets requests from several routers."""

    TRANSIT_S = 0.0005

    def __init__(self, took_s: float, routers: int = 2, slots: int = 1, jitter: float = 0.0) -> None:
        self._rng, self._jitter = random.Random(1), jitter
        self.metrics = ReplicaMetrics()
        self.slots = Slots("r1", slots, self.metrics)
        self.slots.is_open = True
        self.took_s = took_s
        self.stages = [Stage() for _ in range(routers)]
        self.backends = [stage.backend("r1", concurrency=slots) for stage in self.stages]
        #: How many requests of each router ran.
        self.turns = [0] * routers
        for number, stage in enumerate(self.stages):
            stage.routers.rng.seed(number)
            stage.replicas.handler = partial(self._answer, number)
        self._sending: list[asyncio.Task[None]] = []

    async def _answer(self, router: int, tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        await asyncio.sleep(self.TRANSIT_S)
        slots = self.slots
        if slots.ongoing >= slots.concurrency or envelope.queue_timeout is not None:
            await slots.take(envelope, send)
        else:
            slots.ongoing += 1
        self.turns[router] += 1
        assert slots.ongoing <= slots.concurrency
        try:
            await asyncio.sleep(self.took_s * (1 + self._jitter * (self._rng.random() - 0.5)))
        finally:
            slots.free()
        load = slots.load()
        await asyncio.sleep(self.TRANSIT_S)
        return load

    def keep_asking(self, router: int, clients: int) -> None:
        """Let some clients of a router send one request after the other."""

        async def keep_asking() -> None:
            while True:
                await self.stages[router].send(self.backends[router])

        self._sending += [asyncio.create_task(keep_asking()) for _ in range(clients)]

    async def end(self) -> None:
        """Cancel all requests, and check that nothing is left of them."""
        for task in [*self._sending, *(each for stage in self.stages for each in stage.sent)]:
            task.cancel()
        await quiet()
        assert self.slots.load() == Load(0, 0)
        assert [(each.waiting, each.in_flight) for each in self.backends] == [(0, 0)] * len(self.backends)


@pytest.mark.parametrize("clients", [(3, 3), (1, 10), (3, 3, 3, 3, 3), (1, 10, 1, 2, 5), (1, 1, 1, 1, 1)])
@pytest.mark.parametrize("took_s", [1.0, 0.3, 0.005])
async def test_routers_take_turns_at_a_replica_hardly_disturb_it_and_leave_it_no_time_to_idle(
    took_s: float, clients: tuple[int, ...]
) -> None:
    slots = OnlyReplica(took_s, len(clients))
    for router, count in enumerate(clients):
        slots.keep_asking(router, count)
    span_s = 60 * took_s if took_s == 1.0 else 6.0
    await asyncio.sleep(span_s)
    assert slots.metrics.refused < 10 * span_s
    assert max(slots.turns) - min(slots.turns) <= 2
    assert sum(slots.turns) * took_s > 0.9 * span_s
    await slots.end()


@pytest.mark.parametrize("took_s", [1.0, 0.02])
async def test_routers_use_and_share_all_of_many_slots(took_s: float) -> None:
    slots = OnlyReplica(took_s, routers=3, slots=8, jitter=0.4)
    for router, count in enumerate((10, 20, 40)):
        slots.keep_asking(router, count)
    await asyncio.sleep(60 * took_s)
    assert sum(slots.turns) > 0.9 * 60 * 8
    assert min(slots.turns) > 0.8 * max(slots.turns)
    assert slots.metrics.refused < 20 + 10 * 60 * took_s
    await slots.end()


async def test_an_occasional_request_to_a_busy_replica_soon_gets_a_slot() -> None:
    slots = OnlyReplica(0.01)
    slots.keep_asking(0, 3)
    waited_s = []
    for _ in range(100):
        await asyncio.sleep(0.1)
        began = now()
        await slots.stages[1].send(slots.backends[1])
        waited_s.append(now() - began)
    assert max(waited_s) < 3.5 * slots.took_s
    await slots.end()


async def test_a_replica_that_has_room_again_is_used_without_waiting() -> None:
    slots = OnlyReplica(1.0, slots=5)
    slots.keep_asking(0, 5)
    await asyncio.sleep(0.5)
    first = slots.stages[1].send(slots.backends[1])
    await asyncio.sleep(0.1)
    assert slots.metrics.refused == 1
    assert slots.backends[1].waiting == 1
    for task in slots.stages[0].sent[-5:]:
        task.cancel()
    slots._sending.clear()
    await asyncio.sleep(0.001)
    began = now()
    await asyncio.gather(*(slots.stages[1].send(slots.backends[1]) for _ in range(4)))
    assert now() - began < 1.0 + 10 * slots.TRANSIT_S
    assert slots.metrics.refused == 1
    await first
    await slots.end()


async def test_one_request_queues_at_the_replica_and_the_others_in_the_router(stage: Stage) -> None:
    backend = stage.backend("r1", concurrency=3, max_queued=3)
    took: list[Callable[[Message], Awaitable[None]]] = []
    seen: list[Message] = []

    async def answer(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        if envelope.queue_timeout is None:
            raise ReplicaBusyError("full", ongoing=3)
        took.append(send)
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def keep(message: Message) -> None:
        seen.append(message)

    stage.replicas.handler = answer
    first = asyncio.create_task(backend.send(CALL, cast(Receive, None), keep))
    stage.sent.append(first)
    await quiet()
    for _ in range(2):
        stage.send(backend)
    await quiet()
    assert stage.replicas.asked == ["r1"] * 2
    assert (backend.waiting, backend.in_flight) == (3, 0)
    with pytest.raises(BackPressureError, match="3 requests already wait"):
        await stage.send(backend)
    await took[0]({"type": SLOT_TAKEN, "ongoing": 3, "queued": 4})
    await took[0]({"type": "call.result"})
    await quiet()
    assert stage.replicas.asked == ["r1"] * 3
    assert (backend.waiting, backend.in_flight) == (2, 1)
    assert seen == [{"type": "call.result"}]
    first.cancel()
    await quiet()
    assert (backend.waiting, backend.in_flight) == (2, 0)
    stage.sent[1].cancel()
    await quiet()
    assert stage.replicas.asked == ["r1"] * 4, "the place of one who leaves the line goes to the next"
    assert (backend.waiting, backend.in_flight) == (1, 0)


async def test_a_slot_with_others_free_lets_waiting_requests_go_and_the_wait_is_recorded(
    stage: Stage,
) -> None:
    backend = stage.backend("r1", concurrency=9)
    patient: list[Send] = []

    async def answer(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        if not patient and envelope.queue_timeout is None:
            raise ReplicaBusyError("full", ongoing=9)
        if envelope.queue_timeout is not None:
            patient.append(send)
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    stage.replicas.handler = answer
    for _ in range(4):
        stage.send(backend)
        await quiet()
    assert (backend.waiting, series(stage)[("router_queue_wait_seconds",)]) == (4, 0)
    await patient[0]({"type": SLOT_TAKEN, "ongoing": 1, "queued": 0})
    await quiet()
    assert (len(patient), backend.waiting, backend.in_flight) == (1, 0, 4)
    assert series(stage)[("router_queue_wait_seconds",)] == 4


async def test_the_replica_queue_place_of_a_cancelled_request_goes_to_the_next(stage: Stage) -> None:
    backend = stage.backend("r1", "r2", concurrency=2)
    patient: list[Send] = []

    async def answer(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        if envelope.queue_timeout is None:
            raise ReplicaBusyError("full", ongoing=2)
        patient.append(send)
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    stage.replicas.handler = answer
    sent = [stage.send(backend) for _ in range(4)]
    await quiet()
    assert (len(patient), backend.waiting) == (2, 4)
    sent[0].cancel()
    await asyncio.sleep(0)  # the next request is notified, but has not run yet
    sent[2].cancel()
    sent[3].cancel()
    await quiet()
    assert backend.waiting == 1
    sent[1].cancel()
    await quiet()
    assert (backend.waiting, backend.in_flight) == (0, 0)


async def test_a_full_replica_queue_is_tried_again_after_a_moment(stage: Stage) -> None:
    backend = stage.backend("r1")

    async def answer(*_: Any) -> Load:
        raise ReplicaBusyError("full", ongoing=1)

    stage.replicas.handler = answer
    stage.send(backend)
    await asyncio.sleep(10.5 * BUSY_BACKOFF_S)
    assert len(stage.replicas.asked) == 2 + 10


@pytest.mark.parametrize(("replicas", "left_s"), [(1, QUEUE_TIMEOUT_S), (1000, MIN_QUEUE_TIMEOUT_S)])
async def test_among_many_replicas_a_request_waits_less_at_each(
    stage: Stage, replicas: int, left_s: float
) -> None:
    backend = stage.backend(*map(str, range(replicas)))
    found: list[QueueTimeout] = []

    async def answer(tag: str, envelope: Envelope, *_: Any) -> Load:
        if envelope.queue_timeout is None:
            raise ReplicaBusyError("full", ongoing=1)
        found.append(envelope.queue_timeout)
        return Load()

    stage.replicas.handler = answer
    await stage.send(backend)
    assert found == [QueueTimeout(left_s)]


async def test_a_request_that_ran_out_of_patience_moves_to_a_replica_with_room() -> None:
    slots = OnlyReplica(1000.0)
    slots.stages[0].send(slots.backends[0])
    await asyncio.sleep(0.1)
    waiting = slots.stages[1].send(slots.backends[1])
    await asyncio.sleep(0.1)
    stage = slots.stages[1]

    async def answer(*_: Any) -> Load:
        return Load()

    stage.replicas.handler = answer
    stage.publish("r1", "r2")
    await waiting
    assert stage.replicas.asked[-1] == "r2"
    assert now() < 0.1 + QUEUE_TIMEOUT_S + 10 * slots.TRANSIT_S
    await slots.end()


async def test_simultaneous_refusals_suspend_a_replica_once(stage: Stage) -> None:
    backend = stage.backend("r1", concurrency=10)
    for _ in range(10):
        stage.send(backend)
    await quiet()
    for _ in range(10):
        stage.replicas.finish("r1", ReplicaBusyError("full", ongoing=10))
    await quiet()
    assert len(stage.replicas.asked) == 11
    assert (backend.waiting, backend.in_flight) == (10, 0)


async def test_a_local_replica_is_chosen_first(stage: Stage) -> None:
    stage.replicas.here = "worker-of-r2"
    backend = stage.backend("r1", "r2", "r3", concurrency=3)
    for number in range(3):
        stage.send(backend)
        await quiet()
        assert stage.replicas.asked == ["r2"] * (number + 1)
        await asyncio.sleep(0.1)
        stage.replicas.finish("r2")
        await quiet()
    for _ in range(3):
        stage.send(backend)
    await quiet()
    assert set(stage.replicas.asked[3:]) == {"r1", "r2", "r3"}, "others are idle"


async def test_new_replicas_get_the_queued_requests_and_the_next_ones(stage: Stage) -> None:
    old = [f"r{number}" for number in range(50)]
    backend = stage.backend(*old, concurrency=2)
    sent = [stage.send(backend) for _ in range(103)]
    await quiet()
    began = now()
    stage.publish(*old, "new", concurrency=2)
    await quiet()
    assert stage.replicas.asked[100:] == ["new", "new"]
    for tag in old:
        stage.replicas.finish(tag)
    await quiet()
    stage.publish(*old, "new", "newer", concurrency=2)
    sent.append(stage.send(backend))
    await quiet()
    assert stage.replicas.asked[-1] == "newer", "though fifty others have room, too"
    assert now() == began


# ---- replicas that are lost


@pytest.mark.parametrize("envelope", [CALL, GET, POST])
async def test_a_request_that_had_not_begun_is_retried_transparently(
    stage: Stage, envelope: Envelope
) -> None:
    backend = stage.backend("r1", "r2")
    began = now()

    async def answer(tag: str, *_: Any) -> Load:
        if tag == "r1":
            raise ActorLostError("cannot be reached", begun=False)
        return Load()

    stage.replicas.handler = answer
    for _ in range(10):
        await stage.send(backend, envelope)
    assert now() == began
    assert stage.replicas.asked.count("r1") <= 1
    assert stage.replicas.asked.count("r2") == 10
    await asyncio.sleep(UNREACHABLE_BACKOFF_S)
    for _ in range(10):
        await stage.send(backend, envelope)
    assert stage.replicas.asked.count("r1") >= 1


@pytest.mark.parametrize("envelope", [CALL, POST])
async def test_a_begun_request_that_must_not_be_retried_fails(stage: Stage, envelope: Envelope) -> None:
    backend = stage.backend("r1", "r2")

    async def answer(*_: Any) -> Load:
        raise ActorLostError("the worker died", begun=True)

    stage.replicas.handler = answer
    with pytest.raises(ActorLostError, match="the worker died"):
        await stage.send(backend, envelope)
    assert len(stage.replicas.asked) == 1


class Caller:
    """Sends a body in parts, and keeps the answer."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = list(parts)
        self.answers: list[Message] = []

    async def receive(self) -> Message:
        body = self.parts.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(self.parts)}

    async def send(self, message: Message) -> None:
        self.answers.append(message)


START: Message = {"type": "http.response.start", "status": 200, "headers": []}


async def body_of(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            return body


async def test_a_begun_idempotent_request_is_answered_once_by_another_replica(stage: Stage) -> None:
    backend = stage.backend("r1", "r2")
    bodies: list[bytes] = []

    async def answer(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        bodies.append(await body_of(receive))
        if len(bodies) == 1:
            raise ActorLostError("the worker died", begun=True)
        await send(START)
        await send({"type": "http.response.body", "body": tag.encode()})
        return Load()

    stage.replicas.handler = answer
    caller = Caller(b"one,", b"two")
    put = Envelope(EnvelopeKind.HTTP, {"type": "http", "method": "PUT"})
    await backend.send(put, caller.receive, caller.send)
    first, second = stage.replicas.asked
    assert first != second
    assert bodies == [b"one,two"] * 2
    assert caller.answers == [START, {"type": "http.response.body", "body": second.encode()}]


@pytest.mark.parametrize(("body", "is_answered"), [(b"", True), (b"x" * (KEPT_BYTES + 1), False)])
async def test_a_request_with_a_begun_response_or_a_large_body_is_not_retried(
    stage: Stage, body: bytes, is_answered: bool
) -> None:
    backend = stage.backend("r1", "r2")

    async def answer(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        await body_of(receive)
        if is_answered:
            await send(START)
        raise ActorLostError("the worker died", begun=True)

    stage.replicas.handler = answer
    caller = Caller(body)
    get = replace(GET, has_started=lambda: bool(caller.answers))
    with pytest.raises(ActorLostError, match="the worker died") as info:
        await backend.send(get, caller.receive, caller.send)
    assert info.value.http_status == 502
    assert len(stage.replicas.asked) == 1
    assert caller.answers == [START] * is_answered


@pytest.mark.parametrize("begun", [True, False])
async def test_a_broken_connection_suspends_a_running_replica_only_briefly(stage: Stage, begun: bool) -> None:
    """Its worker may still be alive, so the next connection may work."""
    backend = stage.backend("r1")

    async def answer(*_: Any) -> Load:
        if len(stage.replicas.asked) == 1:
            raise ActorLostError("the connection was lost", begun=begun, is_disconnected=True)
        return Load()

    stage.replicas.handler = answer
    await stage.send(backend, GET)
    assert stage.replicas.asked == ["r1", "r1"]
    assert now() == pytest.approx(DISCONNECTED_BACKOFF_S)


async def test_errors_of_user_code_reach_the_caller_and_free_the_slot(stage: Stage) -> None:
    backend = stage.backend("r1")

    async def answer(*_: Any) -> Load:
        raise ValueError("of the user")

    stage.replicas.handler = answer
    for _ in range(3):
        with pytest.raises(ValueError, match="of the user"):
            await stage.send(backend)
    assert "r1=0/1" in repr(backend)


async def test_replicas_of_a_worker_that_left_get_no_requests(stage: Stage) -> None:
    backend = stage.backend("r1", "r2", concurrency=100)
    for left in stage.listener.left:
        left("worker-of-r1")
    for _ in range(10):
        stage.send(backend)
    await quiet()
    assert set(stage.replicas.asked) == {"r2"}


# ---- news of the backend


async def test_requests_in_flight_stay_counted_when_the_replicas_change(stage: Stage) -> None:
    backend = stage.backend("r1")
    sent = [stage.send(backend), stage.send(backend)]
    await quiet()
    stage.publish("r1", "r2")
    await quiet()
    assert stage.replicas.asked == ["r1", "r2"]  # r1 is still full
    stage.publish("r2")
    third = stage.send(backend)
    await quiet()
    assert stage.replicas.asked == ["r1", "r2"]
    stage.replicas.finish("r1")
    await sent[0]
    assert not third.done()
    stage.replicas.finish("r2")
    await quiet()
    assert stage.replicas.asked == ["r1", "r2", "r2"]


async def test_a_replica_with_the_same_tag_and_a_new_incarnation_is_a_new_replica(stage: Stage) -> None:
    backend = stage.backend("r1")
    stage.send(backend)
    await quiet()
    stage.publish("r1", incarnation=2)
    stage.send(backend)
    await quiet()
    assert [each.incarnation for each in stage.replicas.addresses] == [1, 2]
    assert stage.replicas.addresses[0].name == "i/replica/r1"
    assert stage.replicas.addresses[0].worker == "worker-of-r1"


async def test_higher_concurrency_lets_queued_requests_go(stage: Stage) -> None:
    backend = stage.backend("r1")
    for _ in range(4):
        stage.send(backend)
    await quiet()
    assert stage.replicas.running == {"r1": 1}
    stage.publish("r1", concurrency=3)
    await quiet()
    assert stage.replicas.running == {"r1": 3}


async def test_requests_wait_for_an_unknown_backend_and_for_one_without_replicas(stage: Stage) -> None:
    backend = stage.backend()
    sent = stage.send(backend)
    await asyncio.sleep(5)
    stage.backend()
    stage.publish()
    await asyncio.sleep(5)
    assert not sent.done()
    stage.publish("r1")
    await quiet()
    assert stage.replicas.asked == ["r1"]


async def test_requests_without_a_replica_fail_once_no_controller_has_answered_for_long(stage: Stage) -> None:
    """As if all workers were lost for good. Requests to a known replica continue."""
    backend = stage.backend("r1")
    running, waiting = stage.send(backend), stage.send(backend)
    await quiet()
    stage.listener.silent_since = now()
    await asyncio.sleep(2 * CONTROLLER_S)
    assert not waiting.done()  # r1 may answer the first request, and then has room
    stage.replicas.finish("r1", ActorLostError("gone"))
    for forget in stage.listener.left:
        forget("worker-of-r1")
    for each in (running, waiting, stage.send(backend)):
        with pytest.raises((UnavailableError, ActorLostError)):
            await asyncio.wait_for(each, 2 * CHECK_S)
    assert "no controller has answered for 6" in str(waiting.exception())
    assert not backend.waiting
    stage.listener.silent_since = None
    again = stage.send(backend)
    await quiet()
    stage.publish("r2")
    await quiet()
    stage.replicas.finish("r2")
    await again


@pytest.mark.parametrize("is_lost_first", [False, True])
async def test_requests_wait_for_a_controller_that_is_being_replaced(
    stage: Stage, is_lost_first: bool
) -> None:
    backend = stage.backend()
    if is_lost_first:
        stage.listener.silent_since = now()
    waiting = stage.send(backend)
    await asyncio.sleep(CHECK_S + 0.1)
    assert stage.listener.asked == 1
    stage.listener.silent_since = now()
    await asyncio.sleep(CONTROLLER_S - 0.5)
    assert not waiting.done()
    stage.publish("r1")
    await quiet()
    assert stage.replicas.asked == ["r1"]
    stage.replicas.finish("r1")
    await waiting
    asked = stage.listener.asked
    await asyncio.sleep(10 * CHECK_S)
    assert stage.listener.asked == asked  # no request waits


async def test_deleting_a_backend_fails_queued_requests_but_not_those_in_flight(stage: Stage) -> None:
    backend = stage.backend("r1")
    running, waiting = stage.send(backend), stage.send(backend)
    await quiet()
    stage.listener.tell("backend/b", None)
    with pytest.raises(UnavailableError, match="Deployment 'b' was deleted"):
        await waiting
    with pytest.raises(UnavailableError):
        await stage.send(backend)
    stage.replicas.finish("r1")
    await running
    stage.publish("r2")
    stage.send(backend)
    await quiet()
    assert stage.replicas.asked == ["r1", "r2"]


async def test_a_deletion_elsewhere_completes_what_the_replicas_have_and_refuses_the_rest(
    stage: Stage,
) -> None:
    """Another process requested the deletion; this one is notified while calls wait or are in transit."""
    backend = stage.backend("r1", "r2")
    running, on_its_way = stage.send(backend), stage.send(backend)
    await quiet()
    waiting = stage.send(backend)
    stage.publish(ending="")  # its replicas stop
    for each in (waiting, stage.send(backend)):
        with pytest.raises(DeploymentIsBeingDeletedError, match="is being deleted") as info:
            await each
        assert http_status_of(info.value) == 503
    stage.replicas.finish("r1")
    await running
    stage.replicas.finish("r2", ActorLostError("r2 is not running", begun=False))
    with pytest.raises(DeploymentIsBeingDeletedError):
        await on_its_way


@pytest.mark.parametrize(
    ("why", "error", "text"),
    [
        (
            {"unloadable": "it is damaged"},
            CodeUnavailableError,
            r"'b' is unavailable .* loaded: it is damaged",
        ),
        ({"off": True}, UnavailableError, "the target capacity of its instance is 0 %"),
    ],
)
async def test_requests_fail_at_once_if_no_replica_can_start(
    stage: Stage, why: dict[str, Any], error: type[UnavailableError], text: str
) -> None:
    backend = stage.backend("r1")
    running, waiting = stage.send(backend), stage.send(backend)
    await quiet()
    stage.publish("r1", **why)
    await quiet()
    assert not waiting.done()  # r1 answers as long as it exists
    stage.publish(**why)
    for each in (waiting, stage.send(backend)):
        with pytest.raises(error, match=text) as info:
            await each
        assert http_status_of(info.value) == 503
    stage.replicas.finish("r1")
    await running
    stage.publish()
    waiting = stage.send(backend)
    await asyncio.sleep(5)
    assert not waiting.done()
    stage.publish("r2")
    await quiet()
    assert stage.replicas.asked == ["r1", "r2"]


# ---- endpoints


async def test_an_endpoint_draws_its_backends_by_weight(stage: Stage) -> None:
    router = stage.endpoint({"b": 0.8, "c": 0.2})
    stage.publish("rb", concurrency=10**6)
    stage.publish("rc", backend="c", concurrency=10**6)
    for _ in range(1000):
        stage.send(router)
    await quiet()
    assert stage.replicas.running["rb"] + stage.replicas.running["rc"] == 1000
    assert abs(stage.replicas.running["rb"] - 800) <= 3 * (1000 * 0.8 * 0.2) ** 0.5


async def test_a_shard_key_stays_with_its_backend_until_the_traffic_changes(stage: Stage) -> None:
    router = stage.endpoint({"b": 0.5, "c": 0.5})
    stage.publish("rb", concurrency=10**6)
    stage.publish("rc", backend="c", concurrency=10**6)

    async def mapping() -> list[str]:
        stage.replicas.asked.clear()
        for number in range(20):
            stage.send(router, shard_key=f"user-{number}")
        await quiet()
        return list(stage.replicas.asked)

    first = await mapping()
    assert set(first) == {"rb", "rc"}
    assert await mapping() == first
    stage.endpoint({"b": 1.0})
    assert set(await mapping()) == {"rb"}


async def test_requests_wait_for_an_endpoint_that_is_not_known_yet(stage: Stage) -> None:
    router = stage.routers.router("e")
    sent = stage.send(router)
    await asyncio.sleep(ENDPOINT_TIMEOUT_S - 1)
    stage.endpoint({"b": 1.0})
    stage.publish("r1")
    await quiet()
    assert stage.replicas.asked == ["r1"]
    stage.replicas.finish("r1")
    await sent
    assert router.is_legacy


async def test_an_unknown_endpoint_is_a_timeout_and_a_deleted_one_is_not_found(stage: Stage) -> None:
    router = stage.routers.router("e")
    with pytest.raises(RequestTimeoutError, match="The controller sent no update of endpoint 'e' for 10 s"):
        await stage.send(router)
    waiting = stage.send(router)
    await quiet()
    stage.listener.tell("endpoint/e", None)
    with pytest.raises(NotFoundError, match=r"^Endpoint 'e' does not exist\.$"):
        await waiting
    stage.endpoint({"b": 0.0})
    with pytest.raises(UnavailableError, match="has no backend with traffic"):
        await stage.send(router)


# ---- shadows


async def test_a_shadow_gets_a_copy_and_its_response_is_discarded(stage: Stage) -> None:
    router = stage.endpoint({"b": 1.0}, {"s": 1.0})
    stage.publish("r1")
    stage.publish("shadow", backend="s")
    bodies: dict[str, list[bytes]] = {"r1": [], "shadow": []}
    answers: list[Message] = []

    async def answer(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        more = True
        while more:
            message = await receive()
            bodies[tag].append(message["body"])
            more = message["more_body"]
        await send({"type": "answer", "body": tag.encode()})
        return Load()

    stage.replicas.handler = answer
    parts = [{"type": "http.request", "body": b"1", "more_body": True}]
    parts.append({"type": "http.request", "body": b"2", "more_body": False})

    async def receive() -> Message:
        return parts.pop(0)

    async def keep(message: Message) -> None:
        answers.append(message)

    await router.send(POST, receive, keep)
    await quiet()
    assert bodies == {"r1": [b"1", b"2"], "shadow": [b"1", b"2"]}
    assert [each["body"] for each in answers] == [b"r1"]


@pytest.mark.parametrize("reads", [True, False])
async def test_a_shadow_of_a_request_without_a_body_reads_an_empty_one(stage: Stage, reads: bool) -> None:
    """It reads it once, whether or not the original reads it: over a channel, the original need not."""
    read: list[Message] = []

    async def an_empty_body() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def ignore(message: Message) -> None:
        raise AssertionError

    router = stage.endpoint({"b": 1.0}, {"s": 1.0})
    stage.publish("r1")
    stage.publish("shadow", backend="s")

    async def answer(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        if tag == "shadow":
            read.extend([await receive(), await receive()])
        elif reads:
            await receive()
        return Load()

    stage.replicas.handler = answer
    await router.send(replace(GET, has_body=False), an_empty_body, ignore)
    await quiet()
    assert [each["type"] for each in read] == ["http.request", "http.disconnect"]


@pytest.mark.parametrize("trouble", ["raises", "is lost", "is gone", "is full", "hangs"])
async def test_a_failing_shadow_does_not_affect_the_caller(stage: Stage, trouble: str) -> None:
    router = stage.endpoint({"b": 1.0}, {"s": 1.0})
    stage.publish("r1", concurrency=100)
    stage.publish("shadow", backend="s", max_queued=0)
    if trouble == "is gone":
        stage.listener.tell("backend/s", None)

    async def answer(tag: str, *_: Any) -> Load:
        if tag == "shadow":
            if trouble == "raises":
                raise ValueError("of the shadow")
            if trouble == "is lost":
                raise ActorLostError("gone")
            await asyncio.Event().wait()
        return Load()

    stage.replicas.handler = answer
    for _ in range(3):
        await stage.send(router)
    assert stage.replicas.asked.count("r1") == 3
    assert now() == 0


@pytest.mark.parametrize(("size", "is_copied"), [(2 << 20, True), (65 << 20, False)])
async def test_a_shadow_gets_a_large_body_that_comes_whole_if_there_is_memory(
    stage: Stage, size: int, is_copied: bool
) -> None:
    read: list[str] = []

    router = stage.endpoint({"b": 1.0}, {"s": 1.0})
    stage.publish("r1")
    stage.publish("shadow", backend="s")

    async def answer(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        read.append(tag)
        assert len((await receive())["body"]) == size
        return Load()

    stage.replicas.handler = answer

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(size), "more_body": False}

    async def drop(message: Message) -> None:
        raise AssertionError("nothing was answered")

    for _ in range(3):
        await router.send(POST, receive, drop)
        await quiet()
    assert read.count("r1") == 3
    assert read.count("shadow") == (3 if is_copied else 0)


@pytest.mark.parametrize(
    ("backends", "rules"),
    [
        ([{}], ("gather", 100)),
        ([{"bodies": "stream"}], ("stream", 100)),
        ([{"bodies": "drop"}], ("drop", 100)),
        ([{"bodies": "stream"}, {}], ("gather", 100)),
        ([{"bodies": "stream"}, {"bodies": "drop"}], ("stream", 100)),
        ([{"max_body_bytes": 5}], ("gather", 5)),
        ([{"max_body_bytes": 5}, {}], ("gather", 100)),
        ([{"max_body_bytes": 500}, {}], ("gather", 500)),
    ],
)
async def test_the_bodies_of_an_endpoint_are_as_its_backends_need_them(
    stage: Stage, backends: list[dict[str, Any]], rules: tuple[str, int]
) -> None:
    names = [f"b{number}" for number in range(len(backends))]
    router = stage.endpoint({name: 1 / len(names) for name in names})
    published = asyncio.create_task(router.wait_until_published())
    for name, fields in zip(names, backends, strict=True):
        await quiet()
        # Until all rules are published, no body may be refused.
        assert (router.body_rules(100), stage.routers.body_limits.largest_bytes) == (None, math.inf)
        assert not published.done()
        stage.publish("r1", backend=name, **fields)
    await published
    assert router.body_rules(100) == rules
    limits = stage.routers.body_limits
    assert limits.largest_bytes == max(each.get("max_body_bytes", 0) for each in backends)
    stage.routers.forget(router.endpoint)
    assert limits.largest_bytes == 0


async def _nothing(*message: Message) -> Message:
    raise AssertionError


async def test_the_queue_of_an_endpoint_can_be_checked_beforehand(stage: Stage) -> None:
    router = stage.endpoint({"b": 1.0})
    router.check_queue()
    stage.publish("r1", max_queued=1)
    sending = [asyncio.ensure_future(router.send(CALL, _nothing, _nothing)) for _ in range(2)]
    await quiet()
    assert router.is_crowded
    with pytest.raises(BackPressureError):
        router.check_queue()
    for each in sending:
        each.cancel()
    await asyncio.wait(sending)
    assert not router.is_crowded
    router.check_queue()


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_a_shadow_that_falls_behind_is_cancelled(stage: Stage, is_stuck: bool) -> None:
    """A shadow that keeps up gets the whole body, however large."""
    read = {"r1": 0, "shadow": 0}
    part = bytes(100_000)

    router = stage.endpoint({"b": 1.0}, {"s": 1.0})
    stage.publish("r1")
    stage.publish("shadow", backend="s")

    async def answer(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        more = True
        while more:
            message = await receive()
            read[tag] += len(message["body"])
            more = message["more_body"]
            if is_stuck and tag == "shadow":
                await asyncio.Event().wait()
        return Load()

    stage.replicas.handler = answer
    left = 100

    async def receive() -> Message:
        nonlocal left
        left -= 1
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": part, "more_body": left > 0}

    async def drop(message: Message) -> None:
        raise AssertionError("nothing was answered")

    await router.send(POST, receive, drop)
    await asyncio.sleep(1)
    assert stage.replicas.running["shadow"] == 0
    assert read["r1"] == 100 * len(part)
    assert read["shadow"] == (len(part) if is_stuck else 100 * len(part))


# ---- one set per process


async def test_endpoints_of_one_backend_share_its_replicas_and_its_queue(stage: Stage) -> None:
    one, two = stage.routers.router("one"), stage.routers.router("two")
    for name in ("one", "two"):
        stage.listener.tell(f"endpoint/{name}", {"traffic": {"b": 1.0}, "shadows": {}, "legacy": False})
    stage.publish("r1", max_queued=1)
    stage.send(one)
    stage.send(two)
    await quiet()
    with pytest.raises(BackPressureError):
        await stage.send(one)
    assert len(stage.listener.watchers["backend/b"]) == 1
    assert stage.routers.router("one") is one
    assert not one.is_legacy


async def test_closing_fails_queued_requests_and_stops_watching(stage: Stage) -> None:
    router = stage.endpoint({"b": 1.0}, {"s": 1.0})
    stage.publish("r1")
    stage.publish("shadow", backend="s")
    running, waiting = stage.send(router), stage.send(router)
    await quiet()
    for ended in stage.listener.ended:
        ended()
    with pytest.raises(UnavailableError):
        await waiting
    with pytest.raises(NotFoundError):
        await stage.send(router)
    assert not any(stage.listener.watchers.values())
    await quiet()
    assert stage.replicas.running["shadow"] == 0
    stage.replicas.finish("r1")
    await running


# ---- regressions


async def test_a_queued_request_is_not_rejected_later(stage: Stage) -> None:
    backend = stage.backend("r1", max_queued=1)
    stage.send(backend)
    queued = stage.send(backend)
    await quiet()
    stage.replicas.finish("r1")
    for _ in range(2):  # they start after the first has ended, before the queued request continues
        stage.send(backend)
    await quiet()
    assert not queued.done()


async def test_a_busy_replica_is_tried_again_soon_although_another_is_suspended_for_longer(
    stage: Stage,
) -> None:
    backend = stage.backend("r1", "r2")
    began = now()

    async def answer(tag: str, *_: Any) -> Load:
        if tag == "r1":
            raise ActorLostError("cannot be reached", begun=False)
        if stage.replicas.asked.count("r2") == 1:
            await asyncio.sleep(0.1)  # meanwhile, another request waits, and sets the timer for r1
            raise ReplicaBusyError("full", ongoing=1)
        return Load()

    stage.replicas.handler = answer
    sent = [stage.send(backend) for _ in range(3)]
    await asyncio.gather(*sent)
    assert now() - began < 0.2


async def test_all_replicas_that_return_at_the_same_time_are_used(stage: Stage) -> None:
    backend = stage.backend("r1", "r2")
    lost = True

    async def answer(*_: Any) -> Load:
        if lost:
            raise ActorLostError("cannot be reached", begun=False)
        await asyncio.sleep(60)
        return Load()

    stage.replicas.handler = answer
    sent = [stage.send(backend), stage.send(backend)]
    await quiet()
    lost = False
    await asyncio.sleep(UNREACHABLE_BACKOFF_S + 1)
    assert sum(stage.replicas.running.values()) == 2
    await asyncio.gather(*sent)


async def test_only_the_last_deleted_endpoints_and_backends_are_remembered(stage: Stage) -> None:
    """During a long-lived process, any number of applications may be created and deleted."""
    stage.endpoint({"b": 1.0})
    for number in range(2 * MAX_DELETED):
        endpoint, backends = f"endpoint/a{number}", [f"backend/a{number}", f"backend/new{number}"]
        stage.routers.router(f"a{number}")
        for each in (f"a{number}", f"new{number}"):  # the second endpoint replaces the first
            stage.listener.tell(endpoint, {"traffic": {each: 1.0}, "shadows": {}, "legacy": True})
            stage.publish("r", backend=each)
        for key in (backends[0], endpoint, backends[1]):
            stage.listener.tell(key, None)
    with pytest.raises(NotFoundError):
        await stage.send(stage.routers.router(f"a{2 * MAX_DELETED - 1}"))
    watched = [key for key, watchers in stage.listener.watchers.items() if watchers]
    assert {"endpoint/e", "backend/b"} <= set(watched)
    assert len(watched) < MAX_DELETED + 20


async def test_a_shadow_ends_with_its_original(stage: Stage) -> None:
    router = stage.endpoint({"b": 1.0}, {"s": 1.0})
    stage.listener.tell("backend/b", None)
    stage.publish("shadow", backend="s")

    async def answer(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        await receive()
        return Load()

    stage.replicas.handler = answer
    with pytest.raises(UnavailableError):
        await stage.send(router, POST)
    await asyncio.sleep(60)
    assert stage.replicas.running["shadow"] == 0


async def test_an_answer_that_its_caller_gave_up_is_not_compared(stage: Stage) -> None:
    """The copy may already have its whole answer, so half an answer would count as a difference."""
    router = stage.endpoint({"b": 1.0})
    new = {"replicas": [["new", "worker-of-new", 1]], "concurrency": 9, "max_queued": 9}
    rollout = {"key": "k/0", "share": 0.0, "names": ["2", "1"], "sticky": None, "shadow": 1.0}
    stage.publish("old", rollout={**rollout, "new": {**new, "max_crash_retries": 1}})

    async def answer(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if tag == "old":
            await asyncio.get_running_loop().create_future()
        await send({"type": "http.response.body", "body": b"all"})
        return Load()

    stage.replicas.handler = answer
    call = stage.send(router, Envelope(EnvelopeKind.HTTP, {**GET.head, "path": "/"}))
    await quiet()
    assert stage.replicas.running == {"old": 1, "new": 0}
    call.cancel()
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    versions = stage.routers.replica_set("b").versions
    assert versions is not None
    assert versions.comparer.plain() == [0, 0, [], 0, ""]


# ---- metrics


def series(stage: Stage) -> dict[tuple[str, ...], float]:
    return {
        (name, *labels[2:]): value.count if isinstance(value, HistogramCounts) else value
        for name, labels, value in stage.routers.samples()
        if labels[:2] == ("i", "b")
    }


async def test_outcomes_of_requests_are_counted(stage: Stage) -> None:
    backend = stage.backend("r1", max_queued=1)
    sent = [stage.send(backend), stage.send(backend), stage.send(backend)]
    await quiet()
    found = series(stage)
    assert (found[("router_queued_requests",)], found[("router_ongoing_requests",)]) == (1, 1)
    assert (found[("router_requests",)], found[("router_rejections",)]) == (3, 1)
    stage.replicas.finish("r1", ReplicaBusyError("busy", ongoing=1))
    await quiet()
    stage.replicas.finish("r1", ActorLostError("lost", begun=False))
    await asyncio.sleep(2 * UNREACHABLE_BACKOFF_S)
    while not all(each.done() for each in sent):
        stage.replicas.finish("r1")
        await quiet()
    found = series(stage)
    assert (found[("router_retries", "busy")], found[("router_retries", "lost")]) == (1, 1)
    assert (found[("router_queued_requests",)], found[("router_ongoing_requests",)]) == (0, 0)
    assert found[("router_requests",)] == 3
    assert found[("router_queue_wait_seconds",)] >= 1


async def test_series_of_a_deleted_backend_disappear_and_return_with_their_totals(stage: Stage) -> None:
    backend = stage.backend("r1")
    stage.send(backend)
    await quiet()
    stage.replicas.finish("r1")
    await quiet()
    stage.listener.tell("backend/b", None)
    assert series(stage) == {}
    stage.publish("r2")
    assert series(stage)[("router_requests",)] == 1


# ---- routes


async def test_a_request_does_not_wait_for_a_worker_that_cannot_be_reached(stage: Stage) -> None:
    stage.routes.known["worker-of-r1"] = None  # never dialled
    backend = stage.backend("r1", "r2", concurrency=10)
    for _ in range(20):
        stage.send(backend)
    await quiet()
    # Each request that had chosen this replica went to the other one.
    assert set(stage.replicas.asked) == {"r2"}
    assert set(stage.routes.dialled) == {"worker-of-r1"}
    dialled = len(stage.routes.dialled)
    stage.replicas.finish("r2")
    for _ in range(20):
        stage.send(backend)
    await quiet()
    assert len(stage.routes.dialled) == dialled, "it is left out from now on"
    assert now() == 0


async def test_requests_that_wait_continue_when_their_replica_can_be_reached_again(stage: Stage) -> None:
    backend = stage.backend("r1")
    stage.routes.tell("worker-of-r1", Reachability.NONE)
    stage.send(backend)
    await asyncio.sleep(60)
    assert stage.replicas.asked == []
    stage.routes.tell("worker-of-r1", Reachability.SCHEDULER)
    await quiet()
    assert stage.replicas.asked == ["r1"]


async def test_requests_at_a_silent_worker_are_given_up_once(stage: Stage) -> None:
    stage.backend("r1", "r2")
    stage.listener.tell(SILENT_WORKERS, ["worker-of-r1"])
    stage.listener.tell(SILENT_WORKERS, ["worker-of-r1", "worker-of-r2"])
    stage.listener.tell(SILENT_WORKERS, None)
    stage.listener.tell(SILENT_WORKERS, ["worker-of-r2"])
    assert stage.routes.broken_off == ["worker-of-r1", "worker-of-r2", "worker-of-r2"]


async def test_a_worker_is_used_as_long_as_a_replica_is_there(stage: Stage) -> None:
    stage.backend("r1", "r2")
    assert stage.routes.is_used("worker-of-r1")
    stage.publish("r2")
    assert not stage.routes.is_used("worker-of-r1")


async def test_a_deletion_can_wait_for_the_calls_that_learn_where_to_go() -> None:
    stage = Stage()
    waiting = asyncio.create_task(stage.waiting_calls.wait_until_over())
    await waiting
    router = stage.endpoint({"b": 1.0})
    stage.send(router)
    waiting = asyncio.create_task(stage.waiting_calls.wait_until_over())
    await asyncio.sleep(1)
    assert not waiting.done()  # the replicas are not known yet
    connected = asyncio.Event()

    async def connect(worker: str) -> None:
        await connected.wait()

    stage.routes.connect = connect  # type: ignore[method-assign]
    stage.routes.known["worker-of-r"] = None
    stage.publish("r")
    await asyncio.sleep(1)
    assert not waiting.done()  # there is no connection yet
    connected.set()
    await waiting
    assert stage.replicas.asked == ["r"]
    # The queue itself decides about the requests that wait for a slot.
    stage.send(router)
    await asyncio.sleep(0)
    await stage.waiting_calls.wait_until_over()
    assert router.only is not None
    assert router.only.waiting == 1
    for task in stage.sent:
        task.cancel()


# ---- rollouts


async def test_requests_that_wait_for_a_new_version_get_the_replicas_after_the_rollout(
    stage: Stage,
) -> None:
    router = stage.endpoint({"b": 1.0})
    new = {
        "replicas": [["n1", "worker-of-n1", 1]],
        "concurrency": 1,
        "max_queued": 100,
        "max_crash_retries": 1,
    }
    rollout = {"key": "r/0/1.0", "share": 1.0, "names": ["2", "1"], "sticky": None, "new": new}
    stage.publish("r1", rollout=rollout)
    sent = [stage.send(router, GET) for _ in range(2)]
    await quiet()
    assert stage.replicas.asked == ["n1"]
    stage.publish()
    stage.replicas.finish("n1")
    await quiet()
    assert [each.done() for each in sent] == [True, False]
    stage.publish("r9")
    await quiet()
    assert stage.replicas.asked == ["n1", "r9"]
    stage.replicas.finish("r9")
    await quiet()
    assert all(each.done() for each in sent)


async def test_nothing_is_watched_for_a_rollout_once_its_deployment_is_deleted(stage: Stage) -> None:
    router = stage.endpoint({"b": 1.0})
    new = {"replicas": [["n1", "worker-of-n1", 1]], "concurrency": 1, "max_queued": 9, "max_crash_retries": 1}
    rollout = {"key": "r/0/1.0", "share": 1.0, "names": ["2", "1"], "sticky": None, "new": new}
    stage.publish("r1", rollout=rollout)
    request = replace(CALL)
    request.model_id = "a model"
    sent = stage.send(router, request)
    await quiet()
    assert stage.listener.watchers["models/b"]
    stage.replicas.finish("n1")
    await sent
    stage.publish("n1")
    stage.listener.tell("backend/b", None)
    stage.listener.tell("endpoint/e", None)
    stage.routers.forget("e")
    assert [key for key, watchers in stage.listener.watchers.items() if watchers and "/b" in key] == []


# ---- priorities


def of(priority: int | str, deadline: float | None = None, name: str = "") -> Envelope:
    head = {"facts": {"priority": priority}, "name": name or str(priority)}
    return Envelope(EnvelopeKind.CALL, head, deadline=deadline)


async def in_order(stage: Stage, backend: ReplicaSet, *envelopes: Envelope) -> list[str]:
    """Return the names of requests in the order in which they get a single slot."""
    seen: list[str] = []

    async def note(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        seen.append(envelope.head.get("name", "first"))
        await asyncio.sleep(1)
        return Load()

    stage.replicas.handler = note
    sent = [stage.send(backend)]
    await quiet()
    sent += [stage.send(backend, each) for each in envelopes]
    await asyncio.gather(*sent)
    return seen[1:]


async def test_requests_wait_by_priority_and_in_order_of_arrival_among_equals(stage: Stage) -> None:
    backend = stage.backend("r1")
    named = [of(0, name="a"), of(5, name="b"), of(0, name="c"), of(-1, name="d"), of(5, name="e")]
    assert await in_order(stage, backend, *named) == ["b", "e", "a", "c", "d"]
    assert await in_order(stage, backend, of(0, name="x"), of(1, name="y")) == ["y", "x"]


async def test_the_earliest_deadline_goes_first_where_asked(stage: Stage) -> None:
    backend = stage.backend("r1", order={"by_deadline": True})
    named = [of(0, None, "never"), of(0, 900, "late"), of(0, 800, "soon"), of(1, None, "high")]
    assert await in_order(stage, backend, *named) == ["high", "soon", "late", "never"]


async def test_weights_share_the_slots(stage: Stage) -> None:
    order = {"classes": {"high": 10, "low": -10}, "weights": {10: 3.0, -10: 1.0}}
    backend = stage.backend("r1", order=order)
    named = [of(kind) for kind in ["low"] * 12 + ["high"] * 12]
    seen = await in_order(stage, backend, *named)
    assert [seen[:12].count(each) for each in ("high", "low")] == [9, 3]


@pytest.mark.parametrize("value", [b"7", b"urgent", b"-3", b"nonsense", b"9" * 10_000, b"\xb2"])
async def test_a_header_has_the_priority_of_an_http_request_if_an_option_names_it(
    stage: Stage, value: bytes
) -> None:
    backend = stage.backend("r1", order={"header": "X-Priority", "classes": {"urgent": 50}})
    head = {"type": "http", "method": "GET", "headers": [(b"x-priority", value)], "name": "http"}
    http = Envelope(EnvelopeKind.HTTP, head, has_body=False)
    seen = await in_order(stage, backend, of(1, name="call"), http)
    assert seen == (["http", "call"] if value in (b"7", b"urgent") else ["call", "http"])


async def test_a_full_queue_refuses_the_lowest_priority_first(stage: Stage) -> None:
    backend = stage.backend("r1", max_queued=3)
    first = [stage.send(backend, of(priority)) for priority in (0, 2, 0, 1)]
    await quiet()
    high = stage.send(backend, of(3))
    low = stage.send(backend, of(0))
    await quiet()
    # The running request stays, and the newest of the lowest priority is refused. Another of that priority is
    # refused at once.
    assert [each.done() for each in (*first, high, low)] == [False, False, True, False, False, True]
    for each in (first[2], low):
        with pytest.raises(BackPressureError):
            await each
    cancelled = stage.sent[1]
    cancelled.cancel()
    await quiet()
    assert backend.waiting == 2


async def test_thousands_of_requests_with_priorities_that_leave_are_forgotten(stage: Stage) -> None:
    backend = stage.backend("r1", max_queued=-1)
    for round_ in range(20):
        sent = [stage.send(backend, of(n % 7)) for n in range(200)]
        await quiet()
        for each in sent[round_ == 0 :]:
            each.cancel()
        await quiet()
    ranked = backend._waiting._ranked
    assert ranked is None or sum(map(len, ranked._classes.values())) <= 600
    assert backend.waiting == 0
