"""Batch inference through a deployment, compared with plain Dask and Ray Data, and its effect on live calls.

``frames``: a small neural network scores a dataframe of 40 partitions. ``dask.dataframe.map_partitions`` with
the model inside the function (created once per worker) and ``handle.map_partitions`` take turns. ``--ray
python`` adds ``map_batches`` with actors of Ray Data, from an environment that has ``ray[data]``.

``live``: the latency of calls that are sent every 50 ms, with and without a concurrent ``handle.map``. Each
call waits 10 or 100 ms, as if for an accelerator: in 8 slots, in 2 replicas with one slot, and in batches of
which 2 run at a time. With a single slot, the factor cannot be less than 2.

``memory``, only if named: the memory of the
program that reads a map of ``--items`` items (10 million by default, about 15 minutes).

Run: ``python benchmarks/bench_batch.py [frames] [live] [memory] [--rounds 5] [--ray /path/to/python]``, with
pandas and pyarrow.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from distributed import Client, LocalCluster, get_worker

import daskserve as serve

PEER = Path(__file__).parent / "peers/ray_batch.py"
PARTITIONS, ROWS, COLUMNS, HIDDEN = 40, 10_000, 32, 512
LIVE_CALLS, LIVE_EVERY_S = 150, 0.05


class Network:
    """A network with one hidden layer, as in the program for Ray."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.first = rng.normal(size=(COLUMNS, HIDDEN))
        self.second = rng.normal(size=HIDDEN)

    def score(self, frame: Any) -> Any:
        hidden = np.maximum(frame.to_numpy() @ self.first, 0.0)
        column = frame[frame.columns[0]]
        return type(column)(hidden @ self.second, index=frame.index)


@serve.deployment(num_replicas=2, max_ongoing_requests=2)
class Scorer(Network):
    """The network as a deployment."""


class Doubler:
    async def __call__(self, value: int) -> int:
        return 2 * value


class Accelerator:
    """Waits for each call, as if for an accelerator."""

    def __init__(self, service_s: float) -> None:
        self.service_s = service_s

    async def __call__(self, value: int) -> int:
        await asyncio.sleep(self.service_s)
        return value


class BatchAccelerator:
    """Waits once for a batch of calls."""

    def __init__(self, service_s: float) -> None:
        self.service_s = service_s

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.0, max_concurrent_batches=2)
    async def __call__(self, values: list[int]) -> list[int]:
        await asyncio.sleep(self.service_s)
        return values


#: The class, its waiting time, and the options of the deployment.
LIVE_CASES: dict[str, tuple[Any, float, dict[str, int]]] = {
    "100 ms, 8 slots": (Accelerator, 0.1, {"max_ongoing_requests": 8}),
    "10 ms, 8 slots": (Accelerator, 0.01, {"max_ongoing_requests": 8}),
    "10 ms, 1 slot": (Accelerator, 0.01, {"max_ongoing_requests": 1}),
    "10 ms, 1 slot, 2 replicas": (Accelerator, 0.01, {"max_ongoing_requests": 1, "num_replicas": 2}),
    "10 ms, 2 batches of 8": (BatchAccelerator, 0.01, {"max_ongoing_requests": 32}),
}


def score_in_task(frame: Any) -> Any:
    worker: Any = get_worker()
    if not hasattr(worker, "network"):
        worker.network = Network()
    return worker.network.score(frame)


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def shown(name: str, values: list[float], digits: int = 2) -> str:
    middle, least, most = (
        f"{each:.{digits}f}" for each in (statistics.median(values), min(values), max(values))
    )
    return f"{name}: {middle} ({least} to {most})"


def bench_frames(client: serve.Client, rounds: int, ray: str | None) -> None:
    dataframes: Any = importlib.import_module("dask.dataframe")
    pandas: Any = importlib.import_module("pandas")
    scorer: Any = Scorer
    handle = client.run(scorer.bind(), name="scorer", route_prefix=None)
    rng = np.random.default_rng(1)
    frame = dataframes.from_map(
        lambda number: pandas.DataFrame(
            np.random.default_rng(number).normal(size=(ROWS, COLUMNS)),
            columns=[f"c{n}" for n in range(COLUMNS)],
        ),
        range(PARTITIONS),
    ).persist()
    meta = ("score", float)
    ways = {
        "inside": lambda: frame.map_partitions(score_in_task, meta=meta).sum().compute(),
        "handle": lambda: handle.score.map_partitions(frame, meta=meta).sum().compute(),
    }
    assert np.isclose(ways["inside"](), ways["handle"]())
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in rng.permutation(list(ways)):
            took[name].append(seconds(ways[name]))
    for name, values in took.items():
        print(shown(f"frames, {name}, s", values))
    ratios = [inside / handle for inside, handle in zip(took["inside"], took["handle"], strict=True)]
    print(shown("frames, handle's speed / inside's", ratios), flush=True)
    if ray is not None:
        sizes = [str(each) for each in (rounds, PARTITIONS, ROWS, COLUMNS, HIDDEN)]
        answer = subprocess.run([ray, str(PEER), *sizes], capture_output=True, text=True, check=True)
        found = json.loads(answer.stdout.splitlines()[-1])
        print(shown("frames, Ray Data, s", found))
        ratio = statistics.median(found) / statistics.median(took["handle"])
        print(f"frames, handle's speed / Ray Data's: {ratio:.2f}", flush=True)


def job(handle: Any, has_ended: Any) -> int:
    """Map until the event is set."""

    def items() -> Any:
        while not has_ended.is_set():
            yield 1

    return sum(handle.map(items(), ordered=False))


def live_latencies(handle: Any) -> list[float]:
    async def call(took: list[float]) -> None:
        began = time.perf_counter()
        await handle.remote(1)
        took.append(time.perf_counter() - began)

    async def main() -> list[float]:
        took: list[float] = []
        async with asyncio.TaskGroup() as calls:
            for _ in range(LIVE_CALLS):
                calls.create_task(call(took))
                await asyncio.sleep(LIVE_EVERY_S)
        return took

    return asyncio.run(main())


def p99_ms(took: list[float]) -> float:
    return 1000 * sorted(took)[int(0.99 * len(took))]


def bench_live(client: serve.Client, rounds: int, case: str) -> None:
    accelerator, service_s, options = LIVE_CASES[case]
    deployment: Any = serve.deployment(accelerator, **options)
    handle = client.run(deployment.bind(service_s), name="accelerator", route_prefix=None)
    live_latencies(handle)
    alone, beside, rates = [], [], []
    for _ in range(rounds):
        alone.append(p99_ms(live_latencies(handle)))
        has_ended = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            began = time.perf_counter()
            answered = thread.submit(job, handle, has_ended)
            beside.append(p99_ms(live_latencies(handle)))
            has_ended.set()
            rates.append(answered.result() / (time.perf_counter() - began))
    name = f"live, {case}"
    print(shown(f"{name}, p99 alone, ms", alone, 1))
    print(shown(f"{name}, p99 beside a map, ms", beside, 1))
    print(shown(f"{name}, items of the map each second", rates, 0))
    ratios = [b / a for a, b in zip(alone, beside, strict=True)]
    print(shown(f"{name}, p99 beside / alone", ratios), flush=True)


def bench_memory(client: serve.Client, items: int) -> None:
    deployment: Any = serve.deployment(num_replicas=2)(Doubler)
    handle = client.run(deployment.bind(), name="doubler", route_prefix=None)
    process, total, seen = psutil.Process(), 0, []
    began = time.perf_counter()
    for number, result in enumerate(handle.map(range(items), ordered=False), 1):
        total += result
        if number % (items // 20) == 0:
            seen.append(process.memory_info().rss / (1 << 20))
    rate = items / (time.perf_counter() - began)
    assert total == items * (items - 1)
    print(
        f"memory, {items} items, {rate:.0f} each second: {seen[0]:.1f} MiB after the first twentieth, "
        f"{seen[-1]:.1f} at the end, {max(seen):.1f} at most",
        flush=True,
    )


def _ready(client: Client) -> Client:
    """Return a client once the workers have finished their slow imports."""
    client.run(importlib.import_module, "pandas")
    return client


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=["frames", "live"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ray")
    parser.add_argument("--items", type=int, default=10_000_000)
    options = parser.parse_args()
    with (
        LocalCluster(  # type: ignore[no-untyped-call]
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        _ready(Client(cluster)) as dask_client,  # type: ignore[no-untyped-call]
        serve.start(dask_client=dask_client, http_options={"port": 0}) as client,
    ):
        if "frames" in options.cases:
            bench_frames(client, options.rounds, options.ray)
        if "live" in options.cases:
            for case in LIVE_CASES:
                bench_live(client, options.rounds, case)
        if "memory" in options.cases:
            bench_memory(client, options.items)
    return 0


if __name__ == "__main__":
    sys.exit(main())
