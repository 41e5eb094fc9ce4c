"""Metrics of a process's channels: connections, reconnections, bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from by_task import by_task

from daskserve.cluster.channel.channel import Channel
from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.channel.wire.transport import SocketTransport, Transport
from daskserve.common.types import ActorAddress, Envelope, EnvelopeKind, Load, Message, Receive, Send
from daskserve.errors import ActorLostError

ADDRESS = ActorAddress("a", "tcp://there", 1)


class There:
    """The other side of every dialled connection."""

    def __init__(self) -> None:
        self.is_reachable = True
        self.channels: list[Channel] = []
        self._tasks: list[asyncio.Task[None]] = []

    @by_task
    async def dispatch(
        self, name: str, incarnation: int, envelope: Envelope, receive: Receive, send: Send
    ) -> Load:
        await send({"type": "control.result", "value": "x" * 1000})
        return Load()

    async def connect(self, worker: str) -> Transport:
        if not self.is_reachable:
            raise OSError("nothing listens there")
        here, there = socket.socketpair()
        for each in (here, there):
            each.setblocking(False)
        channel = Channel(SocketTransport(there, "here"), self.dispatch, first_stream=1)
        self.channels.append(channel)
        self._tasks.append(asyncio.create_task(channel.serve()))
        return SocketTransport(here, worker)

    async def close(self) -> None:
        for channel in self.channels:
            channel.close()
        await asyncio.gather(*self._tasks)


def play(scenario: Callable[[There, ChannelPool], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        there = There()
        pool = ChannelPool(there.dispatch, there.connect)
        try:
            async with asyncio.timeout(10):
                await scenario(there, pool)
        finally:
            await pool.close()
            await there.close()

    asyncio.run(main())


async def ask(pool: ChannelPool) -> None:
    async def receive() -> Message:
        raise AssertionError

    async def drop(message: Message) -> None:
        pass

    await pool.request(ADDRESS, Envelope(EnvelopeKind.CONTROL, {"verb": "v"})).respond(receive, drop)


def counts(pool: ChannelPool) -> dict[str, Any]:
    return {name: value for name, _, value in pool.samples()}


async def lose_connection(there: There, pool: ChannelPool) -> None:
    there.channels[-1].close()
    while counts(pool)["channels"]:  # noqa: ASYNC110 - the event loop has to notice
        await asyncio.sleep(0.001)


def test_bytes_are_counted_in_both_directions_over_all_connections() -> None:
    async def scenario(there: There, pool: ChannelPool) -> None:
        await ask(pool)
        first = counts(pool)
        assert first["channel_received_bytes"] > 1000 > first["channel_sent_bytes"] > 0
        await lose_connection(there, pool)
        await ask(pool)
        second = counts(pool)
        for name in ("channel_received_bytes", "channel_sent_bytes"):
            assert second[name] == 2 * first[name]

    play(scenario)


def test_replacing_a_broken_connection_counts_as_a_reconnection() -> None:
    async def scenario(there: There, pool: ChannelPool) -> None:
        await ask(pool)
        await ask(pool)
        found = counts(pool)
        assert (found["channels"], found["channel_connections"], found["channel_reconnects"]) == (1, 1, 0)
        await lose_connection(there, pool)
        await ask(pool)
        found = counts(pool)
        assert (found["channels"], found["channel_connections"], found["channel_reconnects"]) == (1, 2, 1)
        pool.drop(ADDRESS.worker)  # the worker left; a later worker at this address is a different one
        while counts(pool)["channels"]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await ask(pool)
        assert counts(pool)["channel_reconnects"] == 1

    play(scenario)


def test_failed_dials_are_counted() -> None:
    async def scenario(there: There, pool: ChannelPool) -> None:
        there.is_reachable = False
        with pytest.raises(ActorLostError):
            await ask(pool)
        found = counts(pool)
        assert (found["channel_dial_failures"], found["channel_connections"]) == (1, 0)

    play(scenario)
