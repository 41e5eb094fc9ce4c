"""Shared parts of the HTTP benchmarks: the load, the floors, and a serving cluster."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import daskserve as serve
from daskserve.cluster.launch import start_local_cluster
from daskserve.settings import LocalClusterSize

PROGRAMS = Path(__file__).parent / "programs"


async def answer(request: Any) -> str:
    return "ok"


@dataclass(frozen=True)
class LoadResult:
    """The results of a load: the number of requests, requests per second, and their times."""

    requests: int
    rate: float
    p50_us: float
    p99_us: float


def need_wrk() -> None:
    if shutil.which("wrk") is None:
        sys.exit("please install wrk")


def wrk(
    url: str,
    *,
    connections: int,
    seconds: float,
    method: str = "GET",
    script: tuple[str, str] | None = None,
) -> LoadResult:
    """Send requests to ``url`` over the given number of connections, as fast as they are answered.

    Requests differ from one to the next. ``script`` is the name of a program of wrk's and its argument; by
    default, it is one that only varies queries and headers. wrk runs for whole seconds, at least one.
    """
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency"]
    name, argument = script or ("requests.lua", method)
    command += ["-s", str(PROGRAMS / name), url, "--", argument]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in output or "Socket errors" in output:
        raise RuntimeError(f"requests failed or were not answered: {output}")
    count = re.search(r"([0-9]+) requests in", output)
    rate = re.search(r"Requests/sec: +([0-9.]+)", output)
    assert count is not None
    assert rate is not None
    return LoadResult(
        int(count[1]), float(rate[1]), _microseconds("50%", output), _microseconds("99%", output)
    )


def _microseconds(name: str, output: str) -> float:
    found = re.search(rf"{name} +([0-9.]+)(us|ms|s)", output)
    assert found is not None
    return float(found[1]) * {"us": 1, "ms": 1e3, "s": 1e6}[found[2]]


@contextmanager
def program(path: Path, *arguments: object, python: str = sys.executable) -> Iterator[str]:
    """Run a program that prints its address on its first line; yield the address."""
    command = [python, str(path), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{path.name} did not start")
        yield line
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def floor(name: str = "floor_tornado", *arguments: object) -> Any:
    """Run the program of a floor by name; see `program`."""
    return program(PROGRAMS / f"{name}.py", *arguments)


@contextmanager
def floor_of(name: str, processes: int) -> Iterator[str]:
    """Run a floor in one or two processes that share a port; yield its address."""
    with floor(name) as url:
        if processes == 1:
            yield url
        else:
            with floor(name, url.rpartition(":")[2].strip("/")):
                yield url


@dataclass(frozen=True)
class Place:
    """Placement of proxies and replicas: apart in two workers (one hop), or together in each worker."""

    workers: int = 1
    hops: int = 0
    server: str = "tornado"
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """Number of listening processes."""
        return self.workers if not self.hops else 1


@contextmanager
def serving(place: Place, function: Any = answer) -> Iterator[str]:
    """Serve a function with a placement; yield its URL."""
    cluster, dask = start_local_cluster(LocalClusterSize(place.workers + place.hops, 2), has_dashboard=False)
    location = "EveryWorker" if place.processes > 1 else "HeadOnly"
    http = {"port": 0, "location": location, "server": place.server}
    try:
        with serve.start(http_options=http, dask_client=dask) as client:
            proxies = {each.worker for each in client.status().actors if each.kind == "proxy" and each.worker}
            others = [each for each in dask.scheduler_info(n_workers=-1)["workers"] if each not in proxies]
            config = {**place.config, "num_replicas": place.workers}
            options: dict[str, Any] = {"workers": others if place.hops else sorted(proxies)}
            client.create_backend("answer", function, config=config, actor_options=options)
            client.create_endpoint("answer", backend="answer", route="/answer", methods=["GET", "POST"])
            replicas = {each.worker for each in client.status().replicas("answer")}
            assert len(replicas) == place.workers
            assert replicas == (set(others) if place.hops else proxies)
            yield f"{client.http_urls()[0]}/answer"
    finally:
        dask.close()
        cluster.close()


def served(workers: int, config: dict[str, Any], function: Any = answer) -> Any:
    """Serve a function in the worker of the proxy, or in a second worker."""
    return serving(Place(hops=workers - 1, config=config), function)
