"""Many concurrent streams of small chunks over one hop, compared with a bare Tornado server.

200 connections each send a request with a different query at the same time. Each answer is an async generator
of 100 numbered chunks of 64 bytes, so that the client detects missing or reordered chunks. Measured: the time
from the first request to the last byte of the last stream. Case and floor take turns, and the ratio is the
median of the ratios.

Run: ``python benchmarks/bench_streams.py [--runs N] [--streams N] [--chunks N] [--bytes N] [--hops N]``.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

from http_load import end_on_sigterm, floor, served

from daskserve.loops.event_loop import new_event_loop

END = b"0\r\n\r\n"


def make_stream(count: int, size_bytes: int) -> Any:
    """Return the served function."""

    async def stream(request: Any) -> Any:
        for number in range(count):
            yield b"%08d" % number + bytes(size_bytes - 8)

    return stream


class Reader(asyncio.Protocol):
    """Sends one request and keeps the bytes of the answer, which are checked after the measurement."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.data = bytearray()
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def begin(self) -> None:
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.data.endswith(END) and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError(f"the stream was cut: {bytes(self.data[-200:])!r}"))


def check(data: bytes, count: int, size_bytes: int) -> None:
    """Check that a stream is complete and in order."""
    head, _, rest = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"unexpected answer: {data[:200]!r}")
    body = bytearray()
    while rest != END:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        rest = rest[length + 2 :]
    numbers = [int(body[at : at + 8]) for at in range(0, len(body), size_bytes)]
    if numbers != list(range(count)) or len(body) != count * size_bytes:
        raise RuntimeError(f"a stream is not whole, or out of order: {numbers}")


async def once(url: str, streams: int, count: int, size_bytes: int) -> float:
    """Return the seconds until all concurrent streams are received."""
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    loop = asyncio.get_running_loop()
    readers = []
    for number in range(streams):
        request = f"GET {place.path}?n={number} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode()
        _, reader = await loop.create_connection(partial(Reader, request), place.hostname, place.port)
        readers.append(reader)
    began = time.perf_counter()
    for reader in readers:
        reader.begin()
    await asyncio.gather(*[reader.ended for reader in readers])
    taken_s = time.perf_counter() - began
    for reader in readers:
        reader.transport.abort()
        check(bytes(reader.data), count, size_bytes)
    return taken_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--bytes", type=int, default=64)
    parser.add_argument("--hops", type=int, choices=(0, 1), default=1)
    given = parser.parse_args()
    end_on_sigterm()
    config = {"max_ongoing_requests": given.streams}
    function = make_stream(given.chunks, given.bytes)
    ratios, cases, floors, cpu_us, cpu_ratios = [], [], [], [], []
    with (
        served(1 + given.hops, config, function) as us,
        floor("floor_streams", given.chunks, given.bytes) as bottom,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        for number in range(given.runs + 1):
            before_s = [each.cpu_s() for each in (us, bottom)]
            case_s, floor_s = (
                runner.run(once(each.url, given.streams, given.chunks, given.bytes)) for each in (us, bottom)
            )
            cpu_s = [each.cpu_s() - before for each, before in zip((us, bottom), before_s, strict=True)]
            if number:  # the first run is a warm-up
                cases.append(case_s)
                floors.append(floor_s)
                ratios.append(case_s / floor_s)
                cpu_us.append(cpu_s[0] / given.streams * 1e6)
                cpu_ratios.append(cpu_s[0] / cpu_s[1])
    print(
        f"{given.streams} streams x {given.chunks} chunks of {given.bytes} bytes, {given.hops} hops: "
        f"{statistics.median(cases) * 1e3:.0f} ms   floor {statistics.median(floors) * 1e3:.0f} ms   "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})   "
        f"CPU per stream {statistics.median(cpu_us):.0f} µs, {statistics.median(cpu_ratios):.2f} x"
    )


if __name__ == "__main__":
    main()
