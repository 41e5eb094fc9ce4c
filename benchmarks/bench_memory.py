"""Memory of the serving processes before and after many requests, a fifth of which are cancelled.

One process sends the load over plain sockets: 32 connections, whose requests differ in query, headers and
body. A fifth of them end by a reset at a random moment: within the head, within the body of an upload, before
the answer or within it. All other requests must be answered with 200. Memory is measured after a warm-up of a
tenth of the requests (at least 20,000) and again at the end, when all gauges are zero, each time after a
garbage collection. The RSS of each process must grow by less than 5 MiB. PSS is reported too, but it depends
on other processes that use the same libraries.

1. one hop: the proxy in one worker, the replica in another.
2. zero hop: one worker with proxy and replica.

Linux only. Run: ``python benchmarks/bench_memory.py [--requests 1000000] [--case one|zero]``. It prints a
line per process and exits with 1 if a process grows too much.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import struct
import subprocess
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import psutil
from http_load import end_on_sigterm, served

from daskserve.cluster.worker.current import default_client
from daskserve.loops.event_loop import new_event_loop

MIB = 1 << 20
LIMIT_BYTES = 5 * MIB
CONNECTIONS = 32
BODY = bytes(2000)
#: The last bytes of a chunked answer.
END = b"0\r\n\r\n"


async def answer(request: Any) -> Any:
    """Answer at once; one request in four gets a delayed answer in two parts."""
    if request.method == "POST":
        return str(len(await request.body()))
    if not request.url.query.startswith("slow"):
        return "ok"

    async def parts() -> Any:
        await asyncio.sleep(0.002)
        yield b"one"
        await asyncio.sleep(0.002)
        yield b"two"

    return parts()


class Load:
    """A load over several connections that cancels a fifth of its requests."""

    def __init__(self, url: str, rng: random.Random) -> None:
        place = urlsplit(url)
        self._address = (place.hostname or "", place.port or 0)
        self._path = place.path
        self._host = place.netloc
        self._rng = rng
        self._left = 0
        self.cancelled = 0

    async def run(self, count: int) -> float:
        """Send ``count`` requests and return the seconds they took."""
        self._left = count
        began = time.perf_counter()
        await asyncio.gather(*[self._serve_connection() for _ in range(CONNECTIONS)])
        return time.perf_counter() - began

    async def _serve_connection(self) -> None:
        while self._left > 0:
            reader, writer = await asyncio.open_connection(*self._address)
            # Each connection is closed cleanly after a few hundred requests.
            for _ in range(500):
                if self._left <= 0:
                    break
                self._left -= 1
                request = self._next_request()
                if self._rng.random() < 0.2:
                    await self._cancel(request, reader, writer)
                    break
                writer.write(request)
                await self._read_answer(reader)
            writer.close()

    def _next_request(self) -> bytes:
        number = self._left
        kind = self._rng.randrange(4)
        query = f"{'slow' if kind == 2 else 'n'}={number}"
        lines = [f"Host: {self._host}", f"X-Client: {number:08x}"]
        if kind < 3:
            return "\r\n".join([f"GET {self._path}?{query} HTTP/1.1", *lines, "", ""]).encode()
        body = b"%08d" % number + BODY
        lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join([f"POST {self._path}?{query} HTTP/1.1", *lines, "", ""]).encode() + body

    async def _read_answer(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"unexpected answer: {head!r}")
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


async def gauges(dask_worker: Any) -> int:
    """Collect garbage on a worker and return the number of requests in flight there."""
    import gc

    from daskserve.cluster.worker.host import Host

    ongoing = 0
    for actor in dask_worker.state.actors.values():
        if isinstance(actor, Host):
            for entry in actor.registry.entries.values():
                metrics = await getattr(entry.actor, "statistics", lambda: _nothing())()
                ongoing += metrics.get("ongoing", 0) + metrics.get("queued", 0)
    gc.collect()
    return ongoing


async def _nothing() -> dict[str, int]:
    return {}


def settle(dask: Any) -> None:
    """Wait until no requests are in flight."""
    deadline = time.monotonic() + 30
    while found := {place: count for place, count in dask.run(gauges).items() if count}:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not every request has ended: {found}")
        time.sleep(0.1)


def memory() -> dict[str, tuple[int, int]]:
    """Return PSS and RSS in bytes of this process, which runs the scheduler, and of its children."""
    found = {}
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        usage = process.memory_full_info()
        if usage.uss > 20 * MIB:  # skip processes that only start others
            name = "scheduler" if process == this else "worker"
            found[f"{name} {process.pid}"] = (usage.pss, usage.rss)
    return found


def send(url: str, count: int, seed: int) -> str:
    """Send requests from a separate process and return its report."""
    command = [sys.executable, __file__, "--send-to", url, "--requests", str(count), "--seed", str(seed)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def change(before: int, after: int) -> str:
    return f"{before / MIB:6.1f} -> {after / MIB:6.1f} MiB ({(after - before) / MIB:+.1f})"


def measure(name: str, workers: int, requests: int) -> bool:
    """Print the change of memory; return whether it is within the limit."""
    is_small = True
    with served(workers, {}, answer) as us:
        dask = default_client()
        send(us.url, max(20_000, requests // 10), seed=1)
        settle(dask)
        before = memory()
        report = send(us.url, requests, seed=2)
        settle(dask)
        after = memory()
    print(f"{name}: {report}")
    for process, (pss, rss) in after.items():
        old_pss, old_rss = before.get(process, (0, 0))
        is_small = is_small and rss - old_rss < LIMIT_BYTES
        print(f"  {process:18} PSS {change(old_pss, pss)}   RSS {change(old_rss, rss)}", flush=True)
    return is_small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--case", choices=("one", "zero"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--send-to", help="only send requests to this address")
    given = parser.parse_args()
    end_on_sigterm()
    if given.send_to:
        load = Load(given.send_to, random.Random(given.seed))
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            taken_s = runner.run(load.run(given.requests))
        cancelled = load.cancelled / given.requests
        print(f"{given.requests} requests, {cancelled:.0%} cancelled, {given.requests / taken_s:.0f}/s")
        return
    cases = {"one": ("one hop", 2), "zero": ("zero hop", 1)}
    chosen = [given.case] if given.case else list(cases)
    results = [measure(*cases[each], given.requests) for each in chosen]
    if not all(results):
        sys.exit(f"a process has grown by {LIMIT_BYTES // MIB} MiB or more")


if __name__ == "__main__":
    main()
