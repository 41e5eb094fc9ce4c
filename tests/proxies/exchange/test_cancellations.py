"""Thousands of requests, most of them cancelled at random moments, leave nothing behind.

The ingress, routers, channels and replicas are the real ones, in one process. Of the three replicas of each
backend, two are behind a channel, and one is local, as in the proxy's worker.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from by_task import by_task
from distributed.comm import listen
from replica_starts import replica_start
from scripted_routes import ScriptedListener

from daskserve.cluster.channel.connect.dialling import dial_worker
from daskserve.cluster.channel.connect.keyring import ChannelSecret, Keyring
from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.protocols.base import ActorContext, ActorSpec, Cluster
from daskserve.cluster.routes import WorkerRoutes
from daskserve.common.clock import LoopClock
from daskserve.common.types import (
    ActorAddress,
    ActorKind,
    ActorRequest,
    Envelope,
    Load,
    Message,
    Receive,
    Send,
)
from daskserve.data.caller.routing.router import Routers
from daskserve.data.caller.routing.waiting_calls import WaitingCalls
from daskserve.data.replica.replica import Replica
from daskserve.errors import RequestTimeoutError
from daskserve.options.http import HTTPOptions
from daskserve.proxies.ingress.app import IngressApp
from daskserve.proxies.ingress.routes import RouteTable

DEADLINE_S = 50.0
AT_A_TIME = 100
CONCURRENCY = 2
MAX_QUEUED = 10
HERE = "here"


async def nap(request: Any) -> str:
    await asyncio.sleep(float(request.query_params["s"]))
    return "done"


async def swallow(request: Any) -> int:
    return len(await request.body())


async def stream(request: Any) -> AsyncIterator[str]:
    for number in range(30):
        await asyncio.sleep(0)
        yield f"{number},"


def nap_in_thread(request: Any) -> str:
    time.sleep(float(request.query_params["s"]))
    return "done"


def stream_in_thread(request: Any) -> Iterator[str]:
    for number in range(30):
        yield f"{number},"


BACKENDS: dict[str, tuple[Any, str]] = {
    "nap": (nap, "own"),
    "nap_here": (nap, "worker"),
    "swallow": (swallow, "own"),
    "stream": (stream, "own"),
    "stream_here": (stream, "worker"),
    "nap_in_thread": (nap_in_thread, "own"),
    "stream_in_thread": (stream_in_thread, "own"),
}


class Plant:
    """An ingress, its routers, and the replicas of all backends, local and behind a channel."""

    instance = "i"

    def __init__(self) -> None:
        self.replicas: dict[tuple[str, str], Replica] = {}
        keyring = Keyring()
        keyring.add(ChannelSecret())
        self.near = ChannelPool(self._nobody, partial(dial_worker, keyring=keyring))
        self.far = ChannelPool(self._dispatch_far, self._nobody, keyring=keyring)
        self.far_address = ""
        self.outcomes: Counter[int] = Counter()

    async def start(self) -> None:
        self._server = await listen("inproc://", self._accept)
        self.far_address = self._server.contact_address
        for tag, (definition, event_loop) in BACKENDS.items():
            for number, worker in enumerate((HERE, self.far_address, self.far_address)):
                await self._start_replica(f"{tag}#{number}", tag, worker, definition, event_loop)
        news: dict[str, Any] = {}
        for tag in BACKENDS:
            news[f"endpoint/{tag}"] = {"legacy": True, "traffic": {tag: 1.0}, "shadows": {}}
            news[f"backend/{tag}"] = {
                "replicas": [
                    [name.rpartition("/")[2], at, 1] for name, at in self.replicas if f"/{tag}#" in name
                ],
                "concurrency": CONCURRENCY,
                "max_queued": MAX_QUEUED,
                "max_crash_retries": 1,
            }
        listener = ScriptedListener(news)
        clock = LoopClock()
        self.routes = WorkerRoutes(self.near, clock)
        self.routers = Routers(
            cast(Cluster, self), listener, clock, random.Random(2), self.routes, WaitingCalls(), {}
        )
        table = RouteTable({f"/{tag}": {"endpoint": tag, "methods": ["GET", "POST"]} for tag in BACKENDS})
        self.ingress = IngressApp(
            options=HTTPOptions(),
            routes=table,
            dispatch=self._dispatch,
            rng=random.Random(3),
        )

    async def _start_replica(self, tag: str, backend: str, worker: str, code: Any, event_loop: str) -> None:
        start = replica_start(
            code, backend_tag=backend, replica_tag=tag, concurrency=CONCURRENCY, event_loop=event_loop
        )
        spec = ActorSpec(ActorKind.REPLICA, f"i/replica/{tag}", 1, "i", start.encode())
        nothing = cast(Cluster, SimpleNamespace())
        replica = Replica(ActorContext(spec, nothing, LoopClock(), random.Random(0), worker))
        await replica.start()
        self.replicas[spec.name, worker] = replica

    async def stop(self) -> None:
        await asyncio.gather(*(each.stop(0) for each in self.replicas.values()))
        await self.near.close()
        await self.far.close()
        self._server.stop()

    async def _accept(self, comm: Any) -> None:
        await comm.read()  # which handler is wanted
        await self.far.accept(comm)

    async def _dispatch(self, endpoint: str, envelope: Envelope, receive: Receive, send: Send) -> None:
        await self.routers.router(endpoint).send(envelope, receive, send)

    @by_task
    async def _dispatch_far(
        self, name: str, incarnation: int, envelope: Envelope, receive: Receive, send: Send
    ) -> Load:
        return await self.replicas[name, self.far_address].handle(envelope).respond(receive, send)

    def _nobody(self, *_: Any) -> ActorRequest:
        raise AssertionError("the proxy must not be called")

    # The routers' view of a cluster.

    def is_local(self, address: ActorAddress) -> bool:
        return address.worker == HERE

    def handler_of(self, address: ActorAddress) -> Any:
        return partial(self.request, address)

    @by_task
    async def request(self, address: ActorAddress, envelope: Envelope, receive: Receive, send: Send) -> Load:
        if self.is_local(address):
            return await self.replicas[address.name, HERE].handle(envelope).respond(receive, send)
        return await self.near.request(address, envelope).respond(receive, send)

    # The test's own operations.

    async def ask(
        self, tag: str, duration_s: float = 0.0, parts: int = 1, timeout_s: float | None = None
    ) -> int:
        """Return the status of one request."""
        sent: list[Message] = []
        left = parts

        async def receive() -> Message:
            nonlocal left
            left -= 1
            if left < 0:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b"x" * 100, "more_body": left > 0}

        async def send(message: Message) -> None:
            sent.append(message)
            await asyncio.sleep(0)

        headers = [(b"host", b"x")]
        if timeout_s is not None:
            headers.append((b"x-request-timeout-seconds", str(timeout_s).encode()))
        scope = {
            "type": "http",
            "method": "POST" if parts > 1 else "GET",
            "path": f"/{tag}",
            "headers": headers,
            "query_string": f"s={duration_s}".encode(),
        }
        await self.ingress(scope, receive, send)
        return int(sent[0]["status"])

    def gauges(self) -> dict[str, int]:
        """Return all gauges."""
        sets = self.routers._sets.values()
        executors = [cast(Any, each)._code._executor for each in self.replicas.values()]
        channels = [*self.near._serving, *self.far._serving]
        assert len(channels) == 2
        return {
            "ingress": self.ingress.ongoing,
            "in flight": sum(each.in_flight for each in sets),
            "in flight by replica": sum(
                entry.in_flight for each in sets for entry in each.pool._entries.values()
            ),
            "waiting": sum(each.waiting for each in sets),
            "ongoing": sum(each.load().ongoing for each in self.replicas.values()),
            "queued": sum(each.load().queued for each in self.replicas.values()),
            "calls": sum(len(executor.runs) for executor in executors),
            "in threads": sum(executor.threads.unfinished for executor in executors),
            "abandoned": sum(executor.abandoned for executor in executors),
            "streams": sum(len(each._opened) for each in channels),
            "handlers": sum(len(each._accepted) for each in channels),
        }


@asynccontextmanager
async def running_plant() -> AsyncIterator[Plant]:
    plant = Plant()
    await plant.start()
    try:
        yield plant
    finally:
        await plant.stop()


async def one(plant: Plant, rng: random.Random) -> str:
    """Send a request of some kind, and cancel it at some moment unless it has been answered."""
    tag = rng.choice(sorted(BACKENDS))
    timeout_s = rng.choice([None, None, None, 0.002, 1.0])
    task = asyncio.create_task(
        plant.ask(tag, rng.choice([0.0, 0.001, 0.003]), 5 if tag == "swallow" else 1, timeout_s)
    )
    if rng.random() < 0.8:
        for _ in range(rng.randrange(25)):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(rng.random() * 0.01)
    if rng.random() < 0.9:
        task.cancel()
    await asyncio.wait([task])
    if task.cancelled():
        return "cancelled"
    if isinstance(task.exception(), RequestTimeoutError):
        return "cut off"  # at its deadline, in the middle of the response
    return str(task.result())


async def storm(plant: Plant, rng: random.Random, requests: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    left = requests

    async def keep_sending() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            outcomes[await one(plant, rng)] += 1

    await asyncio.gather(*(keep_sending() for _ in range(AT_A_TIME)))
    return outcomes


async def settle(plant: Plant) -> None:
    """Wait until all gauges are 0."""
    try:
        async with asyncio.timeout(DEADLINE_S / 5):
            while any(plant.gauges().values()):  # noqa: ASYNC110 - threads have no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"still counted: {plant.gauges()}")


@pytest.mark.parametrize("requests", [2_000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_thousands_of_cancellations_leave_nothing_behind(requests: int) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), running_plant() as plant:
            for tag in BACKENDS:
                assert await plant.ask(tag, timeout_s=None) == 200
            outcomes = await storm(plant, random.Random(4), requests)
            assert set(outcomes) <= {"200", "408", "503", "cancelled", "cut off"}, outcomes
            assert min(outcomes["200"], outcomes["408"], outcomes["503"]) > requests / 200, outcomes
            assert outcomes["cancelled"] > requests / 3, outcomes
            await settle(plant)
            # Every slot of every replica accepts new requests.
            for tag in BACKENDS:
                count = 3 * CONCURRENCY
                assert await asyncio.gather(*(plant.ask(tag, 0.001) for _ in range(count))) == [200] * count
            await settle(plant)

    asyncio.run(main())
