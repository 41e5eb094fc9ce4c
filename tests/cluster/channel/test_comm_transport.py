"""Channels between two workers of one process: ``LocalCluster(processes=False)``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed.comm import connect, listen
from distributed.protocol import to_serialize

from daskserve.cluster.channel.transport import CommTransport
from daskserve.testing import wait_until


@pytest.mark.parametrize("size", [5, 1 << 16])
def test_buffers_arrive_as_copies_without_dasks_wrapper(size: int) -> None:
    async def main() -> None:
        accepted: asyncio.Queue[Any] = asyncio.Queue()
        listener = await listen("inproc://", accepted.put)
        here = CommTransport(await connect(listener.contact_address))
        there = CommTransport(await accepted.get())
        received: list[Any] = []
        refused: list[Any] = []
        tasks = [
            asyncio.create_task(here.run(received.extend, lambda frame, error: refused.append(frame))),
            asyncio.create_task(there.run(received.extend, lambda frame, error: None)),
        ]
        data = bytearray(size)
        here.post({"body": to_serialize(bytes(data)), "buffers": (to_serialize(memoryview(data)),)})
        here.post(unsendable := object())
        here.post("last")
        await wait_until(lambda: received and received[-1] == "last")
        found = received[0]
        data[0] = 1
        assert bytes(found["body"]) == bytes(found["buffers"][0]) == bytes(size)
        assert refused == [unsendable]
        here.abort()
        await asyncio.gather(*tasks)
        listener.stop()

    asyncio.run(main())
