"""Requests that end processes: where they are retried, which are refused, and the cost for other requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import pytest
from by_task import by_task
from scripted_routes import ScriptedListener, ScriptedRoutes

from daskserve.cluster.protocols.base import Cluster
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorAddress, Envelope, EnvelopeKind, Load, Message, Receive, Send
from daskserve.data.caller.routing.controller_watch import ControllerWatch
from daskserve.data.caller.routing.load_reports import LoadReports
from daskserve.data.caller.routing.replica_set import ReplicaSet
from daskserve.data.caller.routing.suspects.suspects import (
    REFUSAL_S,
    SWEEP_S,
    TRIAL_WAIT_S,
    WINDOW_S,
    Suspects,
    target_of,
)
from daskserve.data.caller.routing.waiting_calls import WaitingCalls
from daskserve.errors import ActorLostError, QuarantinedError, UserCodeError
from daskserve.proxies.ingress.errors import reply_to

pytestmark = pytest.mark.virtual_time

#: The duration of a request.
TOOK_S = 0.01


class Workers:
    """Workers with a replica each, which some paths kill; new ones replace them.

    A path that begins with ``/kill`` ends the process that runs it after `TOOK_S`, ``/slow`` takes a second,
    and ``/fail`` raises.
    """

    instance = "i"

    def __init__(self) -> None:
        self.suspects = Suspects()
        self.asked: list[tuple[str, str]] = []
        self.killed: list[str] = []
        self.running: dict[str, set[asyncio.Future[Load]]] = {}
        self.loss = ActorLostError("gone", is_disconnected=True)
        self.sets: list[ReplicaSet] = []
        self.sent: list[asyncio.Task[None]] = []

    def is_local(self, address: ActorAddress) -> bool:
        return False

    def backend(self, tag: str = "b") -> ReplicaSet:
        rng = random.Random(1)
        routes = ScriptedRoutes()
        controller_watch = ControllerWatch(ScriptedListener(), LoopClock(), list)
        found = ReplicaSet(
            tag,
            cast(Cluster, self),
            LoopClock(),
            rng,
            routes,
            suspects=self.suspects,
            waiting_calls=WaitingCalls(),
            controller_watch=controller_watch,
            reports=LoadReports(cast(Cluster, self), LoopClock(), {}),
            watch_facts=lambda kind, note: None,
        )
        self.sets.append(found)
        return found

    def publish(self, *workers: str, concurrency: int = 8, max_crash_retries: int = 1) -> None:
        self.running |= {worker: set() for worker in workers if worker not in self.running}
        for each in self.sets:
            replicas = [[f"{each.tag}#{worker}", worker, 1] for worker in workers]
            limits = {"concurrency": concurrency, "max_queued": 100, "max_crash_retries": max_crash_retries}
            each.update({"replicas": replicas, **limits})

    def kill(self, worker: str) -> None:
        self.killed.append(worker)
        for each in self.running.pop(worker):
            if not each.done():
                each.set_exception(self.loss)
        for each_set in self.sets:
            each_set.pool.forget_worker(worker)

    def handler_of(self, address: ActorAddress) -> Any:
        return partial(self.request, address)

    @by_task
    async def request(self, address: ActorAddress, envelope: Envelope, receive: Receive, send: Send) -> Load:
        path, worker = envelope.head["raw_path"].decode(), address.worker
        self.asked.append((path, worker))
        loop = asyncio.get_running_loop()
        end: asyncio.Future[Load] = loop.create_future()
        self.running[worker].add(end)
        if path.startswith("/kill"):
            loop.call_later(TOOK_S, lambda: worker in self.running and self.kill(worker))
        else:
            took_s = 1.0 if path.startswith("/slow") else TOOK_S
            loop.call_later(took_s, lambda: end.done() or end.set_result(Load()))
        try:
            load = await end
        finally:
            self.running.get(worker, set()).discard(end)
        if path.startswith("/fail"):
            raise UserCodeError("no")
        return load

    def send(self, target: ReplicaSet, path: str, method: str = "GET") -> asyncio.Task[None]:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def drop(message: Message) -> None:
            pass

        raw_path, _, query = path.partition("?")
        head = {
            "type": "http",
            "method": method,
            "raw_path": raw_path.encode(),
            "query_string": query.encode(),
        }
        task = asyncio.create_task(target.send(Envelope(EnvelopeKind.HTTP, head), receive, drop))
        self.sent.append(task)
        return task

    def workers_of(self, path: str) -> list[str]:
        return [worker for each, worker in self.asked if each == path]

    def assert_at_rest(self) -> None:
        assert "trials=0" in repr(self.suspects)
        assert not self.suspects.on_free
        assert [(each.waiting, each.in_flight) for each in self.sets] == [(0, 0)] * len(self.sets)


@pytest.fixture
@asynccontextmanager
async def workers() -> AsyncIterator[Workers]:
    workers = Workers()
    yield workers
    await asyncio.gather(*workers.sent, return_exceptions=True)
    workers.assert_at_rest()


def now() -> float:
    return asyncio.get_running_loop().time()


async def failed(task: asyncio.Task[None]) -> BaseException | None:
    await asyncio.wait([task])
    return task.exception()


# ---- one poisonous request


@pytest.mark.parametrize("seed", range(20))
async def test_a_request_that_kills_takes_two_processes_and_fails_no_other_request(
    workers: Workers, seed: int
) -> None:
    rng = random.Random(seed)
    backend, other = workers.backend(), workers.backend("other")
    workers.publish("w1", "w2", "w3", "w4")
    others = []
    for number in range(60):
        others.append(workers.send(rng.choice([backend, other]), f"/fine/{number}"))
        if number == 30:
            poison = workers.send(backend, "/kill")
        await asyncio.sleep(rng.uniform(0, TOOK_S / 4))
    assert isinstance(await failed(poison), ActorLostError)
    assert [each.exception() for each in await finished(others)] == [None] * 60
    assert len(workers.killed) == 2


async def finished(tasks: list[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    await asyncio.wait(tasks)
    return tasks


async def test_a_retry_avoids_workers_with_a_proxy_or_the_controller(workers: Workers) -> None:
    backend = workers.backend()
    workers.suspects.update_system_workers({"workers": ["w1", "w2", "w3"]})
    workers.publish("w0")
    poison = workers.send(backend, "/kill")
    await asyncio.sleep(0)
    workers.publish("w0", "w1", "w2", "w3", "w4")
    await failed(poison)
    assert workers.killed == ["w0", "w4"]


async def test_a_retry_goes_to_the_proxys_worker_if_there_is_no_other(workers: Workers) -> None:
    backend = workers.backend()
    workers.suspects.update_system_workers({"workers": ["w1", "w2"]})
    workers.publish("w1", "w2")
    lost = workers.send(backend, "/slow")
    await asyncio.sleep(TOOK_S)
    workers.kill(workers.workers_of("/slow")[0])
    assert await failed(lost) is None
    assert set(workers.workers_of("/slow")) == {"w1", "w2"}


async def test_a_retry_goes_to_another_host_because_the_whole_machine_may_be_lost(workers: Workers) -> None:
    backend = workers.backend()
    near, far = [f"tcp://h1:{number}" for number in range(1, 4)], "tcp://h2:4"
    workers.publish("tcp://h1:0")
    lost = [workers.send(backend, f"/slow/{number}") for number in range(5)]
    await asyncio.sleep(TOOK_S)
    workers.publish("tcp://h1:0", *near, far)
    for worker in ("tcp://h1:0", *near):
        workers.kill(worker)
        await asyncio.sleep(TOOK_S)
    assert [each.exception() for each in await finished(lost)] == [None] * 5


async def test_a_retry_waits_for_room_rather_than_share_a_worker_with_a_proxy(workers: Workers) -> None:
    backend = workers.backend()
    workers.suspects.update_system_workers({"workers": ["w1"]})
    workers.publish("w2", "w3", concurrency=1)
    slow = [workers.send(backend, f"/slow/{number}") for number in range(2)]
    await asyncio.sleep(0.5)
    workers.publish("w1", "w2", "w3", concurrency=1)
    workers.kill("w2")
    await finished(slow)
    assert {worker for _, worker in workers.asked} == {"w2", "w3"}
    assert now() == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize(("retries", "kills"), [(0, 1), (1, 2), (3, 4)])
async def test_the_option_says_how_often_a_request_is_retried_after_a_death(
    workers: Workers, retries: int, kills: int
) -> None:
    backend = workers.backend()
    workers.publish("w1", "w2", "w3", "w4", "w5", max_crash_retries=retries)
    assert isinstance(await failed(workers.send(backend, "/kill")), ActorLostError)
    assert len(workers.killed) == kills


async def test_the_loss_of_a_replica_that_was_stopped_as_planned_makes_no_suspects(workers: Workers) -> None:
    workers.loss = ActorLostError("stopped", is_planned=True)
    backend = workers.backend()
    workers.publish("w1", "w2", "w3", "w4", max_crash_retries=0)
    slow = workers.send(backend, "/slow")
    for _ in range(3):
        await asyncio.sleep(0.1)
        workers.kill(workers.workers_of("/slow")[-1])
    assert await failed(slow) is None
    assert not workers.suspects.known


async def test_a_post_is_never_retried_after_a_death_and_is_no_suspect(workers: Workers) -> None:
    backend = workers.backend()
    workers.publish("w1", "w2")
    assert isinstance(await failed(workers.send(backend, "/kill", "POST")), ActorLostError)
    assert len(workers.killed) == 1
    assert not workers.suspects.known


# ---- refusals


async def test_a_url_whose_retries_killed_twice_is_refused_for_a_while_and_only_that_url(
    workers: Workers,
) -> None:
    backend, names = workers.backend(), [f"w{number}" for number in range(20)]
    workers.publish(*names)
    for _ in range(2):
        assert isinstance(await failed(workers.send(backend, "/kill?x=1")), ActorLostError)
    refused_at = now()
    assert len(workers.killed) == 4
    error = await failed(workers.send(backend, "/kill?x=1"))
    assert isinstance(error, QuarantinedError)
    assert str(error).startswith(
        "GET /kill?x=1 of deployment 'b' is refused for 10 s: its retries ended 2 pro"
    )
    assert reply_to(error, "42").status == 502
    assert now() == refused_at, "at once"
    assert await failed(workers.send(backend, "/fine?x=1")) is None
    assert not isinstance(await failed(workers.send(backend, "/kill?x=2")), QuarantinedError)
    assert len(workers.killed) == 6
    await asyncio.sleep(refused_at + REFUSAL_S - 0.01 - now())
    assert isinstance(await failed(workers.send(backend, "/kill?x=1")), QuarantinedError)
    await asyncio.sleep(0.01)
    assert not isinstance(await failed(workers.send(backend, "/kill?x=1")), QuarantinedError)
    assert isinstance(await failed(workers.send(backend, "/kill?x=1")), QuarantinedError), "again"


async def test_kills_that_lie_more_than_a_minute_apart_refuse_nothing_and_are_forgotten(
    workers: Workers,
) -> None:
    backend = workers.backend()
    workers.publish(*(f"w{number}" for number in range(20)))
    for _ in range(3):
        assert isinstance(await failed(workers.send(backend, "/kill")), ActorLostError)
        await asyncio.sleep(WINDOW_S)
    assert len(workers.suspects.known) == 1
    await failed(workers.send(backend, "/fine"))
    assert not workers.suspects.known, "requests pay for suspects only as long as there are any"


@pytest.mark.parametrize("path", ["/slow", "/fail/slow"])
async def test_an_answer_clears_a_url_that_was_there_when_processes_were_killed(
    workers: Workers, path: str
) -> None:
    backend = workers.backend()
    workers.publish(*(f"w{number}" for number in range(20)))
    for _ in range(4):
        lost = workers.send(backend, path)
        await asyncio.sleep(TOOK_S / 2)
        workers.kill(workers.workers_of(path)[-1])
        await asyncio.sleep(TOOK_S / 2)
        workers.kill(workers.workers_of(path)[-1])
        assert isinstance(await failed(lost), ActorLostError)
        assert not isinstance(await failed(workers.send(backend, path)), (ActorLostError, QuarantinedError))
    assert not workers.suspects.known


def test_one_process_with_several_replicas_is_one_kill() -> None:
    suspects, target = Suspects(), target_of("b", {"method": "GET", "raw_path": b"/"})
    for _ in range(3):
        trial = suspects.lost(target, None, "w1", 10.0)
        suspects.lost(target, trial, "w2", 10.1)
    assert suspects.trial_of(target, 10.2) is not None
    trial = suspects.lost(target, None, "w1", 11.0)
    suspects.lost(target, trial, "w2", 11.0)
    with pytest.raises(QuarantinedError):
        suspects.trial_of(target, 11.0)


# ---- trials


async def test_suspects_of_different_urls_are_not_retried_on_one_worker(workers: Workers) -> None:
    backend, other = workers.backend(), workers.backend("other")
    workers.publish("w1")
    lost = [workers.send((backend, other)[number % 2], f"/fine/{number // 2}") for number in range(12)]
    await asyncio.sleep(TOOK_S / 2)
    workers.kill("w1")
    most: Counter[str] = Counter()
    workers.publish("w2", "w3")
    while not all(each.done() for each in lost):
        for worker, running in workers.running.items():
            most[worker] = max(most[worker], len(running))
        await asyncio.sleep(TOOK_S / 4)
    assert [each.exception() for each in lost] == [None] * 12
    assert most == {"w2": 1, "w3": 1}
    assert now() < TRIAL_WAIT_S


async def test_requests_of_one_url_are_retried_together(workers: Workers) -> None:
    backend = workers.backend()
    workers.publish("w1")
    lost = [workers.send(backend, "/slow") for _ in range(8)]
    await asyncio.sleep(TOOK_S)
    workers.kill("w1")
    workers.publish("w2", "w3")
    await finished(lost)
    assert now() == pytest.approx(1, abs=0.1), "all at once"


async def test_many_slow_innocent_requests_wait_only_a_moment_for_workers_of_their_own(
    workers: Workers,
) -> None:
    backend = workers.backend()
    workers.publish("w1", concurrency=100)
    lost = [workers.send(backend, f"/slow/{number}") for number in range(100)]
    await asyncio.sleep(0.5)
    workers.kill("w1")
    workers.publish("w2", "w3", concurrency=100)
    assert [each.exception() for each in await finished(lost)] == [None] * 100
    assert now() < 0.5 + TRIAL_WAIT_S + 1.1


async def test_new_requests_of_a_suspect_url_stay_away_from_other_suspects(workers: Workers) -> None:
    backend = workers.backend()
    workers.publish("w1", "w2", "w3", "w4", "w5", "w6")
    poison = workers.send(backend, "/kill")
    await asyncio.sleep(0)
    first = workers.workers_of("/kill")[0]
    innocent = []
    while not any(worker == first for path, worker in workers.asked if path != "/kill"):
        innocent.append(workers.send(backend, f"/fine/{len(innocent)}"))
        await asyncio.sleep(0)
    await asyncio.sleep(TOOK_S + TOOK_S / 10)
    assert workers.killed == [first]
    more = [workers.send(backend, "/kill") for _ in range(5)]
    await finished([poison, *more, *innocent])
    assert [each.exception() for each in innocent] == [None] * len(innocent)


async def test_a_caller_that_leaves_while_its_request_waits_leaves_nothing(workers: Workers) -> None:
    backend = workers.backend()
    workers.publish("w1")
    lost = [workers.send(backend, f"/slow/{number}") for number in range(5)]
    await asyncio.sleep(TOOK_S)
    workers.kill("w1")
    await asyncio.sleep(TOOK_S)
    assert backend.waiting == 5
    for each in lost:
        each.cancel()


async def test_suspects_that_wait_fail_when_their_backend_is_deleted(workers: Workers) -> None:
    backend = workers.backend()
    workers.publish("w1")
    lost = workers.send(backend, "/slow")
    await asyncio.sleep(TOOK_S)
    workers.kill("w1")
    await asyncio.sleep(TOOK_S)
    backend.update(None)
    assert "was deleted" in str(await failed(lost))


def test_thousands_of_requests_lost_with_one_worker_cost_a_fixed_time_each() -> None:
    suspects = Suspects()
    looks = 0

    class Counted(dict[Any, Any]):
        def items(self) -> Any:
            nonlocal looks
            looks += 1
            return super().items()

    suspects.known = Counted()
    for number in range(1000):
        suspects.lost(("b", "GET", b"/p", b"%d" % number), None, "tcp://10.0.0.1:1", 100.0)
    assert looks == 1
    assert len(suspects.known) == 1000
    suspects.trial_of(("b", "GET", b"/p", b""), 100.0 + WINDOW_S + SWEEP_S)
    assert suspects.known == {}
