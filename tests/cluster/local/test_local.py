"""The in-process cluster fulfils the `Cluster` protocol, also when its workers die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from daskserve.cluster.actors.calls import host_of
from daskserve.cluster.local.cluster import LocalCluster, deliver_at_once
from daskserve.cluster.local.process import LocalProcess
from daskserve.cluster.protocols.base import ActorContext, ActorSpec, Cluster, StoreChange, verb, verbs_of
from daskserve.cluster.protocols.usage import UsageReport
from daskserve.cluster.store.opening import MemoryStore
from daskserve.common.types import (
    ActorAddress,
    ActorKind,
    ActorRequest,
    Envelope,
    EnvelopeKind,
    Load,
    Message,
    OnAnswer,
    Receive,
    Send,
    WorkerInfo,
)
from daskserve.errors import (
    ActorLostError,
    AlreadyRunningError,
    BadRequestError,
    InstanceError,
    NotRunningError,
    ReplicaStartError,
    StaleEpochError,
    UnavailableError,
)
from daskserve.telemetry.table import MetricSample
from daskserve.testing import wait_until

pytestmark = pytest.mark.virtual_time


W1, W2 = "local://worker-1", "local://worker-2"


class EchoRequest:
    """A request to an `Echo`; its head selects the outcome."""

    def __init__(self, actor: Echo, envelope: Envelope) -> None:
        self.actor = actor
        self.head = envelope.head

    async def respond(self, receive: Receive, send: Send) -> Load:
        if self.head.get("hangs"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.actor.cancelled += 1
                raise
        message = await receive()
        await send({"type": "answer", "body": message["body"]})
        return Load(3, 4)

    def start(self, on_answer: OnAnswer) -> Callable[[], None] | None:
        """Answer without a task; later, if the head requests that."""
        if self.head.get("hangs"):
            return None
        if self.head.get("fails"):
            raise BadRequestError("refused")
        answer = (on_answer, {"type": "answer", "body": b"nowait"}, Load(5, 6))
        timer = asyncio.get_running_loop().call_later(self.head.get("after_s", 0), *answer)
        return timer.cancel


class Echo:
    """An actor whose payload selects how it starts: it fails, hangs, is slow, succeeds, or is unhealthy."""

    def __init__(self, context: ActorContext) -> None:
        self.context = context
        self.verbs = verbs_of(self)
        self.payload = context.spec.payload
        self.stopped: list[float] = []
        self.ended: list[float] = []
        self.cancelled = 0
        if self.payload == b"sick":
            self.health = lambda: {"is_healthy": False, "detail": "ill"}

    async def start(self) -> Mapping[str, Any]:
        if self.payload == b"fails":
            raise ReplicaStartError("no", user_traceback="text")
        if self.payload == b"hangs":
            await asyncio.Event().wait()
        if self.payload == b"slow":
            await self.context.clock.sleep(1)
        return {"made": [self.context.spec.incarnation]}

    def handle(self, envelope: Envelope) -> ActorRequest:
        return EchoRequest(self, envelope)

    async def stop(self, grace_s: float) -> None:
        self.stopped.append(grace_s)
        await self.context.clock.sleep(grace_s)
        self.ended.append(grace_s)

    def samples(self) -> list[MetricSample]:
        return []

    @verb
    async def echo(self, **message: Any) -> Any:
        return message

    @verb
    async def fail(self) -> None:
        raise ReplicaStartError("inside", user_traceback="text")

    @verb
    async def hang(self) -> None:
        await asyncio.Event().wait()

    @verb
    async def where(self) -> str:
        return self.context.worker

    @verb
    async def odd(self) -> Any:
        return object()


class Pilot(Echo):
    """A controller that can be told to write and publish."""

    @verb
    async def write(self, key: str) -> None:
        await self.context.cluster.store.commit(self.context.spec.incarnation, StoreChange({key: b"x"}))

    @verb
    async def say(self, text: str) -> None:
        self.context.cluster.publish({"kind": "said", "text": text})


FACTORIES: Mapping[ActorKind, Any] = {
    ActorKind.CONTROLLER: Pilot,
    ActorKind.PROXY: Echo,
    ActorKind.REPLICA: Echo,
}


@pytest.fixture
@asynccontextmanager
async def cluster() -> AsyncIterator[LocalCluster]:
    """Yield a local cluster of two workers."""
    async with LocalCluster(FACTORIES) as cluster:
        yield cluster


def spec(name: str = "local/replica/b#1", incarnation: int = 1, payload: bytes = b"") -> ActorSpec:
    return ActorSpec(ActorKind.REPLICA, name, incarnation, "local", payload)


def address_of(made: ActorSpec, worker: str = W1) -> ActorAddress:
    return ActorAddress(made.name, worker, made.incarnation)


async def make(cluster: LocalCluster, worker: str = W1, **fields: Any) -> ActorAddress:
    wanted = spec(**fields)
    await cluster.program.create(wanted, worker)
    return address_of(wanted, worker)


def actor(cluster: LocalCluster, address: ActorAddress) -> Echo:
    found = cluster.actor(address)
    assert isinstance(found, Echo)
    return found


async def nothing() -> Message:
    return {"type": "http.disconnect"}


async def ask(cluster: Cluster, address: ActorAddress, **head: Any) -> tuple[Load, list[Message]]:
    """Send one request stream."""
    answers: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"hello"}

    async def send(message: Message) -> None:
        answers.append(message)

    load = await cluster.request(address, Envelope(EnvelopeKind.HTTP, head)).respond(receive, send)
    return load, answers


# ---- making and ending actors


async def test_an_actor_is_created_once_and_returns_its_facts_to_every_caller(cluster: LocalCluster) -> None:
    slow = spec(payload=b"slow")
    facts = await asyncio.gather(
        cluster.program.create(slow, W1),
        cluster.program.create(slow, W1),
        cluster.process(W2).create(slow, W1),
        cluster.process(W1).create(slow, W1),
    )
    facts.append(await cluster.program.create(slow, W1))
    assert all(each == facts[0] for each in facts)
    assert facts[0]["made"] == (1,)
    assert facts[0]["pid"] > 0
    assert cluster.actors() == [address_of(slow)]


async def test_a_newer_incarnation_replaces_the_actor_and_an_older_one_is_rejected(
    cluster: LocalCluster,
) -> None:
    first = actor(cluster, await make(cluster, incarnation=1))
    second = await make(cluster, incarnation=2)
    assert first.stopped == [0]
    assert cluster.actors() == [second]
    with pytest.raises(ActorLostError, match="is at incarnation 2; 1 is older"):
        await make(cluster, incarnation=1)
    with pytest.raises(ActorLostError) as info:
        await cluster.program.call(address_of(spec(incarnation=1)), "echo")
    assert not info.value.begun


async def test_two_callers_of_a_newer_incarnation_get_the_same_one(cluster: LocalCluster) -> None:
    await make(cluster, incarnation=1)
    newer = spec(incarnation=2, payload=b"slow")
    one, two = await asyncio.gather(cluster.program.create(newer, W1), cluster.process(W2).create(newer, W1))
    assert one == two
    assert len(cluster.actors()) == 1


async def test_an_actor_that_fails_to_start_is_removed_and_its_error_is_raised(cluster: LocalCluster) -> None:
    for creator in (cluster.program, cluster.process(W1)):
        with pytest.raises(ReplicaStartError, match=r"^no$") as info:
            await creator.create(spec(payload=b"fails"), W1)
        assert info.value.user_traceback == "text"
        assert cluster.actors() == []


async def test_a_starting_actor_rejects_calls(cluster: LocalCluster) -> None:
    creating = asyncio.create_task(make(cluster, payload=b"slow"))
    await wait_until(cluster.actors)
    (address,) = cluster.actors()
    with pytest.raises(UnavailableError, match="still starting"):
        await cluster.program.call(address, "echo")
    await creating
    assert await cluster.program.call(address, "echo") == {}


async def test_a_cancelled_create_does_not_cancel_the_start(cluster: LocalCluster) -> None:
    slow = spec(payload=b"slow")
    with pytest.raises(TimeoutError):
        await cluster.clock.wait_for(cluster.program.create(slow, W1), 0.5)
    await cluster.clock.sleep(1)
    assert await cluster.program.call(address_of(slow), "where") == W1


async def test_destroy_stops_and_removes_an_actor_and_is_idempotent(cluster: LocalCluster) -> None:
    address = await make(cluster)
    made = actor(cluster, address)
    await cluster.program.destroy(ActorAddress(address.name, W1, 0), 5)  # an older one: not this
    assert made.stopped == []
    await cluster.program.destroy(address, 5)
    await cluster.program.destroy(address, 5)
    await cluster.program.destroy(ActorAddress("x", "local://never", 1), 5)
    assert made.stopped == [5]
    assert cluster.actors() == []


async def test_a_cancelled_destroy_still_completes(cluster: LocalCluster) -> None:
    """A killed controller cancels its call; its successor finds the actor until the stop is complete."""
    address = await make(cluster)
    made = actor(cluster, address)
    with pytest.raises(TimeoutError):
        await cluster.clock.wait_for(cluster.program.destroy(address, 5), 1)
    assert (made.stopped, made.ended, cluster.actors()) == ([5], [], [address])
    await cluster.clock.sleep(5)
    assert (made.ended, cluster.actors()) == ([5], [])


async def test_a_second_destroy_may_shorten_the_grace_period(cluster: LocalCluster) -> None:
    address = await make(cluster)
    made = actor(cluster, address)
    patient = asyncio.create_task(cluster.program.destroy(address, 5))
    await wait_until(lambda: made.stopped == [5])
    await cluster.program.destroy(address, 1)
    assert (made.ended, cluster.actors()) == ([1], [])
    await patient


async def test_destroying_a_starting_actor_fails_its_create_call(cluster: LocalCluster) -> None:
    for creator in (cluster.program, cluster.process(W1)):
        creating = asyncio.create_task(creator.create(spec(payload=b"hangs"), W1))
        await wait_until(cluster.actors)
        await cluster.program.destroy(address_of(spec()), 0)
        with pytest.raises(ActorLostError):
            await creating
        assert cluster.actors() == []


# ---- calls and requests


async def test_calls_carry_plain_values_like_a_channel(cluster: LocalCluster) -> None:
    address = await make(cluster)
    for caller in (cluster.program, cluster.process(W1), cluster.process(W2)):
        sent: dict[str, Any] = {"list": [1, [2]], "bytes": b"x", "none": None, "map": {"a": 1.5, 2: "b"}}
        found = await caller.call(address, "echo", **sent)
        assert found == {"list": (1, (2,)), "bytes": b"x", "none": None, "map": {"a": 1.5, 2: "b"}}
        assert found["map"] is not sent["map"]
        with pytest.raises(TypeError):
            await caller.call(address, "echo", value=object())
        with pytest.raises(TypeError):
            await caller.call(address, "odd")


async def test_only_verbs_can_be_called(cluster: LocalCluster) -> None:
    address = await make(cluster)
    with pytest.raises(BadRequestError, match="has no verb 'stop'; known: echo, fail, hang, odd, where"):
        await cluster.program.call(address, "stop")
    with pytest.raises(BadRequestError, match="host has no verb 'end'; known: actors, create, destroy"):
        await cluster.program.call(host_of(W1), "end")


async def test_errors_of_verbs_arrive_with_their_fields(cluster: LocalCluster) -> None:
    address = await make(cluster)
    for caller in (cluster.program, cluster.process(W1)):
        with pytest.raises(ReplicaStartError, match="inside") as info:
            await caller.call(address, "fail")
        assert info.value.user_traceback == "text"


async def test_a_request_stream_reaches_the_actor_and_its_load_comes_back(cluster: LocalCluster) -> None:
    address = await make(cluster)
    for caller in (cluster.program, cluster.process(W1), cluster.process(W2)):
        load, answers = await ask(caller, address)
        assert load == Load(3, 4)
        assert answers == [{"type": "answer", "body": b"hello"}]


async def test_a_control_envelope_is_a_call(cluster: LocalCluster) -> None:
    address = await make(cluster)
    answers: list[Message] = []

    async def keep(message: Message) -> None:
        answers.append(message)

    envelope = Envelope(EnvelopeKind.CONTROL, {"verb": "where", "message": {}})
    assert await cluster.program.request(address, envelope).respond(nothing, keep) == Load()
    assert answers == [{"type": "control.result", "value": W1}]


async def test_cancelling_the_caller_cancels_its_request(cluster: LocalCluster) -> None:
    address = await make(cluster)
    for caller in (cluster.program, cluster.process(W1)):
        before = actor(cluster, address).cancelled
        asking = asyncio.create_task(ask(caller, address, hangs=True))
        await asyncio.sleep(0.1)
        asking.cancel()
        await wait_until(lambda before=before: actor(cluster, address).cancelled == before + 1)


async def nowait(cluster: LocalCluster, process: LocalProcess, address: ActorAddress, **head: Any) -> Any:
    """Return the answer to a request without a task, or "given up" after a minute; None if it needs one."""
    answers: list[Any] = []
    envelope = Envelope(EnvelopeKind.CALL, head, has_body=False)
    request = process.request(address, envelope)
    give_up = request.start(lambda message, outcome: answers.append((message, outcome)))
    if give_up is None:
        return None
    await cluster.clock.sleep(head.get("patience_s", 60))
    give_up()
    await cluster.clock.sleep(60)
    return answers[0] if answers else "given up"


async def test_local_and_remote_actors_answer_without_a_task(cluster: LocalCluster) -> None:
    address = await make(cluster)
    assert await nowait(cluster, cluster.process(W2), address) is None  # nothing connects them yet
    expected = ({"type": "answer", "body": b"nowait"}, Load(5, 6))
    for process in (cluster.program, cluster.process(W1), cluster.process(W2)):
        await process.call(address, "echo")
        assert await nowait(cluster, process, address, after_s=1) == expected
        assert await nowait(cluster, process, address, after_s=9, patience_s=1) == "given up"


async def test_a_request_that_needs_a_task_is_not_answered_without_one(cluster: LocalCluster) -> None:
    address = await make(cluster)
    await cluster.process(W2).call(address, "echo")
    assert await nowait(cluster, cluster.process(W1), address, hangs=True) is None
    assert await nowait(cluster, cluster.process(W2), address, hangs=True) == "given up"
    assert actor(cluster, address).cancelled == 1
    message, outcome = await nowait(cluster, cluster.process(W2), address, fails=True)
    assert (message, str(outcome)) == (None, "refused")


async def test_a_lost_or_suspended_process_does_not_answer(cluster: LocalCluster) -> None:
    address = await make(cluster)
    process = cluster.process(W2)
    await process.call(address, "echo")
    cluster.suspend_worker(W2)
    assert await nowait(cluster, process, address) is None
    cluster.suspend_worker(W2, is_suspended=False)
    cluster.suspend_worker(W1)
    asking = asyncio.create_task(nowait(cluster, process, address))
    await asyncio.sleep(1)
    cluster.remove_worker(W1)
    message, outcome = await asking
    assert message is None
    assert isinstance(outcome, ActorLostError)
    assert outcome.begun


async def test_views_know_what_is_local(cluster: LocalCluster) -> None:
    here = ActorAddress("x", W1, 1)
    assert cluster.process(W1).is_local(here)
    assert not cluster.process(W2).is_local(here)
    assert not cluster.program.is_local(here)
    assert cluster.process(W1).shared is not cluster.process(W2).shared
    assert cluster.process(W1).listener is not cluster.process(W2).listener
    assert cluster.process(W1).listener is cluster.process(W1).listener


async def test_latency_applies_between_processes_only() -> None:
    async with LocalCluster(FACTORIES, latency_s=0.25) as cluster:
        address = await make(cluster)
        began = cluster.clock.now()
        await cluster.process(W1).call(address, "echo")
        assert cluster.clock.now() == began
        await cluster.program.call(address, "echo")
        assert cluster.clock.now() == began + 0.5


# ---- workers


async def test_listeners_are_notified_when_workers_join_and_leave(cluster: LocalCluster) -> None:
    heard: list[Any] = []
    await cluster.program.subscribe(heard.append)
    joined = cluster.add_worker(threads=7, resources={"GPU": 1.0})
    cluster.remove_worker(W1)
    await asyncio.sleep(0)
    assert [WorkerInfo(**each) for each in heard[0]["joined"]] == [joined]
    assert [(each["kind"], list(each["left"])) for each in heard] == [("workers", []), ("workers", [W1])]
    assert await cluster.program.workers() == [*cluster.workers()]
    assert [each.address for each in cluster.workers()] == [W2, joined.address]
    cluster.change_worker(W2, is_available=False)
    assert not cluster.workers()[0].is_available
    with pytest.raises(ValueError, match="already a worker"):
        cluster.add_worker(joined)


async def test_a_worker_that_rejoins_has_no_actors(cluster: LocalCluster) -> None:
    address = await make(cluster)
    (info,) = [each for each in cluster.workers() if each.address == W1]
    cluster.remove_worker(W1)
    cluster.add_worker(info)
    with pytest.raises(ActorLostError) as lost:
        await cluster.program.call(address, "echo")
    assert not lost.value.begun


async def test_requests_on_a_lost_worker_fail_immediately(cluster: LocalCluster) -> None:
    address = await make(cluster)
    waiting = [
        asyncio.create_task(ask(cluster.program, address, hangs=True)),
        asyncio.create_task(cluster.process(W2).call(address, "hang")),
        asyncio.create_task(cluster.program.create(spec("local/replica/b#2", payload=b"hangs"), W1)),
    ]
    await asyncio.sleep(0.1)
    dead = actor(cluster, address)
    began = cluster.clock.now()
    cluster.remove_worker(W1)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in outcomes] == [ActorLostError] * 3
    assert all(each.begun for each in outcomes if isinstance(each, ActorLostError))
    assert cluster.clock.now() == began
    await wait_until(lambda: dead.stopped == [0])
    with pytest.raises(ActorLostError) as info:
        await cluster.program.call(address, "echo")
    assert not info.value.begun
    with pytest.raises(ActorLostError):
        await cluster.program.create(spec(), W1)


async def test_a_dead_process_cannot_write_publish_call_or_receive(cluster: LocalCluster) -> None:
    address = await make(cluster, W2)
    heard_by_dead: list[Any] = []
    heard: list[Any] = []
    dead = cluster.process(W1)
    await dead.subscribe(heard_by_dead.append)
    await cluster.program.subscribe(heard.append)
    cluster.remove_worker(W1)
    dead.publish({"kind": "said"})
    attempts = [
        asyncio.create_task(each)
        for each in (
            dead.store.commit(9, StoreChange({"k": b"v"})),
            dead.store.load(),
            dead.call(address, "echo"),
            dead.controller(),
            dead.workers(),
            dead.refused_workers(),
            dead.create(spec(), W2),
            dead.destroy(address, 0),
            dead.subscribe(heard_by_dead.append),
        )
    ]
    await asyncio.sleep(60)
    assert not any(each.done() for each in attempts)
    assert await cluster.store.load() == {}
    assert [each["kind"] for each in heard] == ["workers"]
    assert heard_by_dead == []
    for each in attempts:
        each.cancel()
    await asyncio.gather(*attempts, return_exceptions=True)
    assert cluster.actors() == [address]


async def test_the_death_of_a_caller_cancels_its_requests_elsewhere(cluster: LocalCluster) -> None:
    address = await make(cluster, W2)
    asking = asyncio.create_task(ask(cluster.process(W1), address, hangs=True))
    await asyncio.sleep(0.1)
    cluster.remove_worker(W1)
    await wait_until(lambda: actor(cluster, address).cancelled == 1)
    await asyncio.sleep(60)
    assert not asking.done()
    asking.cancel()


# ---- the topic


async def test_messages_arrive_in_order_and_as_copies(cluster: LocalCluster) -> None:
    heard: dict[str, list[Any]] = {W1: [], W2: []}
    for worker, messages in heard.items():
        await cluster.process(worker).subscribe(messages.append)
    for number in range(5):
        cluster.process(W1).publish({"kind": "n", "numbers": [number]})
    await asyncio.sleep(0)
    assert [each["numbers"] for each in heard[W1]] == [(n,) for n in range(5)]
    assert heard[W1] == heard[W2]
    assert heard[W1][0] is not heard[W2][0]


async def test_unsubscribing_drops_messages_on_their_way(cluster: LocalCluster) -> None:
    heard: list[Any] = []
    unsubscribe = await cluster.program.subscribe(heard.append)
    cluster.process(W1).publish({"kind": "n"})
    await unsubscribe()
    await asyncio.sleep(1)
    assert heard == []


async def test_the_topic_loses_duplicates_delays_and_reorders_messages(cluster: LocalCluster) -> None:
    for delays, expected in [
        ({0: [], 1: [0.0]}, [1]),
        ({0: [0.0, 0.0]}, [0, 0]),
        ({0: [2.0], 1: [1.0], 2: [0.0]}, [2, 1, 0]),
        ({0: [1.0], 1: [1.0], 2: [1.0], 3: [1.0]}, [0, 1, 2, 3]),
        ({0: [0.0, 5.0], 1: [1.0]}, [0, 1, 0]),
    ]:
        heard: list[int] = []
        unsubscribe = await cluster.program.subscribe(
            lambda message, heard=heard: heard.append(message["number"])
        )
        cluster.topic.deliver = lambda message, delays=delays: delays[message["number"]]
        for number in delays:
            cluster.process(W1).publish({"kind": "n", "number": number})
        await asyncio.sleep(10)
        await unsubscribe()
        assert heard == expected, delays


async def test_only_actors_publish(cluster: LocalCluster) -> None:
    with pytest.raises(InstanceError, match="Only actors publish"):
        cluster.program.publish({"kind": "n"})
    with pytest.raises(TypeError):
        cluster.process(W1).publish({"kind": object()})


# ---- the instance


async def test_without_a_controller_there_is_no_instance(cluster: LocalCluster) -> None:
    with pytest.raises(NotRunningError):
        await cluster.program.controller()
    controller = await cluster.start(b"payload")
    assert await cluster.program.controller() == controller
    assert actor(cluster, controller).payload == b"payload"
    assert (controller.name, controller.incarnation) == ("local/controller", 1)
    with pytest.raises(AlreadyRunningError):
        await cluster.start(b"again")


async def test_a_controller_that_fails_to_start_raises(cluster: LocalCluster) -> None:
    with pytest.raises(ReplicaStartError):
        await cluster.start(b"fails")
    async with LocalCluster(FACTORIES, workers=0) as empty:
        with pytest.raises(InstanceError, match="could not be started on any worker"):
            await empty.start(b"")


async def test_a_lost_controller_is_replaced_with_a_newer_epoch(cluster: LocalCluster) -> None:
    first = await cluster.start(b"")
    heard: list[Any] = []
    await cluster.program.subscribe(heard.append)
    cluster.remove_worker(first.worker)
    second = await cluster.program.controller()
    await asyncio.sleep(0)
    assert [each["kind"] for each in heard] == ["workers", "controller"]
    assert second.worker != first.worker
    assert second.incarnation == cluster.epoch == 2
    assert await cluster.program.call(second, "where") == second.worker


async def test_without_workers_the_controller_waits_for_one(cluster: LocalCluster) -> None:
    await cluster.start(b"")
    for info in cluster.workers():
        cluster.remove_worker(info.address)
    with pytest.raises(UnavailableError, match="is being replaced"):
        await cluster.program.controller()
    joined = cluster.add_worker()
    assert (await cluster.program.controller()).worker == joined.address


async def test_the_controller_starts_elsewhere_if_its_worker_dies_during_the_start(
    cluster: LocalCluster,
) -> None:
    starting = asyncio.create_task(cluster.start(b"slow"))
    await wait_until(cluster.actors)
    cluster.remove_worker(cluster.actors()[0].worker)
    controller = await starting
    assert (controller.worker, controller.incarnation) == (W1, 2)


async def test_a_failed_controller_start_is_retried(cluster: LocalCluster) -> None:
    first = await cluster.start(b"")
    store = cluster.store
    cluster.remove_worker(first.worker)
    cluster._factories[ActorKind.CONTROLLER] = FailsTwice(cluster)
    began = cluster.clock.now()
    await wait_until(lambda: cluster.epoch == 4 and cluster.actors())
    assert (await cluster.program.controller()).incarnation == 4
    assert cluster.clock.now() > began
    assert cluster.store is store


class FailsTwice:
    def __init__(self, cluster: LocalCluster) -> None:
        self.left = 2

    def __call__(self, context: ActorContext) -> Pilot:
        self.left -= 1
        if self.left >= 0:
            raise OSError("the store cannot be reached")
        return Pilot(context)


async def test_an_older_controller_cannot_write_once_a_newer_one_is_created(cluster: LocalCluster) -> None:
    first = await cluster.start(b"")
    await cluster.program.call(first, "write", key="one")
    stale = cluster.process(first.worker).store
    cluster.epoch = 2
    with pytest.raises(StaleEpochError, match="epoch 1 was replaced by 2"):
        await stale.commit(1, StoreChange({"two": b"x"}))
    assert set(await cluster.store.load()) == {"one"}


async def test_end_notifies_listeners_and_stops_all_actors_for_good(cluster: LocalCluster) -> None:
    heard: list[Any] = []
    controller = await cluster.start(b"")
    address = await make(cluster)
    actors = [actor(cluster, controller), actor(cluster, address)]
    await cluster.program.subscribe(heard.append)
    await cluster.end()
    await cluster.end()
    assert [each["kind"] for each in heard] == ["ended"]
    assert [each.stopped for each in actors] == [[0], [0]]
    assert cluster.actors() == []
    with pytest.raises(NotRunningError):
        await cluster.program.controller()


async def test_a_given_store_outlives_the_cluster() -> None:
    store = MemoryStore()

    async with LocalCluster(FACTORIES, store=store) as cluster:
        controller = await cluster.start(b"")
        await cluster.program.call(controller, "write", key="kept")
    assert await store.load() == {"kept": b"x"}


async def test_the_rng_and_the_instance_name_can_be_given() -> None:
    async with LocalCluster(
        FACTORIES, rng=random.Random(5), instance="mine", deliver=deliver_at_once
    ) as cluster:
        address = await make(cluster)
        context = actor(cluster, address).context
        assert context.rng is cluster.rng is cluster.program.connection.rng
        assert (context.worker, context.cluster) == (W1, cluster.process(W1))
        assert cluster.program.instance == "mine"
        assert "mine" in repr(cluster)


async def test_a_suspended_worker_answers_only_after_it_resumes(cluster: LocalCluster) -> None:
    address = await make(cluster)
    cluster.suspend_worker(W1)
    waiting = asyncio.create_task(cluster.program.call(address, "where"))
    await asyncio.sleep(60)
    assert not waiting.done()
    cluster.suspend_worker(W1, is_suspended=False)
    assert await waiting == W1

    cluster.suspend_worker(W1)
    waiting = asyncio.create_task(cluster.program.call(address, "where"))
    await asyncio.sleep(60)
    cluster.remove_worker(W1)
    with pytest.raises(ActorLostError):
        await waiting


async def test_retiring_a_worker_is_announced_and_moves_the_controller(cluster: LocalCluster) -> None:
    first = await cluster.start(b"")
    heard: list[Any] = []
    await cluster.program.subscribe(heard.append)
    cluster.retire_worker(first.worker)
    second = await cluster.program.controller()
    assert second.worker != first.worker
    await wait_until(lambda: cluster.actors() == [second])
    assert [each["kind"] for each in heard] == ["workers", "controller"]
    assert heard[0]["retiring"] == (first.worker,)
    assert {each.address: each.is_retiring for each in cluster.workers()} == {
        first.worker: True,
        second.worker: False,
    }


# ---- what a controller asks and tells of workers


async def test_inspect_returns_the_actors_of_a_worker(cluster: LocalCluster) -> None:
    await make(cluster)
    await make(cluster, name="local/replica/b#2", payload=b"sick")
    creating = asyncio.create_task(make(cluster, name="local/replica/b#3", payload=b"slow"))
    await wait_until(lambda: len(cluster.actors()) == 3)
    found = await cluster.program.inspect(W1)
    assert [(each["name"][-3:], each["is_ready"], each["is_healthy"], each["detail"]) for each in found] == [
        ("b#1", True, True, ""),
        ("b#2", True, False, "ill"),
        ("b#3", False, True, ""),
    ]
    assert {(each["kind"], each["incarnation"], each["worker"]) for each in found} == {("replica", 1, W1)}
    assert not await cluster.program.inspect(W2)
    cluster.remove_worker(W1)
    with pytest.raises(ActorLostError):
        await cluster.program.inspect(W1)
    await asyncio.gather(creating, return_exceptions=True)


async def test_only_reports_of_the_newest_controller_count(cluster: LocalCluster) -> None:
    await cluster.start(b"")
    await cluster.process(W1).report(1, UsageReport(frozenset({W1}), waiting_workers=2))
    await cluster.process(W2).report(0, UsageReport())
    assert cluster.reported == UsageReport(frozenset({W1}), waiting_workers=2)


async def test_a_restarted_worker_is_lost_first(cluster: LocalCluster) -> None:
    await cluster.process(W2).restart_worker(1, W1)
    assert [each.address for each in cluster.workers()] == [W2]


# ---- the connection


async def test_a_connection_knows_its_loop_its_instance_and_its_thread(cluster: LocalCluster) -> None:
    connection = cluster.process(W1).connection
    assert connection.loop is asyncio.get_running_loop()
    assert connection.runs_here()
    assert not await asyncio.to_thread(connection.runs_here)
    assert connection.cluster("local") is cluster.process(W1)
    with pytest.raises(NotRunningError):
        connection.cluster("other")
    coroutine = cluster.program.workers()
    with pytest.raises(RuntimeError, match="event loop that would have to run it"):
        connection.sync(coroutine)
    assert await asyncio.to_thread(lambda: connection.sync(cluster.program.workers())) == cluster.workers()
    await connection.ask("end_instance", instance="local")
    with pytest.raises(NotRunningError):
        await cluster.program.controller()
    with pytest.raises(BadRequestError):
        await connection.ask("dance")


def test_a_cluster_has_no_loop_before_it_starts() -> None:
    with pytest.raises(InstanceError, match="has not been started"):
        _ = LocalCluster(FACTORIES).loop


def test_a_process_is_a_cluster_to_the_type_checker() -> None:
    views: list[Cluster] = [LocalCluster(FACTORIES).program]
    assert views[0].instance == "local"
