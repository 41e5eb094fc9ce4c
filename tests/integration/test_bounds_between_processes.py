"""Deadlines and cancellations between real processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clusters import pids, worker_of
from dask_processes import ExternalCluster, fetch, poll_for

import daskserve as serve

REQUESTS = 400


class Waits:
    """Waits, and creates files when it begins and when it is cancelled."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    async def __call__(self, request: Any) -> str:
        (self.folder / "began").touch()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            (self.folder / "cancelled").touch()
            raise
        return "in the end"


def test_a_replica_enforces_the_deadline_when_the_proxy_is_stopped(
    client: serve.Client, url: str, external: ExternalCluster, tmp_path: Path
) -> None:
    proxy = worker_of(client, "proxy")
    (other,) = {*pids(external.client)} - {proxy}
    client.create_backend("b", Waits, str(tmp_path), actor_options={"workers": [other]})
    client.create_endpoint("e", backend="b", route="/e")
    stopped = pids(external.client)[proxy]
    statuses: list[int] = []

    def send() -> None:
        statuses.append(fetch(f"{url}/e", headers={"X-Request-Timeout-Seconds": "0.7"}).status)

    sending = threading.Thread(target=send)
    sending.start()
    poll_for((tmp_path / "began").exists)
    os.kill(stopped, signal.SIGSTOP)
    try:
        poll_for((tmp_path / "cancelled").exists, 3)
        assert statuses == []
    finally:
        os.kill(stopped, signal.SIGCONT)
    sending.join()
    assert statuses == [408]


class Leaf:
    async def __call__(self, request: Any) -> str:
        await asyncio.sleep(0.02)
        return "leaf"


class Front:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def __call__(self, request: Any) -> Any:
        return await self.handle.remote()


class FrontInThread(Front):
    def __call__(self, request: Any) -> Any:  # type: ignore[override]
        return self.handle.remote().result()


def gauges(dask_worker: Any) -> dict[str, int]:
    """Return the gauges of a worker; Dask's client runs this there."""
    (host,) = (each for each in dask_worker.state.actors.values() if type(each).__name__ == "Host")
    found = dict.fromkeys(("ingress", "ongoing", "calls", "abandoned", "in flight", "waiting", "streams"), 0)
    for name, entry in host.registry.entries.items():
        if "/replica/" in name:
            found["ongoing"] += entry.actor.load().ongoing
            found["abandoned"] += entry.actor._code._executor.abandoned
            found["calls"] += len(entry.actor._code._executor.runs)
        elif "/proxy/" in name:
            found["ingress"] += entry.actor._ingress.ongoing
    for cluster in host.connection._clusters.values():
        for backend in cluster.shared["routers"]._sets.values() if "routers" in cluster.shared else ():
            found["in flight"] += backend.in_flight
            found["waiting"] += backend.waiting
    for channel in host.connection.channels._serving:
        found["streams"] += len(channel._opened) + len(channel._accepted)
    return found


def disconnect_at_random(url: str, paths: list[str], rng: random.Random) -> None:
    """Send requests on separate connections. Close these at random moments, half of them with a reset."""
    parts = urlsplit(url)
    open_until: list[tuple[float, socket.socket]] = []
    for number in range(REQUESTS):
        sock = socket.create_connection((parts.hostname, parts.port), timeout=5)
        if number % 2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(f"GET {rng.choice(paths)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        open_until.append((time.monotonic() + rng.random() * 0.04, sock))
        for each in list(open_until):
            if each[0] <= time.monotonic():
                open_until.remove(each)
                each[1].close()
    for _, sock in open_until:
        sock.close()


def test_disconnects_at_any_moment_leave_nothing_behind(
    client: serve.Client, url: str, external: ExternalCluster
) -> None:
    """The callee is on the proxy's worker, its caller on the other one, so each request crosses twice."""
    proxy = worker_of(client, "proxy")
    (other,) = {*pids(external.client)} - {proxy}
    client.create_backend(
        "leaf", Leaf, config={"max_concurrent_queries": 6}, actor_options={"workers": [proxy]}
    )
    client.create_endpoint("leaf", backend="leaf", route="/leaf")
    leaf = client.get_handle("leaf")
    for name, definition in (("front", Front), ("thread", FrontInThread)):
        client.create_backend(name, definition, leaf, actor_options={"workers": [other]})
        client.create_endpoint(name, backend=name, route=f"/{name}")
        assert fetch(f"{url}/{name}").text == "leaf"
    disconnect_at_random(url, ["/leaf", "/front", "/thread"], random.Random(5))

    def left() -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = external.client.run(gauges)
        return found

    poll_for(lambda: not any(count for each in left().values() for count in each.values()), 5, what=left)
    for name in ("leaf", "front", "thread"):
        assert [fetch(f"{url}/{name}").text for _ in range(10)] == ["leaf"] * 10
