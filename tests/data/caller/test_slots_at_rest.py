"""No slot is lost by random requests that fail, are cancelled or get second attempts, while replicas and
options change."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest
from test_router import Stage, quiet

from daskserve.common.types import Envelope, EnvelopeKind, Load, Receive, Send
from daskserve.data.caller.request_routers import routing
from daskserve.data.caller.routing.replica_set import ReplicaSet
from daskserve.errors import ActorLostError, BackPressureError, ReplicaBusyError, UnavailableError
from daskserve.request_router import PendingRequest, RequestRouter, RunningReplica

pytestmark = pytest.mark.virtual_time

ROUTERS = ("RoundRobin", "LeastLatency", "ConsistentHash", "PrefixAffinity", "Counting")
HEDGED = {"quantile": 0.5, "budget": 0.5, "min_delay_s": 0.02}
ORDER = {"weights": {1: 4.0, 0: 1.0}}


class Counting(RequestRouter):
    """Counts routed requests, as a user's router may do."""

    made: list[Counting]
    ongoing: int

    def initialize_state(self) -> None:
        self.ongoing = 0
        self.made.append(self)

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Any:
        return [[self.rng.choice(candidate_replicas)]] if self.rng.random() < 0.9 else []

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        self.ongoing += 1

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        self.ongoing -= 1
        assert self.ongoing >= 0


class Traffic:
    """Random requests to one backend."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.stage = Stage()
        self.stage.replicas.handler = self.answer
        self.backend: ReplicaSet = self.stage.backend()
        self.change()

    async def answer(self, tag: str, envelope: Envelope, receive: Receive, send: Send) -> Load:
        rng = self.rng
        await asyncio.sleep(rng.choice((0.0, 0.01, 0.2)))
        if (drawn := rng.random()) < 0.1:
            raise ValueError("user code")
        if drawn < 0.15:
            raise ReplicaBusyError("full", ongoing=3)
        if drawn < 0.2:
            raise ActorLostError("gone", begun=rng.random() < 0.5)
        return Load(rng.randrange(3))

    def change(self, *, is_last: bool = False) -> None:
        """Publish other replicas and options."""
        rng = self.rng
        router = rng.choice((None, *ROUTERS))
        self.stage.publish(
            *(f"r{n}" for n in range(rng.randrange(5) + is_last)),
            concurrency=3,
            max_queued=20,
            router=None if router is None else {"router": router},
            hedging=HEDGED if rng.random() < 0.7 else None,
            order=ORDER if rng.random() < 0.5 else None,
        )

    def envelope(self) -> Envelope:
        rng = self.rng
        if rng.random() < 0.3:
            head = {"type": "http", "method": "GET", "raw_path": b"/", "headers": []}
            return Envelope(EnvelopeKind.HTTP, head, has_body=False)
        session = rng.choice(("", "s1", "s2"))
        facts = {"session_id": session, "priority": rng.randrange(2), "idempotent": rng.random() < 0.7}
        found = Envelope(EnvelopeKind.CALL, {"method": "x", "request_id": "id", "facts": facts})
        found.model_id = rng.choice(("", "", "m1", "m2"))
        return found

    def call_directly(self) -> None:
        """Call a replica as a call without a task does."""
        envelope, backend = self.envelope(), self.backend
        replica = backend.take_now(envelope)
        if replica is not None and replica.has_queued_request:
            backend.release_unused(replica, envelope)
        elif replica is not None:
            outcome: Any = self.rng.choice((Load(), ValueError("user code"), None))
            later = asyncio.get_running_loop().call_later
            later(self.rng.choice((0.0, 0.1)), backend.release, replica, outcome, envelope)

    async def run(self) -> None:
        rng, stage = self.rng, self.stage
        for _ in range(150):
            for _ in range(rng.choice((0, 1, 12))):
                stage.send(self.backend, self.envelope())
            if rng.random() < 0.3:
                self.call_directly()
            if rng.random() < 0.2:
                running = [each for each in stage.sent if not each.done()]
                for each in rng.sample(running, rng.randrange(len(running) + 1)):
                    each.cancel()
            if rng.random() < 0.1:
                self.change()
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.05)))
        self.change(is_last=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*stage.sent, return_exceptions=True), 30)
        await quiet()


@pytest.mark.parametrize("seed", range(8))
async def test_no_slot_is_lost_whatever_becomes_of_requests_and_options(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Counting] = []
    monkeypatch.setattr(Counting, "made", made, raising=False)
    monkeypatch.setattr(routing, "BUILT_IN", {**routing.BUILT_IN, "Counting": Counting})
    traffic = Traffic(seed)
    await traffic.run()
    backend, pool = traffic.backend, traffic.backend.pool
    assert not [each for each in traffic.stage.sent if not each.done()]
    assert (backend.waiting, backend.in_flight, pool.in_flight, pool.queued) == (0, 0, 0, 0)
    assert {each.in_flight for each in pool.entries().values()} == {0}
    assert not sum(traffic.stage.replicas.running.values())
    allowed = (ValueError, ActorLostError, BackPressureError, ReplicaBusyError, UnavailableError)
    for each in traffic.stage.sent:
        error = None if each.cancelled() else each.exception()
        assert error is None or isinstance(error, allowed), error
    chosen = backend._waiting.routing
    if chosen is not None:
        assert not chosen.errors.text
        assert not [each.ongoing for each in made if each is chosen._router and each.ongoing]
