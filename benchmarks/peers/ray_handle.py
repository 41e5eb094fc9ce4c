"""Ray Serve's handle. Each line on standard input starts one measurement.

After ``calls``, it prints the calls per second from one replica to another with 64 in flight, and the seconds
of a single call. After ``arrays``, it prints the seconds of a call from this program with an array of
100 MiB, one way, and there and back.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import ray
from ray import serve

CALLS = 300
IN_FLIGHT = 64
LARGE_BYTES = 100 * 1024 * 1024
LARGE_CALLS, LARGE_WARM_UPS = 15, 3


@serve.deployment(num_replicas=1, max_ongoing_requests=100)
class Echo:
    async def __call__(self, value: Any) -> Any:
        return value

    async def first(self, array: Any) -> float:
        return float(array[0])


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


def large_calls(array: Any, send: Callable[[Any], float]) -> float:
    took = []
    for number in range(LARGE_WARM_UPS + LARGE_CALLS):
        array[0] = number
        began = time.perf_counter()
        found = send(array)
        took.append(time.perf_counter() - began)
        assert found == number
    return statistics.median(took[LARGE_WARM_UPS:])


def main() -> None:
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    handle = serve.run(Caller.bind(Echo.bind()), route_prefix=None)
    echo = serve.get_deployment_handle("Echo", "default")
    array = np.random.default_rng(0).random(LARGE_BYTES // 8)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "calls":
            print(*handle.measure.remote().result(), flush=True)
            continue
        one_way_s = large_calls(array, lambda array: echo.first.remote(array).result())
        back_s = large_calls(array, lambda array: float(echo.remote(array).result()[0]))
        print(one_way_s, back_s, flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
