"""A call with an array of 100 MB in Dask: on its worker, from another worker, by value, and as a plain task.

Run: ``python benchmarks/bench_locality.py [--rounds 10]``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from distributed import Client, LocalCluster, get_worker, wait

import daskserve as serve

NUMBERS = 12_500_000


def first(array: Any) -> float:
    return float(array[0])


@serve.deployment(num_replicas=1)
class Model:
    """Reads one number, so that the time is that of the transfer."""

    def place(self) -> str:
        return str(get_worker().address)

    def first(self, array: Any) -> float:
        return first(array)


def measure(rounds: int, ways: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]) -> None:
    """Print how long each call takes; the calls take turns, and their arrays are created beforehand."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (prepare, call) in ways.items():
            value = prepare()
            began = time.perf_counter()
            call(value)
            taken[name].append(1000 * (time.perf_counter() - began))
    for name, values in taken.items():
        print(f"{name:32} median {statistics.median(values):7.1f} ms, minimum {min(values):7.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    make_cluster: Any = LocalCluster  # Dask has no types
    make_client: Any = Client
    until_done: Any = wait
    model: Any = Model
    with make_cluster(n_workers=2, threads_per_worker=1) as cluster, make_client(cluster) as dask:
        serve.start(http_options={"port": 0})
        handle = serve.run(model.bind(), route_prefix=None)
        here = handle.place.remote().result()
        other = next(each for each in dask.scheduler_info()["workers"] if each != here)

        def made(worker: str, numbers: int = NUMBERS) -> Any:
            future = dask.submit(np.ones, numbers, workers=[worker], pure=False)
            until_done(future)
            return future

        def call(value: Any) -> Any:
            return handle.first.remote(value).result()

        def task(value: Any) -> Any:
            return dask.submit(first, value, workers=[here], pure=False).result()

        array = np.ones(NUMBERS)
        ways: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
            "call without arguments": (lambda: None, lambda _: handle.place.remote().result()),
            "call, 80 bytes beside it": (lambda: made(here, 10), call),
            "call, 100 MB beside it": (lambda: made(here), call),
            "task, 100 MB beside it": (lambda: made(here), task),
            "call, 80 bytes on another worker": (lambda: made(other, 10), call),
            "call, 100 MB on another worker": (lambda: made(other), call),
            "task, 100 MB on another worker": (lambda: made(other), task),
            "call, 100 MB by value": (lambda: array, call),
        }
        measure(1, ways)  # opens connections
        print("-- the first of each above; all others:")
        measure(rounds, ways)
        serve.shutdown()


if __name__ == "__main__":
    main()
