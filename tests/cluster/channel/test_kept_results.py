"""Large answers that stay on the answering side of a channel until the other side requests them."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from daskserve.cluster.channel.channel import Channel
from daskserve.cluster.channel.kept_results import KeptResults
from daskserve.cluster.channel.wire.transport import SocketTransport
from daskserve.common.types import (
    KEPT_BYTES,
    ActorAddress,
    ActorRequest,
    Envelope,
    EnvelopeKind,
    KeptPayload,
    Load,
    Message,
    OnAnswer,
    Payload,
    QueueTimeout,
    Receive,
    Send,
    nothing_to_receive,
)
from daskserve.errors import UnavailableError
from daskserve.testing import wait_until

ADDRESS = ActorAddress("a", "there", 1)
LARGE = Payload(bytes(KEPT_BYTES))
ANSWER: Message = {"type": "call.result", "payload": LARGE}


class Call:
    """A call whose caller reads its answer, or leaves it."""

    def __init__(self, *, leaves_value: bool) -> None:
        self.leaves_value = leaves_value
        self.payload: Any = None
        self.load: Load | None = None

    def envelope(self, *, needs_task: bool) -> Envelope:
        queue_timeout = QueueTimeout(1.0) if needs_task else None
        return Envelope(EnvelopeKind.CALL, {}, Payload(b""), queue_timeout=queue_timeout, call=self)

    async def send(self, message: Message) -> None:
        self.payload = message["payload"]

    def end(self, message: Message | None, outcome: Any) -> None:
        assert message is not None
        self.payload, self.load = message["payload"], outcome

    async def make(self, channel: Channel, *, needs_task: bool) -> None:
        """Make the call, either with a task at both ends or without tasks."""
        envelope = self.envelope(needs_task=needs_task)
        if needs_task:
            self.load = await channel.request(ADDRESS, envelope).respond(nothing_to_receive, self.send)
        else:
            channel.request(ADDRESS, envelope).start(self.end)
            await wait_until(lambda: self.load)


class LargeRequest:
    """A request with a large answer."""

    async def respond(self, receive: Receive, send: Send) -> Load:
        await send(ANSWER)
        return Load(1, 2)

    def start(self, on_answer: OnAnswer) -> Callable[[], None]:
        asyncio.get_running_loop().call_soon(on_answer, ANSWER, Load(1, 2))
        return lambda: None


def dispatch(name: str, incarnation: int, envelope: Envelope) -> ActorRequest:
    return LargeRequest()


@pytest.fixture
def kept() -> KeptResults:
    return KeptResults("there")


@pytest.fixture
@asynccontextmanager
async def channels(kept: KeptResults) -> AsyncIterator[tuple[Channel, Channel]]:
    ends = [SocketTransport(each, "there") for each in socket.socketpair()]
    here = Channel(ends[0], dispatch, first_stream=0)
    there = Channel(ends[1], dispatch, first_stream=1, kept=kept)
    async with asyncio.TaskGroup() as tasks:
        for each in (here, there):
            tasks.create_task(each.serve())
        yield here, there
        here.close()
        there.close()
    assert len(kept) == 0
    assert not there._offered


paths = pytest.mark.parametrize("needs_task", [True, False], ids=["task", "taskless"])


@paths
async def test_a_large_answer_comes_when_its_caller_reads_it(
    needs_task: bool, channels: tuple[Channel, Channel], kept: KeptResults
) -> None:
    here, _ = channels
    call = Call(leaves_value=False)
    await call.make(here, needs_task=needs_task)
    assert call.payload.nbytes == KEPT_BYTES
    assert type(call.payload) is Payload
    assert call.load == Load(1, 2)
    assert len(kept) == 0


@paths
async def test_a_large_answer_stays_until_its_caller_drops_it(
    needs_task: bool, channels: tuple[Channel, Channel], kept: KeptResults
) -> None:
    here, _ = channels
    call = Call(leaves_value=True)
    await call.make(here, needs_task=needs_task)
    assert type(call.payload) is KeptPayload
    assert (call.payload.worker, call.payload.nbytes) == ("there", KEPT_BYTES)
    assert call.load == Load(1, 2)
    token = call.payload.token
    assert kept.find(token) is LARGE
    call.payload = None
    gc.collect()
    await wait_until(lambda: len(kept) == 0)
    with pytest.raises(UnavailableError, match="no longer has a result to fetch"):
        kept.find(token)


@paths
async def test_a_large_answer_is_dropped_with_the_connection_of_its_caller(
    needs_task: bool, channels: tuple[Channel, Channel], kept: KeptResults
) -> None:
    here, there = channels
    call = Call(leaves_value=True)
    await call.make(here, needs_task=needs_task)
    assert len(kept) == 1
    here.close()
    await wait_until(lambda: there.is_closed)
    assert len(kept) == 0
    call.payload = None  # the connection is closed: nothing to do


async def test_an_answer_that_is_offered_after_its_caller_left_is_dropped(
    channels: tuple[Channel, Channel], kept: KeptResults
) -> None:
    here, _ = channels
    here._receive_frame = lambda frame: None  # type: ignore[method-assign]
    envelope = Call(leaves_value=True).envelope(needs_task=False)
    give_up = here.request(ADDRESS, envelope).start(lambda *_: None)
    await wait_until(lambda: len(kept) == 1)  # the offer is on its way
    give_up()
    await wait_until(lambda: len(kept) == 0)
