"""Repeated rollouts on a real cluster, of versions that fail 3 % of requests and of equally good versions.

Setup: two workers and ten deployments, each a separate application with two replicas that fails 0.1 % of
its calls. A program calls each of them by its handle, one call after another from several tasks. A new
version of each is deployed with the default plan (5 %, 25 %, 100 %; a gate by error rate), all ten at once.
Measured: how each rollout ends, and the latency of calls before the rollouts and while they last.

Run: ``python benchmarks/bench_rollout_trials.py [--trials N] [--at-once N] [--fails 0.03]``. It prints a line
for each round and a sum, and exits with 1 if a rollout ends in another way than it should.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from distributed import Client, LocalCluster

import daskserve as serve
from daskserve.errors import RolloutError

GOOD = 0.001
PLAN: dict[str, Any] = {"steps": ["5%", "25%", "100%"], "pause_s": 5}
#: Tasks that call each deployment.
TASKS = 2
BEFORE_S = 5.0
LIMIT_S = 1800.0


class Fault(Exception):
    """The error that a faulty version raises."""


def version(number: int, name: str, fails: float, **options: Any) -> serve.Application:
    class Model:
        def __init__(self) -> None:
            self.rng = random.Random()

        async def __call__(self) -> str:
            if self.rng.random() < fails:
                raise Fault
            return name

    deployment: Any = serve.deployment(name=f"m{number}", version=name, num_replicas=2, **options)
    application: serve.Application = deployment(Model).bind()
    return application


@dataclass
class Load:
    """Calls of one deployment: responses by version, and the latencies of the current phase."""

    handle: Any
    answers: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            began = time.perf_counter()
            try:
                self.answers[await self.handle.remote()] += 1
            except Fault:
                self.answers["failed"] += 1
            self.latencies.append(time.perf_counter() - began)


def quantiles(loads: list[Load]) -> str:
    """Return the latencies since the last call as text."""
    found = sorted(each for load in loads for each in load.latencies)
    for load in loads:
        load.latencies.clear()
    p50, p99 = (1000 * found[int(q * (len(found) - 1))] for q in (0.5, 0.99))
    return f"{len(found)} calls, p50 {p50:.2f} ms, p99 {p99:.2f} ms"


async def ended(client: Any, number: int) -> str:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found = await client.rollout_status(f"app{number}/m{number}")
        if found["state"] in ("COMPLETED", "ROLLED_BACK", "ABORTED"):
            return str(found["state"])
        await asyncio.sleep(1)
    return str(found["waiting"])


async def one_round(client: Any, count: int, fails: float) -> list[str]:
    """Return how the rollouts of several deployments end."""
    numbers = range(count)
    handles = [
        await client.run(version(n, "old", GOOD), name=f"app{n}", route_prefix=f"/{n}") for n in numbers
    ]
    loads = [Load(each) for each in handles]
    tasks = [asyncio.create_task(each.run()) for each in loads for _ in range(TASKS)]
    try:
        await asyncio.sleep(1)
        quantiles(loads)
        await asyncio.sleep(BEFORE_S)
        before, began = quantiles(loads), time.monotonic()

        async def rolled_out(n: int) -> str:
            new = version(n, "new", fails, rollout=PLAN)
            try:
                await client.run(new, name=f"app{n}", route_prefix=f"/{n}")
            except RolloutError:
                pass  # rolled back before it had the traffic of its first step
            return await ended(client, n)

        states = list(await asyncio.gather(*(rolled_out(n) for n in numbers)))
        print(f"  before: {before}\n  during: {quantiles(loads)}", flush=True)
        failed = sum(each.answers["failed"] for each in loads)
        print(f"  {time.monotonic() - began:.0f} s, {failed} failed calls", flush=True)
        return states
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def rounds(trials: int, at_once: int, fails: float) -> list[str]:
    """Run all rounds, each on a new cluster, and return how the rollouts end."""
    states: list[str] = []
    while len(states) < trials:
        async with LocalCluster(  # type: ignore[no-untyped-call]
            n_workers=2, threads_per_worker=2, dashboard_address=None, protocol="tcp", asynchronous=True
        ) as cluster:
            async with Client(cluster, asynchronous=True) as dask:  # type: ignore[no-untyped-call]
                client = await serve.start_async(http_options={"port": 0}, dask_client=dask)
                states += await one_round(client, min(at_once, trials - len(states)), fails)
                print(f"fails {100 * fails:g} %: {dict(Counter(states))}", flush=True)
                await client.shutdown()
    return states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--at-once", type=int, default=10)
    parser.add_argument("--fails", type=float, help="Only versions that fail this share, such as 0.03.")
    options = parser.parse_args()
    is_wrong = False
    for fails in (0.03, GOOD) if options.fails is None else (options.fails,):
        expected = "COMPLETED" if fails <= GOOD else "ROLLED_BACK"
        states = asyncio.run(rounds(options.trials, options.at_once, fails))
        is_wrong |= states != [expected] * options.trials
        print(f"fails {100 * fails:g} %: {states.count(expected)} of {options.trials} {expected}", flush=True)
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
