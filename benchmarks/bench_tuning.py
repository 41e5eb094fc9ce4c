"""Batches with automatic size and wait, compared with fixed settings, in real time.

The model sleeps for 10 ms plus 0.5 ms per item, as if an accelerator computed it. Some clients call again as
soon as they have a response. Measured: responses per second and the 99th percentile of their latencies, after
two seconds of warm-up. The fixed settings form a grid. ``tests/data/batching/test_tuning.py`` has more loads,
in virtual time.

Run: ``python benchmarks/bench_tuning.py [--clients N] [--seconds N]``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from typing import Any

import daskserve as serve

WARM_S = 2.0
TARGET_S = 0.1


async def answer(items: list[int]) -> list[int]:
    await asyncio.sleep(0.01 + 0.0005 * len(items))
    return items


async def measure(predict: Any, clients: int, seconds: float) -> tuple[float, float]:
    """Return the responses per second, and the 99th percentile of their latencies."""
    began, latencies = time.perf_counter(), []

    async def client() -> None:
        while (sent := time.perf_counter()) < began + WARM_S + seconds:
            await predict(1)
            if sent > began + WARM_S:
                latencies.append(time.perf_counter() - sent)

    await asyncio.gather(*(client() for _ in range(clients)))
    latencies.sort()
    return len(latencies) / seconds, latencies[int(0.99 * len(latencies))]


async def compare(clients: int, seconds: float) -> None:
    rate, p99_s = await measure(serve.batch(latency_target_s=TARGET_S)(answer), clients, seconds)
    best, setting = 0.0, (0, 0.0)
    for size, wait_s in itertools.product((4, 8, 16, 32, 64), (0.0, 0.005, 0.02)):
        fixed = serve.batch(max_batch_size=size, batch_wait_timeout_s=wait_s)(answer)
        found, found_p99_s = await measure(fixed, clients, seconds)
        if found > best and found_p99_s <= max(TARGET_S, p99_s):
            best, setting = found, (size, wait_s)
    print(f"{clients} clients, without settings: {rate:.0f}/s, p99 {1000 * p99_s:.0f} ms")
    size, wait_s = setting
    print(
        f"the best setting, size {size}, wait {1000 * wait_s:.0f} ms: {best:.0f}/s; {rate / best:.2f} times"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    asyncio.run(compare(given.clients, given.seconds))


if __name__ == "__main__":
    main()
