"""Streams and batches of Python calls between real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest
from clusters import worker_of
from dask_processes import ExternalCluster, poll_for

import daskserve as serve

MIB = 1 << 20


class Source:
    """Generators, with a record of their ends."""

    def __init__(self) -> None:
        self.made = 0
        self.notes: list[str] = []

    def __call__(self, request: Any) -> Any: ...

    def counts(self) -> tuple[int, list[str]]:
        return self.made, list(self.notes)

    def plain(self, count: int, size_bytes: int = 1) -> Iterator[Any]:
        try:
            for number in range(count):
                self.made += 1
                yield number, os.getpid(), bytes(size_bytes)
        finally:
            self.notes.append("plain")

    async def on_loop(self, count: int, size_bytes: int = 1) -> AsyncIterator[Any]:
        try:
            for number in range(count):
                self.made += 1
                yield number, os.getpid(), bytes(size_bytes)
        finally:
            self.notes.append("on_loop")

    async def broken(self) -> AsyncIterator[int]:
        yield 1
        raise ArithmeticError("in the middle")


class Relay:
    """Forwards a stream from one process to the next."""

    def __init__(self, inner: serve.Handle) -> None:
        self.inner = inner.options(stream=True)

    def __call__(self, request: Any) -> Any: ...

    def plain(self, count: int) -> Iterator[Any]:
        for item in self.inner.plain.remote(count):
            yield item[0], item[1] != os.getpid()

    async def on_loop(self, count: int) -> AsyncIterator[Any]:
        async for item in self.inner.on_loop.remote(count):
            yield item[0], item[1] != os.getpid()


def wait_for_ends(handle: serve.Handle, count: int) -> None:
    poll_for(
        lambda: len(handle.counts.remote().result(10)[1]) == count, 10, what=f"{count} generators closed"
    )


@pytest.mark.smoke
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_streams_cross_processes(client: serve.Client, isolation: str) -> None:
    """Complete, failing, closed early, and many concurrent streams."""
    client.deploy("source", Source, config={"isolation": isolation})
    handle = client.get_handle("source")
    streams = handle.options(stream=True)
    assert [item[0] for item in streams.plain.remote(300)] == list(range(300))

    async def scenario() -> None:
        async def collect(stream: serve.handle.ResponseGenerator) -> list[int]:
            return [item[0] async for item in stream]

        many = [each.remote(100) for each in (streams.plain, streams.on_loop) for _ in range(10)]
        assert await asyncio.gather(*map(collect, many)) == [list(range(100))] * 20
        async with contextlib.aclosing(streams.on_loop.remote(10**9)) as left:
            assert (await anext(left))[0] == 0

    asyncio.run(scenario())
    wait_for_ends(handle, 22)
    for item in streams.plain.remote(10**9):
        if item[0] == 10:
            break
    wait_for_ends(handle, 23)
    stream = streams.broken.remote()
    assert next(stream) == 1
    with pytest.raises(ArithmeticError, match="in the middle") as caught:
        next(stream)
    assert "in broken" in str(caught.value.__cause__)


def test_a_slow_caller_blocks_the_generator(client: serve.Client, external: ExternalCluster) -> None:
    """A gigabyte is not generated ahead of the caller, and the memory of both processes stays bounded."""
    client.deploy("source", Source)
    handle = client.get_handle("source")
    processes = [psutil.Process(pid) for pid in (os.getpid(), *external.client.run(os.getpid).values())]
    before = [each.memory_info().rss for each in processes]
    for method in ("plain", "on_loop"):
        made = handle.counts.remote().result(10)[0]
        stream = handle.options(stream=True, method_name=method).remote(10_000, 100_000)
        assert next(stream)[0] == 0
        settled = -1
        while (now := handle.counts.remote().result(10)[0]) != settled:
            settled = now
            time.sleep(0.1)
        assert settled - made < 100
        assert [next(stream)[0] for _ in range(200)] == list(range(1, 201))
        stream.close()
    after = [each.memory_info().rss for each in processes]
    assert all(now - then < 64 * MIB for now, then in zip(after, before, strict=True))


def test_a_replica_streams_from_another(client: serve.Client, external: ExternalCluster) -> None:
    client.deploy("source", Source)
    there = worker_of(client, "replica")
    apart = [each for each in external.client.run(os.getpid) if each != there]
    for event_loop in ("own", "worker"):
        client.deploy(
            f"relay-{event_loop}",
            Relay,
            client.get_handle("source"),
            config={"event_loop": event_loop},
            actor_options={"workers": apart},
        )
        handle = client.get_handle(f"relay-{event_loop}").options(stream=True)
        for method in ("plain", "on_loop"):
            stream = handle.options(method_name=method).remote(200)
            assert list(stream) == [(number, True) for number in range(200)]
