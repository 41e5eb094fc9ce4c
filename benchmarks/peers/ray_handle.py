"""Ray Serve's handle. Each line on standard input starts one measurement.

After ``calls``, it prints the calls per second from one replica to another with 64 in flight, and the seconds
of a single call. After ``chain``, it prints the seconds of a call of one deployment, and of three in a chain.
After ``deploys``, it prints the seconds until applications of one deployment, of ten side by side and of ten
in a chain have answered. After ``arrays``, it prints the seconds of a call from this program with an array of
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
TEN = 10
#: How much of a core each replica of a chain takes: all of them have to fit.
CHAIN_OPTIONS = {"num_cpus": 0.01}


@serve.deployment(num_replicas=1, max_ongoing_requests=100)
class Echo:
    async def __call__(self, value: Any) -> Any:
        return value

    async def first(self, array: Any) -> float:
        return float(array[0])


@serve.deployment(num_replicas=1, max_ongoing_requests=100)
class Responder:
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


class Node:
    """Calls the next deployment of a chain; with several, it is deployed with them and calls none."""

    def __init__(self, *following: Any) -> None:
        self._following = following

    async def __call__(self, value: Any) -> Any:
        return value if len(self._following) != 1 else await self._following[0].remote(value)


def node(number: int, *following: Any) -> Any:
    made = serve.deployment(name=f"n{number}", num_replicas=1, ray_actor_options=CHAIN_OPTIONS)(Node)
    return made.bind(*following)


def chain(length: int) -> Any:
    bound = node(length - 1)
    for number in reversed(range(length - 1)):
        bound = node(number, bound)
    return bound


def run_chains() -> list[Any]:
    """Deploy one deployment, and three in a chain; return their handles."""
    lengths = {"alone": 1, "three": 3}
    return [serve.run(chain(count), name=name, route_prefix=None) for name, count in lengths.items()]


def median_call_s(handle: Any) -> float:
    took = []
    for _ in range(CALLS):
        began = time.perf_counter()
        handle.remote(bytes(100)).result()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def deploy_s(application: Any) -> float:
    """Return the seconds until an application has been deployed and its ingress has answered."""
    began = time.perf_counter()
    assert serve.run(application, name="graph", route_prefix=None).remote(b"1").result() == b"1"
    took = time.perf_counter() - began
    serve.delete("graph")
    return took


def deploys_s() -> list[float]:
    wide = node(0, *(node(number) for number in range(1, TEN)))
    return [deploy_s(each) for each in (chain(1), wide, chain(TEN))]


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
    # Logical: both deployments take one, and those of the chains a hundredth each.
    ray.init(num_cpus=3, log_to_driver=False, include_dashboard=False)
    handle = serve.run(Responder.bind(Echo.bind()), route_prefix=None)
    echo = serve.get_deployment_handle("Echo", "default")
    chains: list[Any] = []
    array = np.random.default_rng(0).random(LARGE_BYTES // 8)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "calls":
            print(*handle.measure.remote().result(), flush=True)
            continue
        if line.strip() == "chain":
            chains = chains or run_chains()
            print(*map(median_call_s, chains), flush=True)
            continue
        if line.strip() == "deploys":
            print(*deploys_s(), flush=True)
            continue
        one_way_s = large_calls(array, lambda array: echo.first.remote(array).result())
        back_s = large_calls(array, lambda array: float(echo.remote(array).result()[0]))
        print(one_way_s, back_s, flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
