"""Shared parts of the HTTP benchmarks: the load, the floors, and a serving cluster."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import daskserve as serve
from daskserve.cluster.dask.launch import start_local_cluster
from daskserve.common.settings import LocalClusterSize

PROGRAMS = Path(__file__).parent / "programs"
#: How long a program may take to print its address.
START_S = 240.0


async def answer(request: Any) -> str:
    return "ok"


@dataclass(frozen=True)
class System:
    """A running system: where it listens, and the processes that serve."""

    url: str
    roots: tuple[psutil.Process, ...]

    def cpu_s(self) -> float:
        """Return the CPU time (user and system) of these processes and of their children so far."""
        processes = {each for root in self.roots for each in (root, *root.children(recursive=True))}
        times = [each.cpu_times() for each in processes]
        return float(sum(each.user + each.system for each in times))


@dataclass(frozen=True)
class LoadResult:
    """The results of a load: the number of requests, requests per second, and their times.

    ``cpu_us`` is the CPU time of all serving processes, divided by the number of requests. It is steadier
    than the rate on a machine that does other things.
    """

    requests: int
    rate: float
    p50_us: float
    p99_us: float
    cpu_us: float


def need_wrk() -> None:
    if shutil.which("wrk") is None:
        sys.exit("please install wrk")


def in_own_session(command: list[str]) -> bytes:
    """Run a program that loads a system, in a new session; return its output.

    Linux schedules processes by session (``sched_autogroup_enabled``). In the benchmark's session, the load
    would compete with a peer that was started there, but not with workers of Dask, which have their own
    sessions.
    """
    return subprocess.run(command, capture_output=True, check=True, start_new_session=True).stdout


def wrk(system: System, path: str = "", *, connections: int, seconds: float, kind: str = "GET") -> LoadResult:
    """Send requests to a system over the given number of connections, as fast as they are answered.

    Requests differ from one to the next; ``programs/requests.lua`` lists the kinds. wrk runs for whole
    seconds, at least one.
    """
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency"]
    command += ["-s", str(PROGRAMS / "requests.lua"), system.url + path, "--", kind]
    before_s = system.cpu_s()
    output = in_own_session(command).decode()
    cpu_s = system.cpu_s() - before_s
    if "Non-2xx" in output or "Socket errors" in output:
        raise RuntimeError(f"requests failed or were not answered: {output}")
    count = re.search(r"([0-9]+) requests in", output)
    rate = re.search(r"Requests/sec: +([0-9.]+)", output)
    assert count is not None
    assert rate is not None
    requests = int(count[1])
    p50_us, p99_us = _microseconds("50%", output), _microseconds("99%", output)
    return LoadResult(requests, float(rate[1]), p50_us, p99_us, cpu_s / requests * 1e6)


def _microseconds(name: str, output: str) -> float:
    found = re.search(rf"{name} +([0-9.]+)(us|ms|s)", output)
    assert found is not None
    return float(found[1]) * {"us": 1, "ms": 1e3, "s": 1e6}[found[2]]


@contextmanager
def program(path: Path, *arguments: object, python: str = sys.executable) -> Iterator[System]:
    """Run a program that prints its address on a line; at the end, none of its processes is left."""
    command = [python, str(path), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    root = psutil.Process(process.pid)
    try:
        assert process.stdout is not None
        given_up = threading.Timer(START_S, process.kill)
        given_up.start()
        # Ray prints an empty line before it.
        line = next((each.strip() for each in process.stdout if each.strip()), "")
        given_up.cancel()
        if not line:
            raise RuntimeError(f"{path.name} did not start")
        yield System(line, (root,))
    finally:
        _end(root)
        process.wait()


def _end(root: psutil.Process) -> None:
    """Ask a process to end, then kill it and all of its descendants that still run."""
    everyone = [root, *root.children(recursive=True)]
    root.terminate()
    _, alive = psutil.wait_procs(everyone, timeout=10)
    for each in alive:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(alive, timeout=10)


def end_on_sigterm() -> None:
    """Let SIGTERM end the benchmark as an exception does, so that no process is left."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def floor(name: str = "floor_tornado", *arguments: object) -> Any:
    """Run the program of a floor by name; see `program`."""
    return program(PROGRAMS / f"{name}.py", *arguments)


@contextmanager
def floor_of(name: str, processes: int) -> Iterator[System]:
    """Run a floor in one or two processes that share a port."""
    with floor(name) as first:
        if processes == 1:
            yield first
        else:
            with floor(name, first.url.rpartition(":")[2].strip("/")) as second:
                yield System(first.url, first.roots + second.roots)


@dataclass(frozen=True)
class Place:
    """Placement of proxies and replicas: apart in two workers (one hop), or together in each worker."""

    workers: int = 1
    hops: int = 0
    #: Replicas in each of these workers.
    replicas: int = 1
    server: str = "tornado"
    config: dict[str, Any] = field(default_factory=dict)
    #: The share of the requests that are traced; None: no traces.
    traced: float | None = None
    #: The ``logging_config`` of the instance; None: no logs.
    logged: dict[str, Any] | None = None

    @property
    def processes(self) -> int:
        """Number of listening processes."""
        return self.workers if not self.hops else 1


@contextmanager
def serving(place: Place, function: Any = answer) -> Iterator[System]:
    """Serve a function with a placement."""
    cluster, dask = start_local_cluster(LocalClusterSize(place.workers + place.hops, 2), has_dashboard=False)
    location = "EveryWorker" if place.processes > 1 else "HeadOnly"
    http = {"port": 0, "location": location, "server": place.server}
    try:
        tracing = None if place.traced is None else {"sampling_ratio": place.traced}
        with serve.start(
            http_options=http, dask_client=dask, tracing_config=tracing, logging_config=place.logged
        ) as client:
            proxies = {each.worker for each in client.status().actors if each.kind == "proxy" and each.worker}
            others = [each for each in dask.scheduler_info(n_workers=-1)["workers"] if each not in proxies]
            config = {**place.config, "num_replicas": place.workers * place.replicas}
            options = {"workers": others if place.hops else sorted(proxies)}
            client.create_backend("answer", function, config=config, actor_options=options)
            client.create_endpoint("answer", backend="answer", route="/answer", methods=["GET", "POST"])
            replicas = {each.worker for each in client.status().replicas("answer")}
            assert len(replicas) == place.workers
            assert replicas == (set(others) if place.hops else proxies)
            yield System(f"{client.http_urls()[0]}/answer", worker_processes(dask))
    finally:
        dask.close()
        cluster.close()


def worker_processes(dask: Any) -> tuple[psutil.Process, ...]:
    """Return the processes of a local cluster's workers."""
    return tuple(psutil.Process(pid) for pid in dask.run(os.getpid).values())


def served(workers: int, config: dict[str, Any], function: Any = answer) -> Any:
    """Serve a function in the worker of the proxy, or in a second worker."""
    return serving(Place(hops=workers - 1, config=config), function)
