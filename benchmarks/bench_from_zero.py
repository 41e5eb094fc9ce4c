"""Scaling from zero: the time of the first answers beyond the constructor, and a load that rises and falls.

1. A backend at zero replicas whose constructor takes 0.5 s gets one request, then 50 at once. Measured: the
   time until the first answer and until the last of the 50, minus the 0.5 s.
2. ``wrk`` with 16 connections, starting at zero replicas. Every request must be answered with 200, and the
   backend must scale back to zero afterwards.

Needs ``wrk``. Run: ``python benchmarks/bench_from_zero.py [--runs N]``.
"""

from __future__ import annotations

import argparse
import statistics
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from http_load import System, end_on_sigterm, need_wrk, wrk

import daskserve as serve
from daskserve.cluster.dask.launch import start_local_cluster
from daskserve.common.settings import LocalClusterSize

START_S = 0.5
DEADLINE_S = 60.0
SCALING = {
    "min_replicas": 0,
    "max_replicas": 4,
    "target_ongoing_requests": 4,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 2.0,
    "look_back_period_s": 2.0,
}


class Slow:
    """A backend with a slow constructor and fast answers."""

    def __init__(self) -> None:
        time.sleep(START_S)

    def __call__(self, request: Any) -> str:
        time.sleep(0.005)
        return "ok"


def fetch(url: str, number: int) -> float:
    """Return the time of the answer to request ``number``, which must be a 200."""
    with urllib.request.urlopen(f"{url}?n={number}", timeout=DEADLINE_S) as answer:
        assert answer.status == 200
        answer.read()
    return time.perf_counter()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def measure(client: serve.Client, url: str, runs: int) -> None:
    alone: list[float] = []
    last: list[float] = []

    def is_at_zero() -> bool:
        return not client.status().replicas("slow")

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(lambda _: time.sleep(0.01), range(50)))  # starts all threads
        for _ in range(runs):
            wait_for(is_at_zero)
            began = time.perf_counter()
            alone.append(fetch(url, 50) - began - START_S)
            wait_for(is_at_zero)
            began = time.perf_counter()
            last.append(max(pool.map(fetch, [url] * 50, range(50))) - began - START_S)
    for name, found in (("one request", alone), ("the last of 50", last)):
        print(
            f"{name:16} {statistics.median(found) * 1000:4.0f} ms beyond the constructor "
            f"({min(found) * 1000:.0f} to {max(found) * 1000:.0f})",
            flush=True,
        )
    wait_for(is_at_zero)
    result = wrk(System(url, ()), connections=16, seconds=8)  # raises if a request is not answered with 200
    most = max(event.after for event in client.explain("slow").events)
    wait_for(is_at_zero)
    print(f"wrk: {result.rate:.0f}/s, all answered with 200, from 0 to {most} replicas and back to 0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    end_on_sigterm()
    need_wrk()
    cluster, dask = start_local_cluster(LocalClusterSize(2, 2), has_dashboard=False)
    try:
        with serve.start(http_options={"port": 0}, dask_client=dask) as client:
            client.create_backend("slow", Slow, config={"autoscaling_config": SCALING})
            client.create_endpoint("slow", backend="slow", route="/slow")
            measure(client, f"{client.http_urls()[0]}/slow", given.runs)
    finally:
        dask.close()
        cluster.close()


if __name__ == "__main__":
    main()
