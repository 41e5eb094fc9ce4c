"""A cancellation that arrives together with another end is not mistaken for that end."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.long_poll import LongPollClient
from daskserve.cluster.protocols.base import Cluster
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorAddress, Envelope, EnvelopeKind
from daskserve.errors import ActorLostError, UnavailableError

ADDRESS = ActorAddress("an-instance/replica/b#AAAAAA", "tcp://there", 1)


async def hang(*_: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("turns", [None, 0, 1, 2])
async def test_a_request_cancelled_while_its_connection_closes_raises_cancelled(turns: int | None) -> None:
    pool = ChannelPool(cast(Any, hang), hang)
    request = pool.request(ADDRESS, Envelope(EnvelopeKind.CALL, {})).respond(cast(Any, hang), cast(Any, hang))
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


class HidesCancellation:
    """A cluster whose calls turn cancellations into errors."""

    instance = "i"

    def __init__(self) -> None:
        self.asked = 0

    async def subscribe(self, handler: Any) -> Any:
        async def unsubscribe() -> None: ...

        return unsubscribe

    def forget_controller(self) -> None: ...

    async def controller(self) -> Any:
        self.asked += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise UnavailableError("the connection was closed") from None


async def test_listening_ends_even_if_its_cancellation_is_swallowed() -> None:
    cluster = HidesCancellation()
    listener = LongPollClient(cast(Cluster, cluster), LoopClock())
    await listener.start()
    listener.watch("routes", lambda value: None)
    async with asyncio.timeout(10):
        while not cluster.asked:  # noqa: ASYNC110 - the seam has no event for it
            await asyncio.sleep(0)
        (listening,) = asyncio.all_tasks() - {asyncio.current_task()}
        await listener.stop()
        await asyncio.wait([listening])
    assert cluster.asked == 1
