"""Requests that wait for certain replicas: by a router or for a model, while others have room."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from test_router import POST, Stage, quiet

from daskserve.common.types import Envelope, EnvelopeKind, Load, Receive, Send
from daskserve.data.caller.request_routers import routing
from daskserve.data.caller.request_routers.hedging import sent_to
from daskserve.data.caller.request_routers.priorities import Order, RankedQueue
from daskserve.data.caller.routing.multiplexing.waiting import CONSIDERED, MAX_ASKED, ROUND_S
from daskserve.data.caller.routing.replica_set import ReplicaSet
from daskserve.errors import ActorLostError
from daskserve.request_router import PendingRequest, RequestRouter, RunningReplica

pytestmark = pytest.mark.virtual_time

HASHED = {"router": "ConsistentHash", "kwargs": {"fallback_replicas": 0}}
SCRIPTED = {"router": "Scripted"}


def call(session: str = "", model_id: str = "", priority: int = 0) -> Envelope:
    facts = {"session_id": session, "priority": priority}
    envelope = Envelope(EnvelopeKind.CALL, {"method": "x", "request_id": "id", "facts": facts})
    envelope.model_id = model_id
    return envelope


class Scripted(RequestRouter):
    """A router with scripted choices that records its calls."""

    answer: Callable[[list[RunningReplica], PendingRequest], Any]
    received: list[str]

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Any:
        assert pending_request is not None
        return type(self).answer(candidate_replicas, pending_request)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        self.received.append("routed")

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        self.received.append("completed")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[str]]:
    monkeypatch.setattr(routing, "BUILT_IN", {**routing.BUILT_IN, "Scripted": Scripted})

    def answers(function: Any) -> list[str]:
        received: list[str] = []
        monkeypatch.setattr(Scripted, "answer", staticmethod(function), raising=False)
        monkeypatch.setattr(Scripted, "received", received, raising=False)
        return received

    return answers


def backend_of(stage: Stage, took_s: Callable[[str, Envelope], float], count: int, **more: Any) -> ReplicaSet:
    """Return replicas that answer after some time, and that record the order of their requests."""

    async def answer(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        await asyncio.sleep(took_s(tag, envelope))
        return Load()

    stage.replicas.handler = answer
    return stage.backend(*(f"r{n}" for n in range(count)), max_queued=10_000, **more)


async def test_more_requests_of_a_session_than_are_considered_hide_no_others() -> None:
    stage = Stage()
    backend = backend_of(
        stage,
        lambda tag, envelope: 100 if envelope.head["facts"]["session_id"] == "hot" else 0.01,
        4,
        concurrency=2,
        router=HASHED,
    )
    hot = [stage.send(backend, call("hot")) for _ in range(2 + CONSIDERED)]
    await quiet()
    others = [stage.send(backend, call(f"s{number}")) for number in range(40)]
    await asyncio.sleep(5)
    assert len([each.result() for each in others if each.done()]) > 20
    for each in (*hot, *others):
        each.cancel()


async def test_a_session_whose_replica_is_full_holds_up_no_others() -> None:
    stage = Stage()

    def took_s(tag: str, envelope: Envelope) -> float:
        return 100 if envelope.head["facts"]["session_id"] == "hot" else 0.01

    backend = backend_of(stage, took_s, 4, concurrency=2, router=HASHED)
    hot = [stage.send(backend, call("hot")) for _ in range(2 + 10 * MAX_ASKED)]
    await quiet()
    others = [stage.send(backend, call(f"s{number}")) for number in range(40)]
    await asyncio.sleep(1)
    at_hot = stage.replicas.asked[0]
    done = len([each.result() for each in others if each.done()])
    assert done > 20  # all requests except those for the replica of the hot session
    assert +stage.replicas.running == Counter({at_hot: 2})
    for each in (*hot, *others):
        each.cancel()


async def test_requests_that_a_router_binds_hold_up_others_for_a_moment_only(answers: Any) -> None:
    answers(lambda replicas, request: [replicas[:1] if request.metadata.session_id else replicas[1:]])
    stage = Stage()
    backend = backend_of(stage, lambda tag, _: 2 if tag == "r0" else 0.001, 2, concurrency=1, router=SCRIPTED)
    bound = [stage.send(backend, call("bound")) for _ in range(1 + 2 * MAX_ASKED + 5)]
    await quiet()
    others = [stage.send(backend, call()) for _ in range(20)]
    await asyncio.sleep(4 * ROUND_S)
    assert any(each.done() for each in others)
    await asyncio.sleep(20 * ROUND_S)
    assert all(each.done() for each in others)
    await asyncio.sleep(2)  # it is the turn of the next request in order
    assert bound[0].done()
    assert +stage.replicas.running == Counter({"r0": 1})
    for each in bound:
        each.cancel()


async def test_a_router_is_not_asked_all_the_time_while_no_replica_has_room(answers: Any) -> None:
    asked = []

    def answer(replicas: list[RunningReplica], request: PendingRequest) -> Any:
        asked.append(request)
        return [] if len(asked) == 1 else [replicas]

    answers(answer)
    stage = Stage()
    backend = backend_of(stage, lambda *_: 9, 1, concurrency=1, router=SCRIPTED)
    passes = 0
    serve = backend._waiting.serve

    def counted(release: Any) -> bool:
        nonlocal passes
        passes += 1
        assert passes < 20, "it spins"
        return serve(release)

    backend._waiting.serve = counted  # type: ignore[method-assign]
    tasks = [stage.send(backend, call()) for _ in range(2)]
    await asyncio.gather(*tasks)
    assert stage.replicas.asked == ["r0", "r0"]


async def test_a_router_is_notified_of_the_end_of_requests_that_no_replica_got(answers: Any) -> None:
    received = answers(lambda replicas, request: [replicas])
    stage = Stage()
    backend = backend_of(stage, lambda *_: 1, 1, concurrency=1, router=SCRIPTED)
    request = call()
    taken = backend.take_now(request)
    assert taken is not None
    backend.release(taken, None, request)
    assert received == ["routed", "completed"]
    taken = backend.take_now(request)
    assert taken is not None
    leaving = stage.send(backend, call())
    await quiet()
    backend.release(taken, None, request)  # grants the replica to the other, which leaves at the same time
    leaving.cancel()
    await quiet()
    assert received.count("routed") == received.count("completed") == 3
    # A request that has left before its turn.
    taken = backend.take_now(request)
    assert taken is not None
    leaving = stage.send(backend, call())
    await quiet()
    next(iter(backend._waiting)).cancel()
    backend.release(taken, None, request)
    await quiet()
    assert leaving.cancelled()
    assert received.count("routed") == received.count("completed") == 5
    assert backend.in_flight == 0


async def test_a_router_that_wants_it_sees_the_beginning_of_a_body(
    answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[bytes] = []
    monkeypatch.setattr(Scripted, "wants_body", True)

    def answer(replicas: list[RunningReplica], request: PendingRequest) -> Any:
        bodies.append(request.body)
        return [replicas]

    answers(answer)
    stage = Stage()
    await stage.send(backend_of(stage, lambda *_: 0, 1, router=SCRIPTED), POST)
    assert bodies == [b"body"]


async def test_a_router_that_fails_spreads_no_model_over_all_replicas(answers: Any) -> None:
    answers(lambda replicas, request: 1 / 0)
    stage = Stage()
    backend = backend_of(stage, lambda *_: 0.1, 4, concurrency=1, router=SCRIPTED)
    for _ in range(20):
        await stage.send(backend, call(model_id="m"))
    assert len(set(stage.replicas.asked)) == 1
    # Requests that wait for its replica do so only for a limited time.
    asked = [stage.send(backend, call(model_id="m")) for _ in range(2)]
    await asyncio.gather(*asked)
    assert backend._waiting.routing is not None
    assert backend._waiting.routing.errors.fallbacks["error"] >= 22


@pytest.mark.parametrize(
    ("router", "model_id"), [({"router": "LeastLatency"}, ""), (None, "m")], ids=["router", "model"]
)
async def test_priorities_have_their_shares_with_a_router_or_models(router: Any, model_id: str) -> None:
    stage = Stage()
    order = {"weights": {1: 4.0, 0: 1.0}}
    seen: list[int] = []

    def took_s(tag: str, envelope: Envelope) -> float:
        seen.append(envelope.head["facts"]["priority"])
        return 0.01

    backend = backend_of(stage, took_s, 1, concurrency=1, order=order, router=router)
    await asyncio.gather(
        *(stage.send(backend, call(model_id=model_id, priority=number % 2)) for number in range(60))
    )
    assert [seen[1:21].count(each) for each in (1, 0)] == [16, 4]
    assert backend._waiting._ranked is None


def test_a_refused_request_scans_no_waiting_ones_unless_one_is_lower() -> None:
    looked = []

    def is_there(item: int) -> bool:
        looked.append(item)
        return item != 999

    queue: RankedQueue[int] = RankedQueue(Order(), is_there)
    for number in range(1000):
        queue.put(number, -1 if number else -2, None)
    assert queue.lowest_below(-2) is None
    assert not looked
    assert queue.lowest_below(-1) == 0
    assert queue.lowest_below(0) == 0
    assert len(looked) == 2
    queue = RankedQueue(Order(), is_there)
    for number in range(1000):
        queue.put(number, -1, None)
    assert queue.lowest_below(0) == 998  # the last remaining request
    assert list(queue.first()) == [*range(999)]


@pytest.mark.parametrize("kind", ["call", "http"])
async def test_a_replica_that_only_fails_is_not_the_one_that_answers_first(kind: str) -> None:
    stage = Stage()
    backend = backend_of(stage, lambda *_: 0.02, 4, concurrency=100, router={"router": "LeastLatency"})

    async def answer(tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        if tag == "r0" and kind == "call":
            raise ValueError("broken")
        await asyncio.sleep(0.001 if tag == "r0" else 0.02)
        await send({"type": "http.response.start", "status": 500 if tag == "r0" else 200})
        return Load()

    stage.replicas.handler = answer
    for _ in range(40):
        requests = [call() if kind == "call" else get(b"/") for _ in range(10)]
        sent = [stage.send(backend, each) for each in requests]
        await asyncio.gather(*sent, return_exceptions=True)
    assert 5 < stage.replicas.asked.count("r0") < 80  # less than its share of 400
    backend_of(stage, lambda *_: 0.02, 4, concurrency=100, router={"router": "LeastLatency"})
    stage.replicas.asked.clear()
    for _ in range(40):
        await asyncio.gather(*(stage.send(backend, call()) for _ in range(10)))
    assert stage.replicas.asked.count("r0") > 60  # the replica has its full share again


# ---- second attempts


HEDGED = {"quantile": 0.95, "budget": 0.5, "min_delay_s": 0.0}


def idempotent(session: str = "", model_id: str = "") -> Envelope:
    found = call(session, model_id)
    found.head["facts"]["idempotent"] = True
    return found


def get(path: bytes) -> Envelope:
    head = {"type": "http", "method": "GET", "raw_path": path, "headers": []}
    return Envelope(EnvelopeKind.HTTP, head, has_body=False)


async def hedging(took_s: Callable[[str, Envelope], float], **more: Any) -> tuple[Stage, ReplicaSet]:
    """Return replicas with measured latencies."""
    stage = Stage()
    backend = backend_of(stage, took_s, 4, concurrency=10, hedging=HEDGED, **more)
    for number in range(40):
        await stage.send(backend, idempotent(f"s{number}"))
    stage.replicas.asked.clear()
    return stage, backend


async def test_a_model_is_not_loaded_by_a_second_replica_because_the_first_takes_long() -> None:
    stage, backend = await hedging(lambda _, envelope: 5 if envelope.model_id else 0.01)
    await stage.send(backend, idempotent(model_id="cold"))
    assert len(stage.replicas.asked) == 1
    models = backend._waiting.models
    assert models is not None
    models.update({tag: {"loaded": ["cold"], "coming": [], "capacity": 3} for tag in ("r0", "r1")})
    await stage.send(backend, idempotent(model_id="cold"))
    assert len(set(stage.replicas.asked[1:])) == 2
    assert set(stage.replicas.asked[1:]) <= {"r0", "r1"}
    await quiet()
    assert backend.in_flight == 0


async def test_a_second_attempt_goes_only_where_the_router_would_send_it() -> None:
    stage, backend = await hedging(lambda *_: 0.01, router=HASHED)
    stage.replicas.handler = None
    bound = stage.send(backend, idempotent("same"))
    await asyncio.sleep(1)
    assert len(stage.replicas.asked) == 1
    free = stage.send(backend, idempotent())
    await asyncio.sleep(1)
    assert len(stage.replicas.asked) == 3
    assert stage.replicas.asked[1] != stage.replicas.asked[2]
    for each in (bound, free):
        each.cancel()
    await quiet()
    assert backend.in_flight == 0


async def test_a_request_whose_replica_is_gone_is_nowhere_until_another_replica_has_it() -> None:
    stage, backend = await hedging(lambda *_: 0.01)
    stage.publish("r0", "r1", concurrency=1, hedging=HEDGED)
    stage.replicas.handler = None
    envelope = idempotent()
    tasks = []
    for each in (envelope, POST):
        tasks.append(stage.send(backend, each))
        await quiet()
    refusing, other = stage.replicas.asked
    assert sent_to(envelope) == refusing
    stage.replicas.finish(refusing, ActorLostError("gone", begun=False))
    await quiet()
    assert sent_to(envelope) == ""
    stage.publish(other, concurrency=1, hedging=HEDGED)
    stage.replicas.finish(other)
    await quiet()
    assert sent_to(envelope) == other
    for each in tasks:
        each.cancel()


async def test_a_session_is_found_where_the_options_of_now_say_it_is() -> None:
    stage = Stage()
    backend = backend_of(stage, lambda *_: 1, 1, concurrency=1, router={**HASHED, "session": "header:x-a"})
    headers = [(b"x-a", b"one"), (b"x-b", b"two")]
    envelopes = [
        Envelope(EnvelopeKind.HTTP, {"type": "http", "method": "GET", "headers": headers}) for _ in range(2)
    ]
    tasks = [stage.send(backend, each) for each in envelopes]
    await quiet()
    assert [each.routed.metadata.session_id for each in envelopes] == ["one", "one"]
    changed = {"router": {**HASHED, "session": "header:x-b"}}
    stage.publish("r0", max_queued=10_000, **changed)
    await asyncio.gather(*tasks)
    assert envelopes[1].routed.metadata.session_id == "two"


async def test_a_request_that_ends_processes_gets_no_second_one_by_a_second_attempt() -> None:
    stage, backend = await hedging(lambda *_: 0.01)
    lost = ActorLostError("gone", begun=True)
    # The second attempt is lost. From then on, the request is a suspect, which gets no second attempts.
    first = stage.send(backend, get(b"/kills"))
    stage.replicas.handler = None
    await asyncio.sleep(1)
    assert len(stage.replicas.asked) == 2
    stage.replicas.finish(stage.replicas.asked[1], lost)
    await quiet()
    assert backend._apart.suspects.known
    first.cancel()
    await quiet()
    stage.replicas.asked.clear()
    again = stage.send(backend, get(b"/kills"))
    await asyncio.sleep(0.5)
    assert len(stage.replicas.asked) == 1
    again.cancel()
    # Without retries after crashes, there are no second attempts.
    stage.publish("r0", "r1", "r2", concurrency=10, hedging=HEDGED, max_crash_retries=0)
    await asyncio.sleep(2)
    stage.replicas.asked.clear()
    other = stage.send(backend, get(b"/other"))
    await asyncio.sleep(0.5)
    assert len(stage.replicas.asked) == 1
    stage.replicas.finish(stage.replicas.asked[0], lost)
    with pytest.raises(ActorLostError):
        await other
