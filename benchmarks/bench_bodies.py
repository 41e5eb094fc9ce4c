"""Bodies of 10 MB, compared with uvicorn: CPU time per request, and memory during and after the load.

Each system gets the same number of requests over the same number of connections, in turns. CPU time is
measured because other work on the machine affects it less than the rate. daskserve runs in one worker with a
proxy and a replica, uvicorn alone.

It needs ``pip install uvicorn``. Run: ``python benchmarks/bench_bodies.py [--connections N] [--rounds N]``.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from http_load import PROGRAMS, System, end_on_sigterm, program

SIZE_BYTES = 10_000_000
#: How long a system is idle before its remaining memory is measured.
REST_S = 10.0
#: The requests and the applications; see ``programs/serve_case.py`` and ``programs/bodies.py``.
CASES = {
    "POST, async class": ("POST", "async body", ""),
    "POST, plain class": ("POST", "plain body", ""),
    "POST, Starlette": ("POST", "Starlette body", ""),
    "response, Starlette": ("GET", "Starlette body", "large"),
}


@dataclass
class Figures:
    """The CPU time and memory of one system in all rounds."""

    cpu_ms: list[float] = field(default_factory=list)
    mb_per_s: list[float] = field(default_factory=list)
    peak_mb: float = 0.0


def memory_mb(system: System) -> float:
    processes = {each for root in system.roots for each in (root, *root.children(recursive=True))}
    return float(sum(each.memory_info().rss for each in processes)) / 1e6


def talk(url: str, method: str, path: str, count: int) -> None:
    """Send requests over one connection, each after the response to the last one."""
    place = urlsplit(url)
    body = bytes(SIZE_BYTES) if method == "POST" else b""
    head = f"{method} {place.path.rstrip('/')}/{path} HTTP/1.1\r\nHost: {place.netloc}\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    buffer = bytearray(1 << 20)
    with socket.create_connection((place.hostname, place.port)) as sock:
        for _ in range(count):
            sock.sendall(head.encode())
            sock.sendall(body)
            received = b""
            while b"\r\n\r\n" not in received:
                received += sock.recv(1 << 16)
            first, _, rest = received.partition(b"\r\n\r\n")
            lines = first.lower().split(b"\r\n")
            assert b" 200 " in lines[0], first
            length = next(
                int(each.partition(b":")[2]) for each in lines if each.startswith(b"content-length")
            )
            left = length - len(rest)
            while left:
                left -= sock.recv_into(buffer, min(left, len(buffer)))


def measure(system: System, method: str, path: str, connections: int, count: int, found: Figures) -> None:
    """Load a system in one round."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            found.peak_mb = max(found.peak_mb, memory_mb(system))

    before_s, began = system.cpu_s(), time.perf_counter()
    watching = threading.Thread(target=watch)
    clients = [
        threading.Thread(target=talk, args=(system.url, method, path, count)) for _ in range(connections)
    ]
    for each in (watching, *clients):
        each.start()
    for each in clients:
        each.join()
    took_s = time.perf_counter() - began
    is_over.set()
    watching.join()
    requests = connections * count
    found.cpu_ms.append((system.cpu_s() - before_s) / requests * 1e3)
    found.mb_per_s.append(requests * SIZE_BYTES / took_s / 1e6)


def compare(name: str, connections: int, count: int, rounds: int) -> None:
    method, served, path = CASES[name]
    here = os.path.dirname(os.path.abspath(__file__))
    with ExitStack() as stack:
        us = stack.enter_context(program(PROGRAMS / "serve_case.py", served, "asyncio", here))
        them = stack.enter_context(program(PROGRAMS / "bodies.py"))
        systems = {us: Figures(), them: Figures()}
        at_start = {each: memory_mb(each) for each in systems}
        for number in range(rounds):
            for each in (us, them) if number % 2 else (them, us):
                measure(each, method, path, connections, count, systems[each])
        time.sleep(REST_S)
        for each, found in systems.items():
            print(
                f"{name:20} {'daskserve' if each is us else 'uvicorn':9} {connections:2} connections  "
                f"CPU {statistics.median(found.cpu_ms):5.1f} ms ({min(found.cpu_ms):.1f} to "
                f"{max(found.cpu_ms):.1f})  {statistics.median(found.mb_per_s):5.0f} MB/s  "
                f"peak +{found.peak_mb - at_start[each]:.0f} MB, "
                f"left +{memory_mb(each) - at_start[each]:.0f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--requests", type=int, default=4, help="for each connection and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="measure only the cases whose name contains this text")
    given = parser.parse_args()
    end_on_sigterm()
    for name in CASES:
        if given.only in name:
            compare(name, given.connections, given.requests, given.rounds)


if __name__ == "__main__":
    main()
