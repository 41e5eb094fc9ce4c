"""How other clients fare while attackers try to exhaust shared resources, under both HTTP servers.

Setup: two workers. One has the proxy and the attacked replica, the other has a plain backend. An attack is 40
clients in a separate process, with 12 MB in all (`programs/attacker.py`). Meanwhile, one client sends GETs to
the plain backend, and one uses a WebSocket of the attacked replica, both over persistent connections.
Measured: the median and the longest response time of both, their failures, the responses to the attackers,
the limits that they reached, the CPU time that they cost, and whether a replica was replaced.

Run: ``python benchmarks/bench_attacks.py [--kinds NAME,...] [--server tornado,asyncio] [--seconds N]
[--descriptors N] [--isolation process] [--apart]``. ``--descriptors`` limits the file descriptors of the
workers, and each GET then has its own connection. It prints a line per case, and exits with 1 if a replica
was replaced or another client's request failed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from http_load import end_on_sigterm, worker_processes

import daskserve as serve
from daskserve.cluster.dask.launch import start_local_cluster
from daskserve.common.settings import LocalClusterSize

HERE = Path(__file__).parent
ATTACKER = [sys.executable, str(HERE / "programs" / "attacker.py")]

PAUSE_S = 0.01
PATIENCE_S = 20.0


async def plain(request: Any) -> str:
    return "fine"


def application() -> Any:
    """Return an application with two WebSockets: one echoes, one drops what it receives."""
    from starlette.applications import Starlette
    from starlette.routing import WebSocketRoute
    from starlette.websockets import WebSocket, WebSocketDisconnect

    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        with suppress(WebSocketDisconnect):
            while True:
                await socket.send_bytes(await socket.receive_bytes())

    async def sink(socket: WebSocket) -> None:
        await socket.accept()
        while (await socket.receive())["type"] != "websocket.disconnect":
            pass

    return Starlette(routes=[WebSocketRoute("/echo", echo), WebSocketRoute("/sink", sink)])


class Bystander:
    """Sends requests in a loop, and records how long each response takes."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask
        self.times_s: list[float] = []
        self.failures: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Bystander:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(PAUSE_S):
            began = time.perf_counter()
            try:
                self._ask()
            except (OSError, HTTPException, AssertionError) as error:
                self.failures.append(repr(error)[:80])
                if len(self.failures) > 3:
                    return
            self.times_s.append(time.perf_counter() - began)

    def __str__(self) -> str:
        times_ms = sorted(1e3 * each for each in self.times_s) or [float("nan")]
        failed = f", {len(self.failures)} failed: {self.failures[0]}" if self.failures else ""
        return f"{statistics.median(times_ms):.1f} ms, longest {times_ms[-1]:.0f} ms{failed}"


def get(url: str, *, keeps_connection: bool) -> Callable[[], None]:
    """Return a function that sends a GET and waits for the response."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)

    def ask() -> None:
        try:
            connection.request("GET", "/plain")
            answer = connection.getresponse().read()
        except BaseException:
            connection.close()
            raise
        if not keeps_connection:
            connection.close()
        assert answer == b"fine", answer

    return ask


@contextmanager
def socket_of(url: str) -> Iterator[Callable[[], None]]:
    """Open a WebSocket; yield a function that sends a message and waits for its echo."""
    parts = urlsplit(url)
    address = parts.hostname or "", parts.port or 0
    with socket.create_connection(address, timeout=PATIENCE_S) as sock, sock.makefile("rb") as reader:
        sock.sendall(
            b"GET /app/echo HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        while reader.readline() != b"\r\n":
            pass

        def ask() -> None:
            sock.sendall(b"\x82\x85\0\0\0\0hello")
            while (header := reader.read(2)) == b"\x89\x00":  # a ping
                sock.sendall(b"\x8a\x80\0\0\0\0")
            assert header == b"\x82\x05", header
            assert reader.read(5) == b"hello"

        yield ask


def limits_met(dask_worker: Any) -> dict[str, float]:
    """Return how often the proxy of a worker has enforced each limit; Dask's client runs this there."""
    return {
        str(labels[-1]): value
        for actor in dask_worker.state.actors.values()
        if type(actor).__name__ == "Host"
        for name, entry in actor.registry.entries.items()
        if "/proxy/" in name
        for sample, labels, value in entry.actor.samples()
        if sample in ("http_limited_requests", "http_accept_pauses") and value
    }


def try_kind(server: str, kind: str, given: argparse.Namespace) -> bool:
    """Run one case; return whether the other clients were served."""
    cluster, dask = start_local_cluster(LocalClusterSize(2, 2), has_dashboard=False)
    http = {"port": 0, "server": server, "websocket_compression": True}
    try:
        if given.descriptors:
            dask.run(resource.setrlimit, resource.RLIMIT_NOFILE, (given.descriptors, given.descriptors))
        with serve.start(http_options=http, dask_client=dask) as client:
            (proxy,) = {
                each.worker for each in client.status().actors if each.kind == "proxy" and each.worker
            }
            others = [each for each in dask.scheduler_info(n_workers=-1)["workers"] if each != proxy]
            client.create_backend("plain", plain, actor_options={"workers": others})
            client.create_endpoint("plain", backend="plain", route="/plain", methods=["GET", "POST"])
            place = {"workers": others if given.apart else [proxy]}
            config = {"isolation": given.isolation}
            client.create_backend("app", application(), config=config, actor_options=place)
            client.create_endpoint("app", backend="app", route="/app", methods=["GET"])
            before = {each.name for each in client.status().replicas("app")}
            (url,) = client.http_urls()
            processes = worker_processes(dask)
            command = [*ATTACKER, url, kind, str(given.clients), str(given.bytes), str(given.seconds)]
            ask_http = get(url, keeps_connection=not given.descriptors)
            cpu_s = -busy_s(processes)
            with socket_of(url) as ask, Bystander(ask_http) as http_client, Bystander(ask) as socket_client:
                attack = subprocess.run(command, capture_output=True, text=True, check=True)
                time.sleep(1)
                limits = {
                    name: count for each in dask.run(limits_met).values() for name, count in each.items()
                }
            cpu_s += busy_s(processes)
            ended = json.loads(attack.stdout)
            after = {each.name for each in client.status().replicas("app")}
            memory_mb = max(each.memory_info().rss for each in processes) / 1e6
            print(
                f"{server}, {kind}: GET {http_client}; WebSocket {socket_client}; attackers {ended['ends']}, "
                f"{ended['sent_bytes'] / 1e6:.1f} MB, limits {limits}; CPU {cpu_s:.1f} s, {memory_mb:.0f} MB"
                + ("" if before == after else f"; REPLACED {before} {after}"),
                flush=True,
            )
            return before == after and not http_client.failures and not socket_client.failures
    finally:
        cluster.close()


def busy_s(processes: tuple[psutil.Process, ...]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    known = subprocess.run(ATTACKER, capture_output=True, text=True, check=True).stdout.strip()
    parser.add_argument("--kinds", default=known, help=f"of: {known}")
    parser.add_argument("--server", default="tornado,asyncio")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--bytes", type=int, default=12_000_000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--descriptors", type=int)
    parser.add_argument("--isolation", choices=("thread", "process"), default="thread")
    parser.add_argument("--apart", action="store_true", help="attack the replica on the other worker")
    given = parser.parse_args()
    end_on_sigterm()
    results = [
        try_kind(server, kind, given) for server in given.server.split(",") for kind in given.kinds.split(",")
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main())
