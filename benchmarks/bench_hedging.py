"""The tail latency of a deployment with occasional slow requests, with and without hedged requests.

4 replicas take 20 ms for a request, and 300 ms for a random 3% of requests. 16 callers send a GET every 0.1 s
on average. Measured: percentiles of the response times, plain and hedged in turns, and the share of second
attempts.

Run: ``python benchmarks/bench_hedging.py [--runs N] [--seconds N]``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any
from urllib.parse import urlsplit

import daskserve as serve

QUICK_S, SLOW_S, SLOW_SHARE = 0.02, 0.3, 0.03
CALLERS, PER_S = 16, 10


class SometimesSlow:
    def __init__(self) -> None:
        self.rng = random.Random()
        self.requests = 0

    async def __call__(self, request: Any) -> str:
        self.requests += 1
        await asyncio.sleep(SLOW_S if self.rng.random() < SLOW_SHARE else QUICK_S)
        return "ok"

    async def count(self) -> int:
        return self.requests


async def call(url: str, rng: random.Random, until: float, took: list[float]) -> None:
    """Send requests over one connection until a time; record how many milliseconds each took."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    while time.perf_counter() < until:
        await asyncio.sleep(rng.expovariate(PER_S))
        began = time.perf_counter()
        writer.write(f"GET / HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(2)
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(f"unexpected answer: {head!r} {body!r}")
        took.append((time.perf_counter() - began) * 1e3)
    writer.close()


async def load(url: str, seconds: float) -> list[float]:
    """Return the milliseconds of all requests of the callers, sorted."""
    rng, took = random.Random(1), list[float]()
    until = time.perf_counter() + seconds
    await asyncio.gather(*(call(url, rng, until, took) for _ in range(CALLERS)))
    return sorted(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0)
    given = parser.parse_args()
    client = serve.start(http_options={"port": 0})
    deployment: Any = serve.deployment(num_replicas=4, max_ongoing_requests=20)(SometimesSlow)
    for _ in range(given.runs):
        for name, config in (("plain", None), ("hedged", {"quantile": 0.95, "budget": 0.05})):
            handle = serve.run(deployment.options(hedging_config=config).bind(), route_prefix="/")
            url = client.http_urls()[0]
            asyncio.run(load(url, 3.0))  # the hedging delay is a percentile, which has to be known first
            before = sum(handle.broadcast("count").results(10))
            took = asyncio.run(load(url, given.seconds))
            tries = sum(handle.broadcast("count").results(10)) - before
            p50, p95, p99 = (took[int(len(took) * share)] for share in (0.5, 0.95, 0.99))
            print(
                f"{name:7} p50 {p50:5.1f} ms, p95 {p95:5.1f}, p99 {p99:5.1f}, "
                f"{tries / len(took) - 1:6.3f} second tries a request",
                flush=True,
            )
    serve.shutdown()


if __name__ == "__main__":
    main()
