"""Every router on real processes: three proxies under load, while a replica and then a worker are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from clusters import nannied_cluster, pids
from dask_processes import poll_for
from distributed import Client

import daskserve as serve
from daskserve.data.caller.request_routers.prefixes import IMBALANCE
from daskserve.request_router import PendingRequest, RequestRouter, RunningReplica

REPLICAS, SESSIONS, CALLERS, CONNECTIONS = 4, 48, 24, 5
WORK_S, LOAD_S = 0.02, 2.0
#: The maximum share of a replica's requests, as a multiple of the mean. `PrefixAffinity` leaves the replica
#: with a prompt's beginning only if it has `IMBALANCE` more requests than another one.
BOUND, BOUND_WITH_PREFIXES = 1.25, 1 + IMBALANCE * REPLICAS / CALLERS


@serve.deployment(
    num_replicas=REPLICAS, max_ongoing_requests=30, isolation="process", graceful_shutdown_timeout_s=2
)
class Place:
    async def __call__(self, request: Any) -> list[Any]:
        await asyncio.sleep(WORK_S)
        return [serve.get_replica_context().replica_tag, os.getpid()]


class LeastOngoing(RequestRouter):
    """A user's router, given by its import path."""

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [sorted(candidate_replicas, key=lambda each: each.queue_len)[:2], candidate_replicas]


def pickled_router() -> type[RequestRouter]:
    """Return a class that no process can import."""

    class Pickled(RequestRouter):
        def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
            return [self.rng.sample(self.select_available_replicas(), k=1), candidate_replicas]

    return Pickled


ROUTERS: dict[str, Callable[[], Any]] = {
    "RoundRobin": lambda: "RoundRobin",
    "ConsistentHash": lambda: "ConsistentHash",
    "PowerOfTwo": lambda: "PowerOfTwo",
    "LeastLatency": lambda: "LeastLatency",
    "PrefixAffinity": lambda: "PrefixAffinity",
    "SameHost": lambda: "SameHost",
    "by import path": lambda: f"{__name__}:LeastOngoing",
    "pickled": pickled_router,
}


#: The routers that send a session to the same replica in all processes.
BOUND_BY = ("ConsistentHash",)


@dataclass
class Answers:
    """The results of callers: the replica that answered each session, and the failures."""

    places: dict[str, list[str]] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


class Caller:
    """Sends requests with a prompt and a session, in turns over persistent connections.

    The kernel spreads connections over the proxies, which share a port.
    """

    def __init__(self, url: str, answers: Answers, method: str = "GET") -> None:
        parts = urlsplit(url)
        self._method = method
        self._place = parts.hostname, parts.port
        self._answers = answers
        self._open: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def ask(self, number: int, turn: int) -> None:
        turn %= CONNECTIONS
        session = f"s{number}"
        try:
            async with asyncio.timeout(20):
                tag, pid = await self._get(turn, session)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            self._answers.failures.append(f"{self._method} {error!r:.300}")
            if (left := self._open.pop(turn, None)) is not None:
                left[1].close()
            await asyncio.sleep(0.05)
        else:
            self._answers.places.setdefault(session, []).append(tag)
            self._answers.pids[tag] = pid

    async def _get(self, turn: int, session: str) -> tuple[str, int]:
        if turn not in self._open:
            self._open[turn] = await asyncio.open_connection(*self._place)
        reader, writer = self._open[turn]
        body = json.dumps({"prompt": f"{session} " * 40 + "?"}).encode()
        head = (
            f"{self._method} /place HTTP/1.1\r\nHost: x\r\nX-Session-Id: {session}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        answer = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self._open.pop(turn)[1].close()
        if lines[0].split(" ")[1] != "200":
            raise ValueError(f"{lines[0]} {answer[:200]!r}")
        tag, pid = json.loads(answer)
        return tag, pid

    def close(self) -> None:
        for _, writer in self._open.values():
            writer.close()


async def load(url: str, seconds: float, during: Callable[[], None] | None = None) -> Answers:
    """Let callers send requests of sessions through all proxies while something happens."""
    answers = Answers()
    ends = time.monotonic() + seconds

    async def run(first: int) -> None:
        caller, turn = Caller(url, answers, "POST" if first % 2 else "GET"), first
        while time.monotonic() < ends:
            for number in range(first, SESSIONS, CALLERS):
                await caller.ask(number, turn)
            turn += 1
        caller.close()

    tasks = [asyncio.create_task(run(number)) for number in range(CALLERS)]
    if during is not None:
        await asyncio.sleep(seconds / 3)
        await asyncio.to_thread(during)
    await asyncio.gather(*tasks)
    return answers


async def one_by_one(url: str) -> Answers:
    """Send a request of each session through each proxy, without other load."""
    answers = Answers()
    caller = Caller(url, answers)
    for turn in range(CONNECTIONS):
        for number in range(SESSIONS):
            await caller.ask(number, turn)
    caller.close()
    return answers


def stay(before: Answers, after: Answers) -> bool:
    """Return whether each session kept its replica, except for lost replicas and moves to new ones."""
    for session, places in after.places.items():
        home, place = before.places[session][0], places[0]
        if set(places) != {place} or (place != home and place in before.pids and home in after.pids):
            return False
    return True


def is_whole(client: serve.Client) -> bool:
    running = Counter(each.kind for each in client.status().actors if each.state == "RUNNING")
    return running["replica"] == REPLICAS and running["proxy"] == 3


def kill_worker(dask: Client, client: serve.Client) -> None:
    """Kill a worker with a replica and a proxy, but without the controller."""
    actors = client.status().actors
    kept = {each.worker for each in actors if each.kind == "controller"}
    victim = next(each.worker for each in actors if each.kind == "replica" and each.worker not in kept)
    os.kill(pids(dask)[victim or ""], signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Client, serve.Client]]:
    with nannied_cluster(3) as dask:
        options = {"port": 0, "location": "EveryWorker"}
        with serve.start(dask_client=dask, http_options=options) as client:
            yield dask, client


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_under_load_while_a_replica_and_a_worker_are_killed(
    name: str, cluster: tuple[Client, serve.Client]
) -> None:
    dask, client = cluster
    config = {"request_router_class": ROUTERS[name]()}
    client.run(Place.options(request_router_config=config).bind(), name="app", route_prefix="/place")
    (url,) = client.http_urls()

    def settled() -> Answers:
        poll_for(lambda: is_whole(client), 30)
        answers = asyncio.run(one_by_one(url))
        assert answers.failures == []
        return answers

    first = settled()
    busy = asyncio.run(load(url, LOAD_S))
    assert busy.failures == []
    shares = Counter(tag for each in busy.places.values() for tag in each)
    assert len(shares) == REPLICAS
    bound = BOUND_WITH_PREFIXES if name == "PrefixAffinity" else BOUND
    assert max(shares.values()) * REPLICAS <= bound * shares.total(), shares

    pid = next(iter(busy.pids.values()))
    lost = asyncio.run(load(url, LOAD_S, lambda: os.kill(pid, signal.SIGKILL)))
    assert len(lost.failures) < CALLERS
    assert all(each.startswith("POST") and " 502 " in each for each in lost.failures), lost.failures
    second = settled()

    gone = asyncio.run(load(url, LOAD_S, lambda: kill_worker(dask, client)))
    # Each connection to the proxy that was killed is lost once.
    unanswered = [each for each in gone.failures if "Incomplete" in each or "Reset" in each]
    assert len(unanswered) < CALLERS * CONNECTIONS
    assert all(each.startswith("POST") for each in gone.failures if each not in unanswered), gone.failures
    third = settled()
    if name in BOUND_BY:
        assert stay(first, first)
        assert stay(first, second)
        assert stay(second, third)
