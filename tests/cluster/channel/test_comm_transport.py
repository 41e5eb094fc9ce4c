"""Channels over Dask comms: in one process (``LocalCluster(processes=False)``), and through sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed.comm import connect, listen

from daskserve.cluster.channel.connect.comm_transport import CommTransport
from daskserve.cluster.channel.wire.frames import OutOfBand
from daskserve.testing import wait_until


@pytest.mark.parametrize("protocol", ["inproc", "tcp"])
@pytest.mark.parametrize("size", [5, 1 << 16])
async def test_buffers_arrive_as_copies_without_a_wrapper(size: int, protocol: str) -> None:
    accepted: asyncio.Queue[Any] = asyncio.Queue()
    listener = await listen(f"{protocol}://", accepted.put)
    here = CommTransport(await connect(listener.contact_address))
    there = CommTransport(await accepted.get())
    received: list[Any] = []
    refused: list[Any] = []
    tasks = [
        asyncio.create_task(here.run(received.extend, lambda frame, error: refused.append(frame))),
        asyncio.create_task(there.run(received.extend, lambda frame, error: None)),
    ]
    data = bytearray(size)
    here.post({"body": OutOfBand(bytes(data)), "buffers": (OutOfBand(memoryview(data)),)})
    here.post(unsendable := object())
    here.post("last")
    await wait_until(lambda: received and received[-1] == "last")
    found = received[0]
    data[0] = 1
    assert bytes(found["body"]) == bytes(found["buffers"][0]) == bytes(size)
    # Over a socket, Dask pickles what it does not know.
    assert refused == ([unsendable] if protocol == "inproc" else [])
    here.abort()
    await asyncio.gather(*tasks)
    listener.stop()
