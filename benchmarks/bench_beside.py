"""Live requests while other requests keep the cluster busy with Dask tasks.

Requests are sent at a fixed rate, and each latency counts from the time at which the request was due. Each
request to `Asks` runs one small Dask task; requests to `Answers` run none. The tasks of the other requests
have a lower priority than those of `Asks`, or the same. The replica of `Answers` shares its worker with
tasks, or occupies all threads of its worker. The cases take turns, on two workers with one thread each.

Run: ``python benchmarks/bench_beside.py [--seconds 5] [--rounds 3] [--rate 10]``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from distributed import Client, LocalCluster, get_client

import daskserve as serve

#: Number of tasks that one request to `Floods` submits, and how long each task computes.
TASKS, TASK_S = 40, 0.01


def compute(_: Any, for_s: float = TASK_S) -> float:
    """Multiply matrices, which mostly runs without the interpreter lock, as batch work does."""
    ends_at = time.thread_time() + for_s
    matrix = np.ones((120, 120))
    while time.thread_time() < ends_at:
        matrix = matrix @ matrix / 120
    return float(matrix[0, 0])


@serve.deployment
class Answers:
    def __call__(self) -> float:
        return compute(0, 0.001)


@serve.deployment(dask_task_config={"priority": 0})
class Asks:
    def __call__(self) -> float:
        return float(get_client().submit(compute, 0, 0.001, pure=False).result())


@serve.deployment
class Floods:
    def __call__(self) -> int:
        client: Any = get_client()  # Dask has no types
        return len(client.gather(client.map(compute, range(TASKS), pure=False)))


@contextmanager
def flooded(handle: Any | None) -> Iterator[None]:
    """Keep two requests to `Floods` in flight."""
    is_over = threading.Event()

    def flood() -> None:
        while handle is not None and not is_over.is_set():
            handle.remote().result()

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in threads:
            each.join()


def latencies(handle: Any, rate: float, seconds: float) -> list[float]:
    """Return the latencies of requests at a fixed rate, in milliseconds."""
    began = time.perf_counter() + 0.05

    def call(due: float) -> float:
        time.sleep(max(0.0, due - time.perf_counter()))
        handle.remote().result()
        return 1000 * (time.perf_counter() - due)

    with ThreadPoolExecutor(64) as pool:
        return list(pool.map(call, [began + n / rate for n in range(int(rate * seconds))]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=10)
    given = parser.parse_args()
    make_cluster: Any = LocalCluster  # Dask has no types
    make_client: Any = Client
    run: Any = serve.run
    answers: Any = Answers
    floods: Any = Floods
    live: dict[str, Any] = {
        "one task each": Asks,
        "no tasks, shared worker": answers,
        "no tasks, num_cpus=1": answers.options(actor_options={"num_cpus": 1}),
    }
    beside: dict[str, Any] = {
        "nothing": None,
        "tasks, priority -1": floods,
        "tasks, priority 0": floods.options(dask_task_config={"priority": 0}),
    }
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with make_cluster(**options) as cluster, make_client(cluster):
        serve.start(http_options={"port": 0})
        for kind, what in itertools.product(list(live) * given.rounds, beside):
            handle = run(live[kind].bind(), name="live", route_prefix=None)
            flood = beside[what] and run(beside[what].bind(), name="beside", route_prefix=None)
            with flooded(flood):
                latencies(handle, given.rate, 1)
                found[kind, what] += latencies(handle, given.rate, given.seconds)
            for each in ["live", *(["beside"] if flood else [])]:
                serve.delete(each)
        serve.shutdown()
    for (kind, what), taken in found.items():
        cuts = statistics.quantiles(taken, n=100)
        print(f"{kind:24} beside {what:20} p50 {cuts[49]:8.1f} ms   p99 {cuts[98]:8.1f} ms")


if __name__ == "__main__":
    main()
