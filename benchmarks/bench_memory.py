"""Memory of the processes that serve, before and after many requests of which a fifth is cancelled.

The load comes from one process over plain sockets: 32 connections, of which a fifth of the requests end by a
reset at a random moment: within the head, within the body of an upload, before the answer or within it. The
requests that are not cancelled must be answered with 200. After a warm-up of a tenth as many requests (at
least 20,000) and again at the end, when all gauges are back at zero, each process's memory is taken (PSS, and
RSS as well), after a garbage collection; the growth must stay under 5 MiB.

1. one hop: the proxy in one worker, the replica in another.
2. zero hop: one worker with proxy and replica.

Linux only. Run: ``python benchmarks/bench_memory.py [--requests 1000000] [--case one|zero]``; prints a line per
process. Exits with 1 if one has grown too much.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import psutil
from bench_requests import served

from daskserve.loops import new_event_loop

MIB = 1 << 20
LIMIT_BYTES = 5 * MIB
CONNECTIONS = 32
BODY = bytes(2000)
#: The end of an answer in chunks, and of `answer_slowly`'s.
END = b"0\r\n\r\n"


async def answer(request: Any) -> Any:
    """Answer at once, or, for one request in four, a little later, in two parts."""
    if request.method == "POST":
        return str(len(await request.body()))
    if request.url.query != "slow":
        return "ok"

    async def parts() -> Any:
        await asyncio.sleep(0.002)
        yield b"one"
        await asyncio.sleep(0.002)
        yield b"two"

    return parts()


class Load:
    """So many requests over so many connections, a fifth of them cancelled."""

    def __init__(self, url: str, rng: random.Random) -> None:
        place = urlsplit(url)
        self._address = (place.hostname or "", place.port or 0)
        head = f"{place.path}{{}} HTTP/1.1\r\nHost: {place.netloc}\r\n"
        self._requests = (
            *[f"GET {head.format('')}\r\n".encode()] * 2,
            f"GET {head.format('?slow')}\r\n".encode(),
            f"POST {head.format('')}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY,
        )
        self._rng = rng
        self._left = 0
        self.cancelled = 0

    async def run(self, count: int) -> float:
        """Return the seconds that it took."""
        self._left = count
        began = time.perf_counter()
        await asyncio.gather(*[self._serve_connection() for _ in range(CONNECTIONS)])
        return time.perf_counter() - began

    async def _serve_connection(self) -> None:
        while self._left > 0:
            reader, writer = await asyncio.open_connection(*self._address)
            # Connections that end in good order, too, after a few hundred requests.
            for _ in range(500):
                if self._left <= 0:
                    break
                self._left -= 1
                request = self._rng.choice(self._requests)
                if self._rng.random() < 0.2:
                    await self._cancel(request, reader, writer)
                    break
                writer.write(request)
                await self._read_answer(reader)
            writer.close()

    async def _read_answer(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"not the answer that was wanted: {head!r}")
        if b"transfer-encoding: chunked" in head:
            await reader.readuntil(END)
        else:
            length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))

    async def _cancel(
        self, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.cancelled += 1
        moment = self._rng.randrange(4)
        if moment == 0:
            writer.write(request[: self._rng.randrange(1, len(request))])
        else:
            writer.write(request)
        if moment == 2:
            await asyncio.sleep(self._rng.random() * 0.005)
        elif moment == 3:
            await reader.read(self._rng.randrange(1, 200))
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


def memory(dask: Any, scheduler: psutil.Process) -> dict[str, tuple[int, int]]:
    """Return PSS and RSS of each process in bytes, after a garbage collection in the workers."""

    def collect() -> int:
        import gc
        import os

        gc.collect()
        return os.getpid()

    return {
        f"worker {place} (pid {pid})": _bytes_of(pid) for place, pid in sorted(dask.run(collect).items())
    } | {"scheduler and driver": _bytes_of(scheduler.pid)}


def _bytes_of(pid: int) -> tuple[int, int]:
    found = psutil.Process(pid).memory_full_info()
    return found.pss, found.rss


def main() -> None:
    print(os.getpid())


if __name__ == "__main__":
    main()
