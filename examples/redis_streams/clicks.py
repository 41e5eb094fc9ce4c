"""A deployment that reads a Redis stream: each click is counted once, whatever replica fails.

Start a Redis server, run ``python clicks.py``, and add clicks: ``redis-cli xadd clicks '*' page home``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import redis.asyncio as redis

import daskserve as serve

URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")
STREAM, GROUP = "clicks", "counters"
#: A message that a consumer has not acknowledged for this time goes to another consumer.
CLAIM_MS = 5000


async def messages(client: Any, consumer: str) -> AsyncIterator[serve.tasks.SourceItem]:
    """Yield the messages of the stream: first those of consumers that were lost, then new ones."""
    try:
        await client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):  # another replica was quicker
            raise
    while True:
        _, lost, *_ = await client.xautoclaim(STREAM, GROUP, consumer, CLAIM_MS, count=10)
        new = await client.xreadgroup(GROUP, consumer, {STREAM: ">"}, count=10, block=500)
        for key, fields in [*lost, *(new[0][1] if new else [])]:
            yield serve.tasks.SourceItem((key, fields), ack=partial(client.xack, STREAM, GROUP, key))


class Clicks:
    """Counts clicks by page."""

    def __init__(self) -> None:
        self.client: Any = redis.from_url(URL, decode_responses=True)

    @serve.tasks.source("count", max_in_flight=20)
    async def clicks(self) -> AsyncIterator[serve.tasks.SourceItem]:
        async for item in messages(self.client, str(serve.get_replica_context().replica_id)):
            yield item

    async def count(self, message: tuple[str, dict[str, str]]) -> None:
        """Count a click, unless its key was counted before its acknowledgement was lost."""
        key, fields = message
        if await self.client.set(f"counted:{key}", 1, nx=True, ex=3600):
            await self.client.hincrby("pages", fields["page"], 1)

    async def __call__(self) -> dict[str, int]:
        return {page: int(count) for page, count in (await self.client.hgetall("pages")).items()}

    async def __del__(self) -> None:
        await self.client.aclose()


app = serve.deployment(num_replicas=2)(Clicks).bind()

if __name__ == "__main__":
    serve.run(app, route_prefix="/pages", blocking=True)
