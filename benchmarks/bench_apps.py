"""Typical applications on daskserve, compared with the usual server for each.

FastAPI applications (``programs/apps.py``) run in two workers of daskserve with default settings, compared
with ``uvicorn --workers 2``; or under ``daskserve run``, compared with as many workers of uvicorn.
``@serve.batch`` is compared with mosec. The systems take turns; all bodies differ. For each case this prints
the ratio of the requests per second, and the CPU time per request of all serving processes (user and system),
which varies less. WebSockets are driven by an asyncio client.

All systems run in this environment, which needs ``pip install fastapi mosec``. Run:
``python benchmarks/bench_apps.py [--only WORD]``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from http_load import PROGRAMS, LoadResult, System, end_on_sigterm, need_wrk, program, worker_processes, wrk

import daskserve as serve
from daskserve.cluster.dask.launch import start_local_cluster
from daskserve.common.settings import LocalClusterSize

PEERS = Path(__file__).parent / "peers"
CONNECTIONS = 32
#: Threads of numerical libraries compete with the other worker for two cores, under every system.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAMS)}
MESSAGE = b"a message of some length, as people write them"


@dataclass(frozen=True)
class Case:
    """One application, its requests, and the system it is compared with."""

    name: str
    target: str
    path: str
    kind: str
    peer: str = "uvicorn"
    peer_path: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    http: dict[str, Any] = field(default_factory=dict)
    connections: int = CONNECTIONS
    #: The arguments of the peer's program.
    peer_arguments: tuple[object, ...] = ()
    #: The ``--workers`` of ``daskserve run``, if the case uses it, and of uvicorn.
    workers: int = 0


APP = "apps:app"
CASES = [
    Case("FastAPI, plain", APP, "/plain", "image"),
    Case("FastAPI, async", APP, "/async", "image"),
    *(
        Case(
            f'FastAPI, {name}, isolation="process"{listens and ", replicas_listen"}',
            APP,
            f"/{name}",
            "image",
            config={"isolation": "process"},
            http={"replicas_listen": bool(listens)},
        )
        for listens in ("", "listens")
        for name in ("plain", "async")
    ),
    *(
        Case(
            f'FastAPI, async, isolation="process", event_loop="worker"{listens and ", replicas_listen"}',
            APP,
            "/async",
            "image",
            config={"isolation": "process", "event_loop": "worker"},
            http={"replicas_listen": bool(listens)},
        )
        for listens in ("", "listens")
    ),
    Case('FastAPI, async, event_loop="worker"', APP, "/async", "image", config={"event_loop": "worker"}),
    Case("FastAPI, pydantic 1 KB", APP, "/item", "item"),
    *(
        Case(f"daskserve run --workers {workers}, {name}", APP, f"/{name}", kind, workers=workers)
        for workers in (1, 2)
        for name, kind in (("plain", "image"), ("async", "image"), ("item", "item"))
    ),
    Case("events", APP, "/events", "events"),
    Case("WebSocket echo", APP, "/echo", "websocket"),
    Case("async class, beside FastAPI async", "apps:AsyncModel", "/", "image", peer_path="/async"),
    Case("@serve.batch", "apps:BatchedModel", "/", "image", peer="mosec"),
    *(
        Case(
            f"@serve.batch of 32, {count} connections",
            "apps:LargerBatches",
            "/",
            "image",
            peer="mosec",
            connections=count,
            peer_arguments=(32,),
        )
        for count in (32, 128)
    ),
    Case(
        '@serve.batch, event_loop="worker"',
        "apps:BatchedModel",
        "/",
        "image",
        peer="mosec",
        config={"event_loop": "worker"},
    ),
]


@dataclass(frozen=True)
class Round:
    """The result of one system in one round."""

    rate: float
    cpu_us: float
    alone_us: float


@contextmanager
def ours(case: Case, server: str) -> Iterator[System]:
    """Serve an application in two workers, each with a proxy and a replica."""
    cluster, dask = start_local_cluster(LocalClusterSize(2, 2), has_dashboard=False)
    try:
        http = {"port": 0, "location": "EveryWorker", "server": server, **case.http}
        with serve.start(http_options=http, dask_client=dask) as client:
            client.create_backend("app", case.target, config={**case.config, "num_replicas": 2})
            client.create_endpoint("app", backend="app", route="/", methods=["GET", "POST"])
            assert len({each.worker for each in client.status().replicas("app")}) == 2
            workers = worker_processes(dask)
            children = [child for each in workers for child in each.children()]
            yield System(client.http_urls()[0].rstrip("/"), (*workers, *children))
    finally:
        dask.close()
        cluster.close()


def uvicorn(workers: int = 2) -> AbstractContextManager[System]:
    """Run the application under uvicorn."""
    command = ["-m", "uvicorn", APP, "--workers", str(workers), "--log-level", "error", "--no-access-log"]
    return _running([sys.executable, *command], workers if workers > 1 else 0)


def shipped(workers: int) -> AbstractContextManager[System]:
    """Run the application with ``daskserve run``, as on a developer's machine."""
    command = ["-m", "daskserve", "run", APP, "--workers", str(workers), "--no-access-log"]
    return _running([sys.executable, *command], workers)


@contextmanager
def _running(command: list[str], children: int) -> Iterator[System]:
    """Run a server until its child processes have imported scikit-learn, and it listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    environment = {**os.environ, **ENVIRONMENT}
    command += ["--port", str(port)]
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            tree = psutil.Process(process.pid)
            deadline = time.monotonic() + 60
            while socket.socket().connect_ex(("127.0.0.1", port)) or len(_busy_children(tree)) < children:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(command)} did not start")
                time.sleep(0.1)
            yield System(f"http://127.0.0.1:{port}", (tree,))
        finally:
            process.terminate()


def _busy_children(tree: psutil.Process) -> list[psutil.Process]:
    """Return the worker processes: a start imports scikit-learn, unlike that of multiprocessing's helper."""
    return [each for each in tree.children(recursive=True) if each.memory_info().rss > 80 << 20]


def mosec(*arguments: object) -> AbstractContextManager[System]:
    """Run the model in mosec, with two worker processes."""
    return program(PEERS / "mosec_worker.py", "digits", *arguments)


def load(case: Case, system: System, path: str, *, connections: int, seconds: float) -> LoadResult:
    """Send requests for some seconds."""
    if case.kind == "websocket":
        before_s = system.cpu_s()
        took = asyncio.run(talk(system.url + path, connections=connections, seconds=seconds))
        count, cpu_s = len(took), system.cpu_s() - before_s
        p50_us, p99_us = took[count // 2] * 1e6, took[count * 99 // 100] * 1e6
        return LoadResult(count, count / seconds, p50_us, p99_us, cpu_s / count * 1e6)
    return wrk(system, path, connections=connections, seconds=seconds, kind=case.kind)


async def talk(url: str, *, connections: int, seconds: float) -> list[float]:
    """Send messages over WebSockets, each after the echo of the last; return the sorted round-trip times."""
    place = urlsplit(url)
    took: list[float] = []
    frame = bytes([0x81, 0x80 | len(MESSAGE)]) + bytes(4) + MESSAGE  # the mask is zero
    echoed = bytes([0x81, len(MESSAGE)]) + MESSAGE

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        head = f"GET {place.path}?n={number} HTTP/1.1\r\nHost: {place.netloc}\r\nUpgrade: websocket\r\n"
        key = "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        writer.write((head + key + "Sec-WebSocket-Version: 13\r\n\r\n").encode())
        await reader.readuntil(b"\r\n\r\n")
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            writer.write(frame)
            assert await reader.readexactly(len(echoed)) == echoed
            took.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*[one(number) for number in range(connections)])
    return sorted(took)


def measure(case: Case, system: System, path: str, seconds: float) -> Round:
    """Return the results of one round, first under load, then with one connection."""
    found = load(case, system, path, connections=case.connections, seconds=seconds)
    alone = load(case, system, path, connections=1, seconds=1)
    return Round(found.rate, found.cpu_us, alone.p50_us)


def compare(case: Case, server: str, *, rounds: int, seconds: float) -> None:
    with ExitStack() as stack:
        us = stack.enter_context(shipped(case.workers) if case.workers else ours(case, server))
        peer = mosec(*case.peer_arguments) if case.peer == "mosec" else uvicorn(case.workers or 2)
        them = stack.enter_context(peer)
        their_path = (case.peer_path or case.path) if case.peer == "uvicorn" else ""
        pairs = []
        for number in range(rounds + 1):
            pair = (measure(case, us, case.path, seconds), measure(case, them, their_path, seconds))
            if number:  # the first round is a warm-up
                pairs.append(pair)
    rates = [us.rate / them.rate for us, them in pairs]
    ours_us, theirs_us = (statistics.median(each[place].cpu_us for each in pairs) for place in (0, 1))
    cpu = statistics.median(us.cpu_us / them.cpu_us for us, them in pairs)
    alone = statistics.median(us.alone_us / them.alone_us for us, them in pairs)
    print(
        f"{case.name:34} {server:8} {statistics.median(us.rate for us, _ in pairs):6.0f}/s  "
        f"rate {statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})  "
        f"CPU {ours_us:.0f} µs, {case.peer} {theirs_us:.0f}, ratio {cpu:.2f}  alone {alone:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--server", choices=("tornado", "asyncio"), help="measure under this server only")
    parser.add_argument("--only", default="", help="measure only the cases whose name contains this text")
    given = parser.parse_args()
    end_on_sigterm()
    need_wrk()
    os.environ.update(ENVIRONMENT)
    sys.path.append(str(PROGRAMS))  # the workers inherit it
    for case in CASES:
        for server in (given.server,) if given.server else ("asyncio", "tornado"):
            if given.only in case.name:
                compare(case, server, rounds=given.rounds, seconds=given.seconds)


if __name__ == "__main__":
    main()
