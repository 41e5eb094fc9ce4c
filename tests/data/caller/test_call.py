"""Direct handle calls to a remote replica: all outcomes, and the state after each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scripted_routes import ScriptedListener, ScriptedRoutes

from daskserve.cluster.long_poll import LongPollClient
from daskserve.cluster.protocols.base import Cluster
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorAddress, Envelope, Load, Message, OnAnswer, Receive, Send
from daskserve.data.caller.calls.handle import Handle
from daskserve.data.caller.routing.replay import MAX_REPEATS
from daskserve.data.caller.routing.replica_set import UNREACHABLE_BACKOFF_S
from daskserve.data.caller.routing.router import Routers
from daskserve.data.caller.routing.waiting_calls import WaitingCalls
from daskserve.errors import (
    ActorLostError,
    RemoteTraceback,
    ReplicaBusyError,
    ServeError,
    UnavailableError,
)
from daskserve.loops.thread_calls import LoopQueues
from daskserve.payload.packed_errors import pack_now
from daskserve.payload.pickling import dump
from daskserve.telemetry.histogram import HistogramCounts

pytestmark = pytest.mark.virtual_time


class Asked:
    """A request sent to a replica; the test decides its outcome."""

    def __init__(self, tag: str, envelope: Envelope, on_answer: OnAnswer) -> None:
        self.tag = tag
        self.envelope = envelope
        self.given_up = 0
        self._on_answer = on_answer

    def answer(self, value: Any, load: Load | None = None) -> None:
        self.end({"type": "call.result", "payload": dump(value)}, load or Load())

    def end(self, message: Message | None, outcome: Any) -> None:
        # Like a channel stream, which ignores outcomes of a cancelled request.
        if not self.given_up:
            self._on_answer(message, outcome)

    def give_up(self) -> None:
        self.given_up += 1


class Clock(LoopClock):
    """The loop's clock, which the test may advance."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


class Request:
    """A request to a replica of the `Process`; the test decides its outcome."""

    def __init__(self, process: Process, address: ActorAddress, envelope: Envelope) -> None:
        self.process = process
        self.address = address
        self.envelope = envelope
        self.tag = address.name.rpartition("/")[2]

    def start(self, on_answer: OnAnswer) -> Any:
        process = self.process
        if self.tag in process.apart or process.is_local(self.address):
            return None
        process.asked.append(Asked(self.tag, self.envelope, on_answer))
        process.on_ask(process.asked[-1])
        return process.asked[-1].give_up

    async def respond(self, receive: Receive, send: Send) -> Load:
        process = self.process
        process.requested.append(self.tag)
        process.envelopes.append(self.envelope)
        load = await process.outcome
        await send({"type": "call.result", "payload": dump("by task")})
        return load


class Process:
    """A process with remote replicas only. The object is both its connection and its cluster."""

    instance = "i"
    is_ended = is_closed = False

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        #: Requests that needed a task, and the outcome of each.
        self.requested: list[str] = []
        self.envelopes: list[Envelope] = []
        self.outcome: asyncio.Future[Load] = asyncio.get_running_loop().create_future()
        #: Replicas without a connection, and those in this process.
        self.apart: set[str] = set()
        self.here = ""
        #: Called by `Request.start` before it returns.
        self.on_ask: Callable[[Asked], None] = lambda asked: None
        self.loop = asyncio.get_running_loop()
        self.loop_queues = LoopQueues()
        self.current_task = lambda: None
        self.thread_calls = self.loop_queues.get(self.loop)
        self.clock = Clock()
        self.request_ids = SimpleNamespace(next=lambda: "id")
        self.listener = ScriptedListener()
        self.connection = self
        self.routers = Routers(
            cast(Cluster, self),
            cast(LongPollClient, self.listener),
            self.clock,
            random.Random(1),
            ScriptedRoutes(),
            WaitingCalls(),
            {},
        )
        self.shared = {"routers": self.routers}

    def runs_here(self) -> bool:
        return True

    def is_local(self, address: ActorAddress) -> bool:
        return address.worker == self.here

    def handler_of(self, address: ActorAddress) -> Any:
        return partial(Request, self, address)

    # ---- what the test does

    def publish(self, *tags: str, concurrency: int = 2, **more: Any) -> None:
        replicas = [[tag, f"worker-of-{tag}", 1] for tag in tags]
        facts = {"replicas": replicas, "concurrency": concurrency, "max_queued": 100, "max_crash_retries": 1}
        self.listener.tell("backend/b", facts | more)

    def handle(self, *tags: str, **options: Any) -> Handle:
        self.routers.router("e")
        self.listener.tell("endpoint/e", {"traffic": {"b": 1.0}, "shadows": {}, "legacy": True})
        self.publish(*tags, **options)
        return Handle("i", "e", cluster=self)

    def metrics(self) -> dict[str, Any]:
        """Return the counters that are not 0."""
        found = {}
        for name, labels, value in self.routers.samples():
            count = value.count if isinstance(value, HistogramCounts) else value
            if count and labels[1] in ("b", "e"):
                found[" ".join((name, *labels[2:]))] = count
        return found

    def idle_replicas(self) -> dict[str, int]:
        """Return the number of requests in flight at each replica."""
        pool = self.routers.replica_set("b").pool
        return {entry.tag: entry.in_flight for entry in pool._entries.values()}


@asynccontextmanager
async def new_process() -> AsyncIterator[Process]:
    yield Process()


@pytest.fixture
def process() -> AbstractAsyncContextManager[Process]:
    return new_process()  # it is entered on the test's loop


async def quiet() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


ONE = {"handle_requests": 1, "handle_request_duration_seconds": 1, "router_requests": 1}


async def test_an_answer_ends_the_call_where_it_arrives(process: Process) -> None:
    handle = process.handle("r1")
    response = handle.remote(1)
    (asked,) = process.asked
    assert process.routers.replica_set("b").in_flight == 1
    assert asked.envelope.head["request_id"] == "id"
    asked.answer({"a": 1}, Load(ongoing=2))
    assert response.result() == {"a": 1}  # before any task has run
    assert process.metrics() == ONE
    assert process.requested == []
    assert process.idle_replicas() == {"r1": 0}
    # The replica has reported that it is full, so no call is sent to it directly.
    handle.remote(2)
    await quiet()
    assert (len(process.asked), process.requested) == (1, ["r1"])


async def test_an_error_of_user_code_comes_with_its_remote_traceback(process: Process) -> None:
    handle = process.handle("r1")
    try:
        raise KeyError("k")
    except KeyError as error:
        packed = pack_now(error)
    for outcome in (packed, KeyError("k")):
        response = handle.remote()
        process.asked[-1].end(None, outcome)
        with pytest.raises(KeyError, match="k") as info:
            response.result()
        if outcome is packed:
            assert isinstance(info.value.__cause__, RemoteTraceback)
    assert process.metrics() == {
        "handle_requests": 2,
        "handle_request_duration_seconds": 2,
        "handle_errors user_code": 2,
        "router_requests": 2,
    }
    assert process.idle_replicas() == {"r1": 0}


async def test_an_end_without_an_answer_is_an_error(process: Process) -> None:
    response = process.handle("r1").remote()
    process.asked[0].end(None, Load())
    with pytest.raises(ServeError, match="ended request id without an answer"):
        response.result()
    assert process.metrics()["handle_request_duration_seconds"] == 1
    assert process.idle_replicas() == {"r1": 0}


@pytest.mark.parametrize(
    ("refusal", "cause"),
    [
        (ReplicaBusyError("full", ongoing=2), "busy"),
        (ActorLostError("gone", begun=False), "lost"),
        (ActorLostError("gone", begun=False, is_disconnected=True), "lost"),
    ],
)
async def test_a_call_that_had_not_begun_is_retried_on_another_replica(
    process: Process, refusal: Exception, cause: str
) -> None:
    response = process.handle("r1", "r2").remote()
    await asyncio.sleep(3)
    (asked,) = process.asked
    asked.end(None, refusal)
    await quiet()
    assert process.requested == [{"r1": "r2", "r2": "r1"}[asked.tag]]
    assert process.routers.replica_set("b").in_flight == 1
    process.outcome.set_result(Load())
    assert await response == "by task"
    assert process.metrics() == {**ONE, f"router_retries {cause}": 1}
    assert process.idle_replicas() == {"r1": 0, "r2": 0}


async def test_the_duration_of_a_call_starts_at_its_first_replica(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown() -> float:
        return asyncio.get_running_loop().time()

    monkeypatch.setattr("daskserve.data.caller.calls.call.stopwatch", shown)

    response = process.handle("r1", "r2").remote()
    await asyncio.sleep(3)
    process.asked[0].end(None, ActorLostError("gone", begun=False))
    await quiet()
    await asyncio.sleep(2)
    process.outcome.set_result(Load())
    await response
    (sample,) = (
        value for name, _, value in process.routers.samples() if name == "handle_request_duration_seconds"
    )
    assert sample.sum == pytest.approx(5)


async def test_a_refused_call_counts_as_ended_if_its_loop_cancels_all_tasks(process: Process) -> None:
    response = process.handle("r1", "r2").remote()
    process.asked[0].end(None, ReplicaBusyError("full", ongoing=2))
    (carrying,) = asyncio.all_tasks() - {asyncio.current_task()}
    carrying.cancel()
    await quiet()
    assert process.requested == []
    with pytest.raises(CancelledError):
        response.result(0)
    assert process.metrics() == {
        "router_requests": 1,
        "handle_requests": 1,
        "handle_request_duration_seconds": 1,
        "handle_errors cancelled": 1,
    }
    assert process.idle_replicas() == {"r1": 0, "r2": 0}


async def test_a_refused_call_goes_to_the_front_of_the_queue(process: Process) -> None:
    handle = process.handle("r1", concurrency=1)
    first = handle.remote("first")
    second = handle.remote("second")
    await quiet()
    process.asked[0].end(None, ActorLostError("gone", begun=False))
    await quiet()
    assert process.routers.replica_set("b").waiting == 2
    process.publish("r1", "r2", concurrency=1)
    await quiet()
    assert process.requested == ["r2"]
    assert process.envelopes[0].payload == dump((("first",), {}))
    process.outcome.set_result(Load())
    assert [await first, await second] == ["by task"] * 2
    assert process.idle_replicas() == {"r1": 0, "r2": 0}


async def test_a_waiting_call_gets_the_replica_that_an_answer_frees(process: Process) -> None:
    handle = process.handle("r1", concurrency=1)
    handle.remote()
    second = handle.remote()
    third = handle.remote()
    await quiet()
    process.asked[0].answer(1)
    await quiet()
    assert process.requested == ["r1"]
    process.outcome.set_result(Load())
    assert [await second, await third] == ["by task"] * 2
    assert process.idle_replicas() == {"r1": 0}


async def test_a_direct_call_does_not_overtake_queued_requests(process: Process) -> None:
    handle = process.handle("r1")
    first = handle.remote()
    process.asked[0].end(None, ActorLostError("gone", begun=False))
    await quiet()
    # The replica may be used again, but the waiting calls have not been notified yet.
    process.clock.ahead_s = 2 * UNREACHABLE_BACKOFF_S
    second = handle.remote()
    assert len(process.asked) == 1
    process.outcome.set_result(Load())
    assert [await first, await second] == ["by task"] * 2


@pytest.mark.parametrize("is_lost_again", [False, True])
async def test_an_idempotent_call_that_had_begun_is_retried_once(
    process: Process, is_lost_again: bool
) -> None:
    response = process.handle("r1", "r2", "r3").options(idempotent=True).remote()
    await quiet()
    for number in (1, 2):
        assert len(process.requested) == len(set(process.requested)) == number
        outcome, process.outcome = process.outcome, asyncio.get_running_loop().create_future()
        if number == 1 or is_lost_again:
            outcome.set_exception(ActorLostError("gone", begun=True))
        else:
            outcome.set_result(Load())
        await quiet()
    if is_lost_again:
        with pytest.raises(ActorLostError, match="gone"):
            response.result()
    else:
        assert await response == "by task"
    assert len(process.requested) == 2
    assert process.idle_replicas() == {"r1": 0, "r2": 0, "r3": 0}


async def test_an_idempotent_call_is_not_retried_for_ever_on_replicas_that_stop(process: Process) -> None:
    response = process.handle(*(f"r{number}" for number in range(9))).options(idempotent=True).remote()
    await quiet()
    while not response.done():
        outcome, process.outcome = process.outcome, asyncio.get_running_loop().create_future()
        outcome.set_exception(ActorLostError("gone", begun=True, is_planned=True))
        await quiet()
    with pytest.raises(ActorLostError, match="gone"):
        response.result()
    assert len(process.requested) == 1 + MAX_REPEATS


async def test_a_call_that_had_begun_is_not_retried(process: Process) -> None:
    response = process.handle("r1", "r2").remote()
    process.asked[0].end(None, ActorLostError("gone", begun=True))
    await quiet()
    with pytest.raises(ActorLostError, match="gone"):
        response.result()
    assert process.requested == []
    assert process.metrics() == {**ONE, "handle_errors replica_lost": 1}
    assert process.idle_replicas() == {"r1": 0, "r2": 0}
    # The replica gets no requests for a while.
    tag = process.asked.pop().tag
    process.handle("r1", "r2").remote()
    assert process.asked[0].tag != tag


async def test_a_cancelled_call_is_cancelled_once_at_its_replica(process: Process) -> None:
    response = process.handle("r1").remote()
    assert response.cancel()
    assert response.cancel()
    await quiet()
    (asked,) = process.asked
    assert asked.given_up == 1
    with pytest.raises(CancelledError):
        response.result()
    assert process.metrics() == {**ONE, "handle_errors cancelled": 1}
    assert process.idle_replicas() == {"r1": 0}
    asked.answer(1)  # too late
    assert process.routers.replica_set("b").in_flight == 0


async def test_an_answered_call_cannot_be_cancelled(process: Process) -> None:
    response = process.handle("r1").remote()
    process.asked[0].answer(1)
    assert not response.cancel()
    await quiet()
    assert response.result() == 1
    assert process.asked[0].given_up == 0
    assert process.metrics() == ONE


@pytest.mark.parametrize(
    "outcome",
    [
        Load(),
        KeyError("k"),
        ReplicaBusyError("full", ongoing=2),
        ActorLostError("gone", begun=False),
        ActorLostError("gone", begun=True),
    ],
)
async def test_an_outcome_that_crosses_a_cancellation_counts_once(process: Process, outcome: Any) -> None:
    response = process.handle("r1", "r2").remote()
    assert response.cancel()
    # For example, another thread cancelled the call, and this loop has not been notified yet.
    process.asked[0].end({"payload": dump(1)}, outcome)
    await quiet()
    with pytest.raises(CancelledError):
        response.result()
    assert process.asked[0].given_up == 0
    assert process.requested == []
    metrics = process.metrics()
    assert {key: metrics[key] for key in ONE} == ONE
    if isinstance(outcome, ReplicaBusyError):
        assert metrics["handle_errors cancelled"] == 1
    assert process.idle_replicas() == {"r1": 0, "r2": 0}
    assert process.routers.replica_set("b").in_flight == 0


async def test_a_retried_call_is_cancelled_at_its_current_replica(process: Process) -> None:
    response = process.handle("r1", "r2").remote()
    process.asked[0].end(None, ReplicaBusyError("full", ongoing=2))
    await quiet()
    assert response.cancel()
    await quiet()
    assert process.asked[0].given_up == 0
    assert process.metrics() == {**ONE, "router_retries busy": 1, "handle_errors cancelled": 1}
    assert process.idle_replicas() == {"r1": 0, "r2": 0}


async def test_a_cancellation_by_the_replica_ends_the_call(process: Process) -> None:
    response = process.handle("r1").remote()
    process.asked[0].end(None, asyncio.CancelledError())
    with pytest.raises(CancelledError):
        response.result(0)
    assert process.idle_replicas() == {"r1": 0}


async def test_a_call_in_flight_succeeds_after_its_backend_is_deleted(process: Process) -> None:
    handle = process.handle("r1")
    responses = [handle.remote(1), handle.remote(2)]
    process.listener.tell("endpoint/e", None)
    process.listener.tell("backend/b", None)
    process.asked[0].answer("well")
    assert responses[0].result() == "well"
    process.asked[1].end(None, ReplicaBusyError("full", ongoing=2))
    await quiet()
    with pytest.raises(UnavailableError, match="was deleted"):
        responses[1].result(0)
    assert process.routers.replica_set("b").in_flight == 0


async def test_a_request_that_cannot_be_sent_fails_at_once_and_frees_its_slot(process: Process) -> None:
    handle = process.handle("r1")

    def refuse(asked: Asked) -> None:
        asked.end(None, TypeError("a set cannot be sent"))

    process.on_ask = refuse
    response = handle.remote()
    with pytest.raises(TypeError, match="a set"):
        response.result(0)
    assert process.metrics() == {**ONE, "handle_errors user_code": 1}
    assert process.idle_replicas() == {"r1": 0}

    # Another thread cancels the call at the same moment.
    calls: list[Any] = []

    def refuse_and_cancel(asked: Asked) -> None:
        calls.append(asked.envelope.call)
        assert calls[0].cancel()
        refuse(asked)

    process.on_ask = refuse_and_cancel
    handle.remote()
    await quiet()
    assert calls[0].done()
    assert process.idle_replicas() == {"r1": 0}
    assert process.routers.replica_set("b").in_flight == 0

    def fail(asked: Asked) -> None:
        raise RuntimeError("broken")

    process.on_ask = fail
    with pytest.raises(RuntimeError, match="broken"):
        handle.remote().result(0)
    assert process.idle_replicas() == {"r1": 0}


async def test_invalid_options_are_an_error_of_the_call(process: Process) -> None:
    response = process.handle("r1").options(http_headers=None).remote()
    with pytest.raises(TypeError):
        response.result(0)


async def test_a_call_falls_back_to_a_task_if_it_cannot_be_sent_directly(process: Process) -> None:
    process.outcome.set_result(Load())
    handle = process.handle("r1")
    # 1. No connection yet.
    process.apart = {"r1"}
    assert await handle.remote() == "by task"
    process.apart.clear()
    # 2. A deadline.
    assert await handle.options(timeout_s=5).remote() == "by task"
    # 3. A replica in this process that accepts no direct calls.
    process.here = "worker-of-r2"
    process.publish("r1", "r2")
    assert await handle.remote() == "by task"
    process.publish("r1")
    # 4. Copies go elsewhere.
    process.listener.tell("endpoint/e", {"traffic": {"b": 1.0}, "shadows": {"c": 1.0}, "legacy": True})
    assert await handle.remote() == "by task"
    # 5. More than one backend.
    process.listener.tell("endpoint/e", {"traffic": {"b": 1.0, "c": 1e-9}, "shadows": {}, "legacy": True})
    assert await handle.remote() == "by task"
    assert process.asked == []
    assert process.metrics()["router_requests"] == process.metrics()["handle_requests"] == 5
    assert process.idle_replicas() == {"r1": 0}
    process.routers.close()


async def test_a_router_is_asked_once_for_a_call_that_needs_a_task(process: Process) -> None:
    tags = ["r0", "r1", "r2", "r3"]
    handle = process.handle(*tags, router={"router": "RoundRobin"})
    process.apart = {*tags}
    responses = [handle.remote() for _ in range(4)]
    await quiet()
    assert sorted(process.requested) == tags
    process.outcome.set_result(Load())
    assert [await each for each in responses] == ["by task"] * 4
    handle.remote()
    assert sum(process.idle_replicas().values()) == 1
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()  # before its first step
    await quiet()
    assert set(process.idle_replicas().values()) == {0}
    assert process.metrics()["router_requests"] == 4
    process.routers.close()


async def test_a_replica_that_joins_gets_the_next_call_before_a_channel_is_open(process: Process) -> None:
    process.outcome.set_result(Load())
    tags = [f"r{number}" for number in range(10)]
    handle = process.handle(*tags)
    process.apart = {"new"}
    process.publish(*tags, "new")
    responses = [handle.remote()]
    await quiet()
    assert process.requested == ["new"]
    for _ in range(5):
        responses.append(handle.remote())
        await quiet()
    assert len(process.asked) >= 4  # the other requests are distributed at random
    for asked in process.asked:
        asked.answer(1)
    assert set(process.idle_replicas().values()) == {0}
