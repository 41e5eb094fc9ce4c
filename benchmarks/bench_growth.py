"""The CPU time of a request as replicas of a worker and connections of a proxy increase.

A no-op, async and plain, is served in one worker with 1, 2 and 10 replicas and with 100 connections, compared
with one replica. Then one replica with 1,000 connections is compared with 100 connections, and likewise
uvicorn with an application of three lines. All systems run at the same time and are loaded in turns.

Run: ``python benchmarks/bench_growth.py [--rounds N] [--server tornado|asyncio]``. It prints a line per case,
with the median of the ratios of a round and their range.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from http_load import Place, System, answer, end_on_sigterm, floor, need_wrk, serving, wrk

REPLICAS = (1, 2, 10)
FEW, MANY = 100, 1000


def plain(request: Any) -> str:
    return "ok"


def load_all(systems: Mapping[str, System], connections: int, rounds: int) -> dict[str, list[float]]:
    """Return the CPU time of a request of each system, in each round."""
    took: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds + 1):
        for name, system in systems.items():
            cpu_us = wrk(system, connections=connections, seconds=1).cpu_us
            if number:  # the first round is a warm-up
                took[name].append(cpu_us)
    return took


def show(name: str, took: list[float], beside: list[float]) -> None:
    """Print a line for a case."""
    ratios = [one / other for one, other in zip(took, beside, strict=True)]
    print(
        f"{name:48} {statistics.median(took):6.1f} µs beside {statistics.median(beside):6.1f}  "
        f"CPU {statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


def measure(server: str, rounds: int) -> None:
    """Measure all cases under one HTTP server."""
    with ExitStack() as stack:
        systems = {
            f"{kind} {count}": stack.enter_context(serving(Place(replicas=count, server=server), function))
            for kind, function in (("async", answer), ("plain", plain))
            for count in REPLICAS
        }
        took = load_all(systems, FEW, rounds)
        for kind in ("async", "plain"):
            for count in REPLICAS[1:]:
                show(f"{server}, {kind}, {count} replicas", took[f"{kind} {count}"], took[f"{kind} 1"])
        systems = {"no-op": systems["async 1"], "uvicorn": stack.enter_context(floor("floor_uvicorn"))}
        few, many = load_all(systems, FEW, rounds), load_all(systems, MANY, rounds)
        for name in systems:
            show(f"{server}, {name}, {MANY} connections beside {FEW}", many[name], few[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", choices=("tornado", "asyncio"), help="measure under this server only")
    given = parser.parse_args()
    need_wrk()
    end_on_sigterm()
    for server in [given.server] if given.server else ("asyncio", "tornado"):
        measure(server, given.rounds)


if __name__ == "__main__":
    main()
