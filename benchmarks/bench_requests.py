"""Requests per second over HTTP, each case beside its floor in the same run.

The floor is Tornado's ``HTTPServer`` with a callback in one process, on the same event loop. Every case
answers two bytes to ``wrk -t1 -c32``; floor and case take turns, and the ratio is the median of the ratios.

1. one hop: the proxy in one worker, the replica in another, default options.
2. zero hop: one worker with proxy and replica; once with the wall of threads (the default), once with
   ``event_loop="worker"``.

Needs ``wrk`` (Debian has a package). Run: ``python benchmarks/bench_requests.py [--runs N] [--seconds S]``;
prints a line per case: requests per second, the floor's, the ratio, and the median latency at one connection.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import daskserve as serve
from daskserve.cluster.launch import start_local_cluster
from daskserve.settings import LocalClusterSize

PROGRAMS = Path(__file__).parent / "programs"


async def answer(request: Any) -> str:
    return "ok"


def wrk(url: str, *, connections: int, seconds: float) -> tuple[float, float]:
    """Return requests per second and the median latency in microseconds."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--latency", url]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in told or "Socket errors" in told:
        raise RuntimeError(f"not every request was answered: {told}")
    rate = re.search(r"Requests/sec: +([0-9.]+)", told)
    median = re.search(r"50% +([0-9.]+)(us|ms|s)", told)
    assert rate is not None
    assert median is not None
    return float(rate[1]), float(median[1]) * {"us": 1, "ms": 1e3, "s": 1e6}[median[2]]


@contextmanager
def floor(name: str = "floor_tornado", *arguments: object) -> Iterator[str]:
    """Run a floor, by the name of its program; yield its address."""
    command = [sys.executable, str(PROGRAMS / f"{name}.py"), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


@contextmanager
def served(workers: int, config: dict[str, Any], function: Any = answer) -> Iterator[str]:
    """Serve `answer`, or another function, on a cluster of so many workers; yield its address."""
    cluster, dask = start_local_cluster(LocalClusterSize(workers, 2), has_dashboard=False)
    try:
        with serve.start(http_options={"port": 0}, dask_client=dask) as client:
            # Where there are two workers, the replica must be where the proxy is not.
            (proxy,) = {each.worker for each in client.status().actors if each.kind == "proxy"}
            others = [each for each in dask.scheduler_info()["workers"] if each != proxy]
            options = {"workers": others} if others else {}
            client.create_backend("answer", function, config=config, actor_options=options)
            client.create_endpoint("answer", backend="answer", route="/answer", methods=["GET", "POST"])
            (replica,) = {each.worker for each in client.status().replicas("answer")}
            assert (replica == proxy) == (workers == 1)
            yield f"{client.http_urls()[0]}/answer"
    finally:
        dask.close()
        cluster.close()


def measure(name: str, workers: int, config: dict[str, Any], *, runs: int, seconds: float) -> None:
    ratios, rates, floors = [], [], []
    with served(workers, config) as url, floor() as floor_url:
        for each in (url, floor_url):
            wrk(each, connections=32, seconds=1)  # warm up
        for _ in range(runs):
            rate, bottom = (wrk(each, connections=32, seconds=seconds)[0] for each in (url, floor_url))
            ratios.append(rate / bottom)
            rates.append(rate)
            floors.append(bottom)
        alone, floor_alone = (wrk(each, connections=1, seconds=seconds)[1] for each in (url, floor_url))
    print(
        f"{name:40} {statistics.median(rates):7.0f}/s   floor {statistics.median(floors):7.0f}/s   "
        f"ratio {statistics.median(ratios):.2f}   alone {alone:.0f} us ({alone / floor_alone:.1f} x floor)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("please install wrk")
    options = {"runs": given.runs, "seconds": given.seconds}
    measure("one hop", 2, {}, **options)
    measure("zero hop", 1, {}, **options)
    measure('zero hop, event_loop="worker"', 1, {"event_loop": "worker"}, **options)


if __name__ == "__main__":
    main()
