"""Multiplexed models: how soon a loaded model answers while others load, and how often a model is loaded.

1. 4 callers ask for one model, alone and while 8 others ask for models that each take 0.2 s to load.
   Measured: the 99th percentile of the 4.
2. 300 models of Zipf popularity on 4 replicas of 8, 8 callers. Measured: the share of requests whose model
   was loaded, relative to the best fixed placement of the models.
3. The cost of choosing a replica by model, compared with a choice without a model.

Ray Serve is measured in the same run.

Run: ``python benchmarks/bench_multiplexing.py [--python DIR/bin/python]``, with an environment that has
``ray[serve]``.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from http_load import end_on_sigterm, program

import daskserve as serve
from daskserve.data.caller.pool.replica_pool import ReplicaPool
from daskserve.data.caller.routing.multiplexing.model_routing import ModelRouting

REPLICAS, MODELS, KINDS = 4, 8, 300


class Models:
    def __init__(self, load_s: float) -> None:
        self.loads = 0
        self.load_s = load_s

    @serve.multiplexed(max_num_models_per_replica=MODELS)
    async def get_model(self, model_id: str) -> str:
        self.loads += 1
        await asyncio.sleep(self.load_s)
        return model_id

    async def __call__(self, request: Any) -> str:
        before = self.loads
        await self.get_model(serve.get_multiplexed_model_id())
        return str(self.loads - before)


@contextmanager
def ours(load_s: float) -> Iterator[str]:
    client = serve.start(http_options={"port": 0})
    deployment: Any = serve.deployment(num_replicas=REPLICAS, max_ongoing_requests=20)(Models)
    serve.run(deployment.bind(load_s), route_prefix="/")
    yield client.http_urls()[0] + "/"
    serve.shutdown()


@contextmanager
def theirs(load_s: float, python: str) -> Iterator[str]:
    path = Path(__file__).parent / "peers" / "ray_multiplexing.py"
    with program(path, REPLICAS, MODELS, load_s, python=python) as system:
        yield system.url


async def call(url: str, ids: Callable[[], str], until: float, took: list[tuple[float, bool]]) -> None:
    """Send requests over one connection until a time; record each time, and whether the model was loaded."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    while time.perf_counter() < until:
        head = f"GET / HTTP/1.1\r\nHost: {place.netloc}\r\nserve_multiplexed_model_id: {ids()}\r\n\r\n"
        began = time.perf_counter()
        writer.write(head.encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        lines = answer.lower().split(b"\r\n")
        size = next((int(each[15:]) for each in lines if each.startswith(b"content-length:")), None)
        if size is None:  # in chunks
            body = (await reader.readuntil(b"0\r\n\r\n")).partition(b"\r\n")[2][:1]
        else:
            body = await reader.readexactly(size)
        if b" 200 " not in lines[0]:
            raise RuntimeError(f"unexpected answer: {answer!r} {body!r}")
        took.append((time.perf_counter() - began, body == b"0"))
    writer.close()


async def cached_beside_loads(url: str, seconds: float) -> tuple[float, float]:
    """Return the 99th percentile for a loaded model in ms: alone, and while other models load."""
    found = []
    numbers = itertools.count()
    for others in (0, 8):
        took: list[tuple[float, bool]] = []
        ignored: list[tuple[float, bool]] = []
        await call(url, lambda: "cached", time.perf_counter() + 1, ignored)
        until = time.perf_counter() + seconds
        await asyncio.gather(
            *(call(url, lambda: "cached", until, took) for _ in range(4)),
            *(call(url, lambda: f"other{next(numbers)}", until, ignored) for _ in range(others)),
        )
        found.append(sorted(each for each, _ in took)[int(len(took) * 0.99)] * 1e3)
    return found[0], found[1]


async def share_of_hits(url: str, seconds: float) -> tuple[float, int]:
    """Return the share of requests whose model was loaded, relative to the best one, and their number."""
    rng = random.Random(1)
    weights = [1 / (number + 1) for number in range(KINDS)]
    bounds = list(itertools.accumulate(weights))

    def draw() -> str:
        return f"m{bisect.bisect_left(bounds, rng.random() * bounds[-1])}"

    took: list[tuple[float, bool]] = []
    await asyncio.gather(*(call(url, draw, time.perf_counter() + seconds, took) for _ in range(8)))
    counted = took[len(took) // 2 :]
    best = sum(weights[: REPLICAS * MODELS]) / sum(weights)
    return sum(hit for _, hit in counted) / len(counted) / best, len(counted)


def cost_of_choice() -> None:
    pool = ReplicaPool(lambda address: False)
    pool.update({f"d#{number}": (f"w{number}", 1) for number in range(REPLICAS)}, 20, str)
    routing, rng = ModelRouting(), random.Random(0)
    models = {
        f"d#{number}": {"loaded": [f"m{number}"], "coming": [], "capacity": MODELS}
        for number in range(REPLICAS)
    }
    routing.update(models)
    for name, model_id in (("without a model", ""), ("with one", "m2")):
        times = []
        for _ in range(9):
            began = time.process_time()
            for _ in range(5000):
                pick = routing.picker(model_id, 0.5) if model_id else None
                replica = pool.take(0.5, rng, pick)
                assert replica is not None
                pool.release(replica)
            times.append((time.process_time() - began) / 5000 * 1e6)
        print(f"choice of a replica {name}: {min(times):.1f} µs", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="interpreter of an environment with ray[serve]")
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    end_on_sigterm()
    cost_of_choice()
    systems: list[tuple[str, Callable[[float], Any]]] = [("daskserve", ours)]
    if given.python:
        systems.append(("Ray Serve", lambda load_s: theirs(load_s, given.python)))
    for name, start in systems:
        with start(0.2) as url:
            alone, beside = asyncio.run(cached_beside_loads(url, given.seconds))
        print(f"{name}: p99 of a loaded model {alone:.1f} ms, {beside:.1f} ms while others load", flush=True)
        with start(0.02) as url:
            share, count = asyncio.run(share_of_hits(url, 3 * given.seconds))
        print(f"{name}: {share:.2f} of the best hit rate, {count} requests", flush=True)


if __name__ == "__main__":
    main()
