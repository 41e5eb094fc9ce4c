"""Failures that clients see when the scheduler dies under load and restarts at the same address.

A scheduler, two workers and a deployment with two replicas, each in a separate process. Four kinds of
requests run without a pause: short GETs, POSTs that take 0.3 s, streams that take 2 s, and calls by handle.
The scheduler is killed, and starts again on the same port some seconds later.

Run: ``python benchmarks/bench_outage.py [--no-nanny] [--away S] [--store memory] [--signal TERM]``. For each
kind, it prints how many requests succeeded and failed, and how they failed: before the outage, during it and
after it. It also prints how long it takes to add one replica once the scheduler listens again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distributed import Client

import daskserve as serve

PATIENCE_S = 30.0
HERE = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HERE, 0))
        return int(sock.getsockname()[1])


class Answers:
    """A deployment with a method for each kind of request."""

    async def __call__(self, request: Any) -> Any:
        import asyncio

        if request.method == "POST":
            await asyncio.sleep(0.3)
            return {"id": (await request.json())["id"]}
        if request.query_params.get("stream"):
            return self.stream()
        return "pong"

    async def stream(self) -> Any:
        import asyncio

        for number in range(20):
            yield f"{number}\n"
            await asyncio.sleep(0.1)

    async def call(self, value: int) -> int:
        return value


class Processes:
    """A scheduler and its workers."""

    def __init__(self, folder: Path, *, has_nannies: bool, workers: int) -> None:
        self.port = free_port()
        self.address = f"tcp://{HERE}:{self.port}"
        self._folder = folder
        self._all: list[subprocess.Popen[bytes]] = []
        self.scheduler = self.start_scheduler()
        for number in range(workers):
            options = ["--nworkers", "1", "--nthreads", "2", "--name", f"w{number}"]
            options += [] if has_nannies else ["--no-nanny"]
            self._start("worker", self.address, "--no-dashboard", "--host", HERE, *options)

    def _start(self, kind: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *arguments]
        with (self._folder / f"{kind}-{len(self._all)}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._all.append(process)
        return process

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        self.scheduler = self._start("scheduler", "--no-dashboard", "--host", HERE, "--port", str(self.port))
        return self.scheduler

    def living_workers(self) -> int:
        return sum(
            each.poll() is None for each in self._all if "distributed.cli.dask_worker" in str(each.args)
        )

    def end(self) -> None:
        for each in self._all:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()


class Load:
    """Requests of all kinds; each outcome is kept with the time at which its request began and ended."""

    def __init__(self, url: str, handle: Any) -> None:
        self._address = url.removeprefix("http://").split(":")
        self._handle = handle
        self._is_over = threading.Event()
        self.outcomes: list[tuple[str, float, float, str]] = []
        kinds: dict[str, Callable[[], None]] = {
            "GET": self._get,
            "POST": self._post,
            "stream": self._stream,
            "handle": self._call,
        }
        self._threads = [
            threading.Thread(target=self._run, args=(kind, once), daemon=True)
            for kind, once in kinds.items()
            for _ in range(2)
        ]
        for each in self._threads:
            each.start()

    def _run(self, kind: str, once: Callable[[], None]) -> None:
        while not self._is_over.is_set():
            began, outcome = time.monotonic(), ""
            try:
                once()
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"[:100]
            self.outcomes.append((kind, began, time.monotonic(), outcome))
            time.sleep(0.1 if outcome else 0.01)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection(self._address[0], int(self._address[1]), timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} {content[:60]!r}")
            return content
        finally:
            connection.close()

    def _get(self) -> None:
        assert self._ask("GET", "/") == b"pong"

    def _post(self) -> None:
        self._ask("POST", "/", b'{"id": 1}')

    def _stream(self) -> None:
        assert len(self._ask("GET", "/?stream=1").splitlines()) == 20

    def _call(self) -> None:
        assert self._handle.call.remote(1).result(PATIENCE_S) == 1

    def end(self) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join(PATIENCE_S)

    def table(self, phases: dict[str, float]) -> Iterator[str]:
        """Yield a line for each phase and kind; a request belongs to the phase in which it ended."""
        edges = [*phases.values(), float("inf")]
        for (name, since), until in zip(phases.items(), edges[1:], strict=True):
            for kind in ("GET", "POST", "stream", "handle"):
                found = [each for each in self.outcomes if each[0] == kind and since <= each[2] < until]
                failed = collections.Counter(each[3] for each in found if each[3])
                slowest = max((each[2] - each[1] for each in found), default=0.0)
                yield (
                    f"{name:>6} {kind:>7}: {len(found) - failed.total():5} answered, "
                    f"{failed.total():4} failed, slowest {slowest:.1f} s {dict(failed.most_common(5)) or ''}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--no-nanny", action="store_true")
    parser.add_argument("--away", type=float, default=10.0, help="seconds without a scheduler")
    parser.add_argument("--after", type=float, default=12.0, help="seconds of load after its return")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--store", default="sqlite", choices=["memory", "sqlite"])
    parser.add_argument("--signal", default="KILL", choices=["KILL", "TERM"])
    parser.add_argument("--location", default="HeadOnly")
    parser.add_argument("--show-logs", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = Processes(folder, has_nannies=not options.no_nanny, workers=options.workers)
        try:
            measure(processes, folder, options)
        finally:
            processes.end()
            if options.show_logs:
                for log in sorted(folder.glob("*.log")):
                    print(f"---- {log.name}\n{log.read_text()}")


def wait_until_listens(port: int) -> None:
    while True:
        with socket.socket() as sock:
            if not sock.connect_ex((HERE, port)):
                return
        time.sleep(0.01)


def measure(processes: Processes, folder: Path, options: argparse.Namespace) -> None:
    new_client: Any = Client  # its constructor is not annotated
    dask = new_client(processes.address, set_as_default=False)
    dask.wait_for_workers(options.workers, timeout=PATIENCE_S)
    store = "memory://" if options.store == "memory" else f"sqlite:///{folder}/serve.db"
    http_options = {"port": free_port(), "host": HERE, "location": options.location}
    client = serve.start(detached=True, dask_client=dask, store=store, http_options=http_options)
    client.deploy("answers", Answers, config={"num_replicas": 2}, route_prefix="/")
    load = Load(client.http_urls()[0], client.get_handle("answers"))
    phases = {"before": time.monotonic()}
    time.sleep(3)
    phases["away"] = time.monotonic()
    processes.scheduler.send_signal(getattr(signal, f"SIG{options.signal}"))
    processes.scheduler.wait()
    time.sleep(options.away)
    print(f"processes of workers left when it comes back: {processes.living_workers()}")
    phases["back"] = time.monotonic()
    processes.start_scheduler()
    wait_until_listens(processes.port)
    listens_at = time.monotonic()
    with contextlib.suppress(Exception):
        client.update_backend_config("answers", {"num_replicas": 3})
        print(
            f"a change was complete {time.monotonic() - listens_at:.1f} s after the scheduler listened again"
        )
    time.sleep(options.after)
    load.end()
    print("\n".join(load.table(phases)))
    print(f"processes of workers left at the end: {processes.living_workers()}")


if __name__ == "__main__":
    main()
