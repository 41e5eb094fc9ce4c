"""The floors of handle calls: bare connections between two processes, with an echo at the other end.

Without an argument, it listens, prints its address, and echoes data of channels and of bare Dask comms. With
that address as the argument, it measures the channel, and prints the median seconds of a single call and the
calls per second with 64 in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from functools import partial
from typing import Any

from distributed.comm import CommClosedError, listen
from distributed.protocol import to_serialize

from daskserve.cluster.channel.connect.dialling import dial_worker
from daskserve.cluster.channel.connect.keyring import ChannelSecret, Keyring
from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.protocols.base import TaskRequest
from daskserve.common.types import ActorAddress, Envelope, EnvelopeKind, Load, Message, Receive, Send
from daskserve.loops.event_loop import new_event_loop
from daskserve.payload.pickling import dump

CALLS = 3000
IN_FLIGHT = 64
PAYLOAD = bytes(100)


def open_pool() -> ChannelPool:
    """Return the channels of this process; both processes know one secret."""
    keyring = Keyring()
    keyring.add(ChannelSecret(bytes(32)))
    return ChannelPool(echo, partial(dial_worker, keyring=keyring), keyring=keyring)


def echo(name: str, incarnation: int, envelope: Envelope) -> TaskRequest:
    async def respond(receive: Receive, send: Send) -> Load:
        await send({"type": "call.result", "payload": envelope.payload})
        return Load()

    return TaskRequest(respond)


async def serve() -> None:
    pool = open_pool()

    async def accept(comm: Any) -> None:
        first = await comm.read()
        if first["op"] == "daskserve_channel":
            await pool.accept(comm)
        with contextlib.suppress(CommClosedError):
            while first["op"] == "array":
                await comm.write({"op": "array", "array": to_serialize(first["array"])})
                first = await comm.read()

    listener = await listen("tcp://127.0.0.1:0", accept)
    print(listener.contact_address, flush=True)
    await asyncio.Event().wait()


async def measure(address: str) -> None:
    pool = open_pool()
    actor = ActorAddress("echo", address, 1)
    envelope = Envelope(EnvelopeKind.CALL, {"method": "__call__"}, dump(((PAYLOAD,), {})))

    async def nothing() -> Message:
        raise AssertionError

    async def keep(message: Message) -> None:
        pass

    async def call(count: int, took: list[float]) -> None:
        for _ in range(count):
            began = time.perf_counter()
            await pool.request(actor, envelope).respond(nothing, keep)
            took.append(time.perf_counter() - began)

    await call(CALLS // 10, [])
    alone: list[float] = []
    await call(CALLS, alone)
    began = time.perf_counter()
    await asyncio.gather(*[call(CALLS // 8, []) for _ in range(IN_FLIGHT)])
    rate = IN_FLIGHT * (CALLS // 8) / (time.perf_counter() - began)
    print(json.dumps({"alone_s": statistics.median(alone), "rate": rate}))
    await pool.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(measure(sys.argv[1]) if len(sys.argv) > 1 else serve())
