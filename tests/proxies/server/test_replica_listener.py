"""Listeners in the process of a replica: it answers what it has a slot for, and its worker the rest."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from http_harness import respond

from daskserve.common.clock import LoopClock
from daskserve.common.types import Envelope, EnvelopeKind, Receive, Send
from daskserve.data.replica.process.listening import Port
from daskserve.errors import ActorLostError, ReplicaBusyError
from daskserve.options.http import HTTPOptions
from daskserve.options.start_messages import ProxyStart
from daskserve.proxies.replica_listener import ReplicaListeners, ReplicaRequests

ENVELOPE = Envelope(EnvelopeKind.HTTP, {"type": "http"}, is_direct=True)


class Process:
    """The replica of this process and its worker: where each request ran, and what the replica raises."""

    def __init__(self) -> None:
        self.slots = SimpleNamespace(has_room=True, ongoing=0, concurrency=1)
        self.ran: list[tuple[str, bool]] = []
        self.error: Exception | None = None
        self.counts: list[tuple[int, int]] = []
        self.requests = ReplicaRequests(self.handle, self.slots, self.to_worker)
        self.requests.own = frozenset({"e"})

    def _request(self, place: str, envelope: Envelope, error: Exception | None) -> Any:
        async def answer(receive: Receive, send: Send) -> None:
            self.ran.append((place, envelope.is_direct))
            self.counts.append((self.requests.ongoing, self.requests.begun))
            if error is not None:
                raise error
            await respond(send, place.encode())

        return SimpleNamespace(respond=answer)

    def handle(self, envelope: Envelope) -> Any:
        return self._request("replica", envelope, self.error)

    def to_worker(self, endpoint: str, envelope: Envelope) -> Any:
        return self._request(f"worker {endpoint}", envelope, None)

    async def ask(self, endpoint: str = "e", **fields: Any) -> None:
        async def nothing(*_: Any) -> Any:
            return None

        await self.requests.send(endpoint, replace(ENVELOPE, **fields), nothing, nothing)


async def test_the_replica_answers_a_request_of_its_own_endpoint() -> None:
    process = Process()
    await process.ask()
    assert (process.ran, process.counts) == ([("replica", True)], [(1, 1)])
    assert (process.requests.ongoing, process.requests.begun) == (0, 1)


@pytest.mark.parametrize(
    ("endpoint", "fields", "has_room"),
    [("e", {}, False), ("other", {}, True), ("e", {"model_id": "m"}, True)],
)
async def test_the_worker_answers_what_needs_a_router_or_a_slot(
    endpoint: str, fields: dict[str, Any], has_room: bool
) -> None:
    process = Process()
    process.slots.has_room = has_room
    await process.ask(endpoint, **fields)
    assert process.ran == [(f"worker {endpoint}", False)]
    assert (process.requests.ongoing, process.requests.begun) == (0, 0)


@pytest.mark.parametrize("error", [ReplicaBusyError("full"), ActorLostError("it ends", begun=False)])
async def test_the_worker_answers_what_the_replica_has_not_begun(error: Exception) -> None:
    process = Process()
    process.error = error
    await process.ask()
    assert process.ran == [("replica", True), ("worker e", False)]
    assert (process.requests.ongoing, process.requests.begun) == (0, 0)


async def test_a_request_that_the_replica_has_begun_is_not_repeated() -> None:
    process = Process()
    process.error = ActorLostError("it ends", begun=True)
    with pytest.raises(ActorLostError):
        await process.ask()
    assert process.ran == [("replica", True)]
    assert (process.requests.ongoing, process.requests.begun) == (0, 1)


def test_bodies_are_handled_by_the_rules_of_their_endpoint() -> None:
    requests = Process().requests
    assert requests.largest_body_bytes == 0
    requests.rules = {"e": ("stream", 10), "other": ("drop", 20)}
    assert requests.largest_body_bytes == 20
    assert requests.body_rules("e", 5) == ("stream", 10)
    assert requests.body_rules("unknown", 5) == ("gather", 5)


@pytest.mark.parametrize(
    ("endpoint", "ongoing", "is_crowded"), [("e", 0, False), ("e", 1, True), ("other", 1, False)]
)
def test_a_replica_without_a_free_slot_is_crowded(endpoint: str, ongoing: int, is_crowded: bool) -> None:
    process = Process()
    process.slots.ongoing = ongoing
    assert process.requests.is_crowded(endpoint) == is_crowded


async def test_a_replica_listens_for_each_proxy_until_it_stops() -> None:
    process, taken = Process(), list[str]()
    given = {key: Port("proxy", b"start", 10, lambda *_: None).connections() for key in ("p#1", "p#2")}

    def take(key: str) -> list[int]:
        taken.append(key)
        return [os.dup(each) for each in given[key].files]

    context = SimpleNamespace(
        spec=SimpleNamespace(instance="i"), clock=LoopClock(), rng=random.Random(1), logs=None
    )
    listeners = ReplicaListeners(
        process.handle,
        process.slots,
        context,
        to_worker=process.to_worker,
        take_files=take,
        trace=lambda config: None,
    )
    options = HTTPOptions(host="127.0.0.1", port=0)
    start = ProxyStart(options, None, False, True, False, "127.0.0.1", {}, None).encode()

    async def listen(route: str, *keys: str) -> None:
        await listeners.listen(
            {
                "own": ["e"],
                "rules": {"e": ["gather", 10]},
                "routes": {route: {"endpoint": "e", "methods": ["GET"]}},
                "listeners": dict.fromkeys(keys, start),
            }
        )

    await listen("/a", "p#1", "p#2")
    await listen("/b", "p#1", "p#2")
    assert taken == ["p#1", "p#2"]
    samples = listeners.samples()
    assert samples.keys() == {"p#1", "p#2"}
    assert ["http_ongoing_requests", ["i"], 0] in samples["p#1"]
    assert (await listeners.stop("p#1", 0)).keys() == {"p#1"}
    assert listeners.samples().keys() == {"p#2"}
    assert (await listeners.stop("", 0)).keys() == {"p#2"}
    await listen("/a", "p#2")  # it has stopped for good
    assert (listeners.samples(), taken) == ({}, ["p#1", "p#2"])
    for each in given.values():
        each.close()
