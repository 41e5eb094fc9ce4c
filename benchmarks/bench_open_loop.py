"""Tail latency of a FastAPI application at a low rate, compared with uvicorn.

Requests are sent at random times with a fixed mean rate (``programs/open_loop.py``), and each latency counts
from the time at which the request was due. The application runs in two workers of daskserve with default
settings, and under ``uvicorn --workers 2``; the two take turns. For each system this prints the medians over
the rounds: p50, p99, p99.9, and the CPU time per request, which includes the work of the processes between
requests.

It needs ``pip install fastapi uvicorn httptools uvloop scikit-learn``. Run:
``python benchmarks/bench_open_loop.py [--rate 500] [--seconds 8] [--rounds 5] [--event-loop worker]``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass

from bench_apps import APP, ENVIRONMENT, Case, ours, uvicorn
from http_load import PROGRAMS, System, end_on_sigterm, in_own_session

PATHS = {"plain": "/plain", "async": "/async"}


@dataclass(frozen=True)
class Tail:
    """The latencies of one round in milliseconds, and the CPU time of a request in microseconds."""

    p50_ms: float
    p99_ms: float
    p999_ms: float
    cpu_us: float


def measure(system: System, path: str, rate: float, seconds: float) -> Tail:
    """Return the result of one round."""
    command = [sys.executable, str(PROGRAMS / "open_loop.py"), system.url + path, str(rate), str(seconds)]
    before_s = system.cpu_s()
    count, took = json.loads(in_own_session(command))
    cpu_s = system.cpu_s() - before_s
    took.sort()
    p50, p99, p999 = (took[int(len(took) * share)] * 1000 for share in (0.5, 0.99, 0.999))
    return Tail(p50, p99, p999, cpu_s / count * 1e6)


def compare(
    name: str, path: str, server: str, event_loop: str, *, rate: float, seconds: float, rounds: int
) -> None:
    """Print a line for each metric of an endpoint."""
    with ExitStack() as stack:
        case = Case(name, APP, path, "image", config={"event_loop": event_loop})
        us = stack.enter_context(ours(case, server))
        them = stack.enter_context(uvicorn(2))
        pairs = []
        for number in range(rounds + 1):
            pair = tuple(measure(each, path, rate, seconds) for each in (us, them))
            if number:  # the first round is a warm-up
                pairs.append(pair)
    for figure in ("p50_ms", "p99_ms", "p999_ms", "cpu_us"):
        values = [tuple(getattr(each, figure) for each in pair) for pair in pairs]
        ratios = [one / other for one, other in values]
        our, their = (statistics.median(each[at] for each in values) for at in (0, 1))
        print(
            f"FastAPI {name:6} {server:8} {figure:8} {our:8.2f}  uvicorn {their:8.2f}  "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=500.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", choices=("tornado", "asyncio"), default="asyncio")
    parser.add_argument("--event-loop", choices=("own", "worker"), default="own", help="that of the replicas")
    given = parser.parse_args()
    end_on_sigterm()
    os.environ.update(ENVIRONMENT)
    sys.path.append(str(PROGRAMS))  # the workers inherit it
    for name, path in PATHS.items():
        how = {"rate": given.rate, "seconds": given.seconds, "rounds": given.rounds}
        compare(name, path, given.server, given.event_loop, **how)


if __name__ == "__main__":
    main()
