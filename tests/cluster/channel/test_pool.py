"""The channels of one process when the network between it and others breaks, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from by_task import by_task

from daskserve.cluster.channel.kept_results import KeptResults
from daskserve.cluster.channel.pool import RETIRED_S, ChannelPool
from daskserve.cluster.channel.wire.transport import Transport
from daskserve.cluster.local.transport import connect
from daskserve.common.types import (
    KEPT_BYTES,
    ActorAddress,
    Envelope,
    EnvelopeKind,
    KeptPayload,
    Load,
    Message,
    Payload,
    Reachability,
    Receive,
    Send,
    nothing_to_receive,
)
from daskserve.errors import ActorLostError

pytestmark = pytest.mark.virtual_time


WORKER = "tcp://10.0.0.2:4000"
ACTOR = ActorAddress("i/replica/b#A", WORKER, 1)


class Leaves:
    """A call that leaves a large answer where it is."""

    leaves_value = True


class Network:
    """A process and a worker, the network between them, and the notifications to the process."""

    def __init__(self) -> None:
        self.is_reachable = True
        self.error: Exception = OSError("nothing listens there")
        #: How long a direct dial takes; None if nothing answers, so that it goes through the scheduler.
        self.dial_s: float | None = 0.0
        self.dials: list[tuple[str, float]] = []
        self.received: list[Reachability] = []
        self.far = ChannelPool(self._answer, self._dial, kept=KeptResults(WORKER))
        self.pool = ChannelPool(
            self._answer, self._dial, connect_directly=self._dial_directly, retry_direct_s=8.0
        )
        self.pool.watchers.append(lambda worker, route: self.received.append(route))
        self.go = asyncio.Event()
        self.answer: Payload = Payload(b"done")
        self._tasks: list[asyncio.Task[None]] = []

    @by_task
    async def _answer(
        self, name: str, incarnation: int, envelope: Envelope, receive: Receive, send: Send
    ) -> Load:
        await self.go.wait()
        await send({"type": "call.result", "payload": self.answer})
        return Load()

    async def _dial(self, worker: str) -> Transport:
        if not self.is_reachable:
            raise self.error
        if self.dial_s is not None:
            return await self._dial_directly(worker)
        transport = self._connected()
        transport.is_relayed = True
        return transport

    async def _dial_directly(self, worker: str) -> Transport:
        self.dials.append((worker, asyncio.get_running_loop().time()))
        if self.dial_s is None:
            raise OSError("nothing answers")
        await asyncio.sleep(self.dial_s)
        return self._connected()

    def _connected(self) -> Transport:
        def at_once(handler: Callable[[Any], None], message: Any) -> None:
            handler(message)

        near, far = connect(("program", at_once), (WORKER, at_once), lambda: 0.0)
        self._tasks.append(asyncio.create_task(self.far.serve(far)))
        return near

    def request(self, got: list[Message] | None = None) -> asyncio.Task[Load]:
        async def keep(message: Message) -> None:
            if got is not None:
                got.append(message)

        envelope = Envelope(EnvelopeKind.CALL, {}, has_body=False, call=Leaves())
        return asyncio.create_task(self.pool.request(ACTOR, envelope).respond(nothing_to_receive, keep))

    async def lose_connection(self) -> None:
        for channel in list(self.far._serving):
            channel.close()
        await asyncio.sleep(1)

    def counts(self) -> dict[str, Any]:
        return {name: value for name, _, value in self.pool.samples()}

    async def close(self) -> None:
        await self.pool.close()
        await self.far.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
@asynccontextmanager
async def network() -> AsyncIterator[Network]:
    network = Network()
    try:
        yield network
    finally:
        await network.close()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_a_worker_that_does_not_answer_the_dial_at_once_is_reported_and_dialled_on(
    network: Network,
) -> None:
    network.dial_s = 3.0
    with pytest.raises(ActorLostError, match=r"not answer within 0\.25 s") as caught:
        await network.pool.connect(WORKER, 0.25)
    assert (caught.value.begun, caught.value.is_disconnected) == (False, True)
    assert network.received == [Reachability.NONE]
    await network.pool.connect(WORKER)
    assert network.received == [Reachability.NONE, Reachability.DIRECT]
    assert network.dials == [(WORKER, 0.0)]
    assert network.pool.route_to(WORKER) is Reachability.DIRECT


async def test_a_lost_connection_is_reported(network: Network) -> None:
    request = network.request()
    await asyncio.sleep(1)
    network.far.abort()
    with pytest.raises(ActorLostError, match="was lost"):
        await request
    assert network.received == [Reachability.DIRECT, Reachability.NONE]
    assert network.pool.route_to(WORKER) is None


async def test_breaking_off_fails_what_is_under_way(network: Network) -> None:
    request = network.request()
    await asyncio.sleep(1)
    network.pool.break_off(WORKER)
    with pytest.raises(ActorLostError) as caught:
        await request
    assert caught.value.begun, "user code may have seen it"
    assert network.received[-1] is Reachability.NONE


async def test_a_direct_channel_is_tried_again_with_growing_pauses_and_replaces_the_relayed_one(
    network: Network,
) -> None:
    network.dial_s = None
    request = network.request()
    await asyncio.sleep(24)
    assert network.received == [Reachability.SCHEDULER]
    assert list(network.pool.relayed) == [WORKER]
    assert [at for _, at in network.dials] == [1, 3, 7, 15, 23]
    network.dial_s = 0.0
    await asyncio.sleep(8)
    assert network.received == [Reachability.SCHEDULER, Reachability.DIRECT]
    assert network.pool.route_to(WORKER) is Reachability.DIRECT
    assert not list(network.pool.relayed)
    # Requests in flight end on the connection through the scheduler, which is then closed.
    assert ("channels", (), 2) in network.pool.samples()
    network.go.set()
    await request
    await asyncio.sleep(2 * RETIRED_S)
    assert ("channels", (), 1) in network.pool.samples()


async def test_a_relayed_channel_stays_as_long_as_the_worker_keeps_a_result_for_it(network: Network) -> None:
    network.dial_s = None
    network.answer = Payload(b"", (bytes(KEPT_BYTES),))
    network.go.set()
    got: list[Message] = []
    await network.request(got)
    assert isinstance(got[0]["payload"], KeptPayload)
    network.dial_s = 0.0
    await asyncio.sleep(10)
    assert ("channels", (), 2) in network.pool.samples()
    got.clear()
    await asyncio.sleep(2 * RETIRED_S)
    assert ("channels", (), 1) in network.pool.samples()


async def test_a_worker_that_left_is_not_dialled_again(network: Network) -> None:
    network.dial_s = None
    await network.pool.connect(WORKER)
    network.pool.drop(WORKER)
    await asyncio.sleep(60)
    assert network.dials == []
    assert network.received == [Reachability.SCHEDULER]


async def hang(*_: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("turns", [None, 0, 1, 2])
async def test_a_request_cancelled_while_its_connection_closes_raises_cancelled(turns: int | None) -> None:
    pool = ChannelPool(cast(Any, hang), hang)
    request = pool.request(ACTOR, Envelope(EnvelopeKind.CALL, {})).respond(cast(Any, hang), cast(Any, hang))
    requesting = asyncio.create_task(request)
    for _ in range(3):
        await asyncio.sleep(0)
    pool.abort()
    if turns is None:
        await asyncio.wait([requesting])
        assert isinstance(requesting.exception(), ActorLostError)
        return
    for _ in range(turns):
        await asyncio.sleep(0)
    assert requesting.cancel()
    await asyncio.wait([requesting])
    assert requesting.cancelled()


# ---- metrics


async def test_connections_reconnections_and_bytes_are_counted(network: Network) -> None:
    network.go.set()
    network.answer = Payload(b"x" * 1000)
    for _ in range(2):
        await network.request()
    first = network.counts()
    assert first["channel_received_bytes"] > 2000 > first["channel_sent_bytes"] > 0
    assert (first["channels"], first["channel_connections"], first["channel_reconnects"]) == (1, 1, 0)
    await network.lose_connection()
    assert network.counts()["channels"] == 0
    for _ in range(2):
        await network.request()
    second = network.counts()
    assert second["channel_received_bytes"] == 2 * first["channel_received_bytes"]
    assert second["channel_sent_bytes"] == 2 * first["channel_sent_bytes"]
    assert (second["channels"], second["channel_connections"], second["channel_reconnects"]) == (1, 2, 1)
    network.pool.drop(WORKER)  # the worker left; a later worker at this address is a different one
    await asyncio.sleep(1)
    await network.request()
    assert network.counts()["channel_reconnects"] == 1


@pytest.mark.parametrize("error", [OSError("nothing listens there"), ValueError("unknown scheme ucx")])
async def test_failed_dials_are_counted(error: Exception, network: Network) -> None:
    """A program may lack the protocol of a worker's address."""
    network.is_reachable, network.error = False, error
    with pytest.raises(ActorLostError):
        await network.request()
    assert (network.counts()["channel_dial_failures"], network.counts()["channel_connections"]) == (1, 0)
