"""Ray Serve's handle, from one replica to another. Each line on standard input starts one measurement.

It prints the calls per second with 64 in flight, and the seconds of a single call.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve

CALLS = 300
IN_FLIGHT = 64


@serve.deployment(num_replicas=1, max_ongoing_requests=100)
class Echo:
    async def __call__(self, value: Any) -> Any:
        return value


@serve.deployment(num_replicas=1, max_ongoing_requests=100)
class Caller:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def _call(self, count: int, took: list[float]) -> None:
        for _ in range(count):
            began = time.perf_counter()
            await self._handle.remote(bytes(100))
            took.append(time.perf_counter() - began)

    async def measure(self) -> tuple[float, float]:
        await self._call(CALLS // 10, [])
        alone: list[float] = []
        await self._call(CALLS, alone)
        began = time.perf_counter()
        await asyncio.gather(*[self._call(CALLS // 16, []) for _ in range(IN_FLIGHT)])
        rate = IN_FLIGHT * (CALLS // 16) / (time.perf_counter() - began)
        return rate, statistics.median(alone)


def main() -> None:
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    handle = serve.run(Caller.bind(Echo.bind()), route_prefix=None)
    print("ready", flush=True)
    for _ in sys.stdin:
        rate, alone_s = handle.measure.remote().result()
        print(rate, alone_s, flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
