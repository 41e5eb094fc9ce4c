"""Requests that fail when serving processes are killed, compared with ``uvicorn --workers 2``.

Sixteen clients of httpx send GET requests over connections that they keep. Meanwhile, a process that serves
them is killed several times, with SIGKILL. daskserve runs two replicas with ``isolation="process"``, once
with ``replicas_listen`` and once without. Both systems replace killed processes.

Run: ``python benchmarks/bench_kills.py [--kills N]``. It needs ``pip install fastapi httpx uvicorn``, and
prints a line per system.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
from http_load import PROGRAMS, end_on_sigterm

CLIENTS = 16
#: Time between two kills.
PERIOD_S = 2.0
START_S = 30.0


@contextmanager
def uvicorn() -> Iterator[str]:
    """Run the application under uvicorn, on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "pids:app", "--workers", "2", "--port", str(port)]
    process = subprocess.Popen([*command, "--log-level", "critical"], cwd=PROGRAMS)
    try:
        yield f"http://127.0.0.1:{port}/pid"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def daskserve(*, replicas_listen: bool) -> Iterator[str]:
    """Run it on daskserve, on a local cluster with two workers."""
    import daskserve as serve

    app = importlib.import_module("pids").app

    http_options = {"port": 0, "location": "EveryWorker", "replicas_listen": replicas_listen}
    with serve.start(http_options=http_options) as client:
        deployed = serve.deployment(num_replicas=2, isolation="process")(
            serve.ingress(app)(type("Pids", (), {}))
        )
        client.run(deployed.bind())
        yield client.http_urls()[0].rstrip("/") + "/pid"


async def load(url: str, kills: int) -> tuple[int, Counter[str], int]:
    """Return the number of responses with 200, that of failures by kind, and that of processes killed."""
    served: set[int] = set()
    failures: Counter[str] = Counter()
    answered = killed = 0
    is_over = asyncio.Event()

    async def send() -> None:
        nonlocal answered
        async with httpx.AsyncClient(timeout=10) as client:
            while not is_over.is_set():
                try:
                    response = await client.get(url)
                except httpx.HTTPError as error:
                    failures[type(error).__name__] += 1
                    continue
                if response.status_code == 200:
                    answered += 1
                    served.add(response.json())
                else:
                    failures[str(response.status_code)] += 1

    clients = [asyncio.create_task(send()) for _ in range(CLIENTS)]
    for _ in range(kills):
        served.clear()
        await asyncio.sleep(PERIOD_S)
        for pid in list(served):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
                break
    await asyncio.sleep(PERIOD_S)
    is_over.set()
    await asyncio.gather(*clients)
    return answered, failures, killed


def measure(name: str, url: str, kills: int) -> None:
    """Print the line of one system."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if httpx.get(url).status_code == 200:
                break
        time.sleep(0.1)
    answered, failures, killed = asyncio.run(load(url, kills))
    print(
        f"{name:34} {killed} killed, {answered} answered, {failures.total()} failed {dict(failures)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    given = parser.parse_args()
    end_on_sigterm()
    sys.path.insert(0, str(PROGRAMS))
    os.environ["PYTHONPATH"] = str(PROGRAMS)
    with uvicorn() as url:
        measure("uvicorn --workers 2", url, given.kills)
    for replicas_listen in (True, False):
        with daskserve(replicas_listen=replicas_listen) as url:
            measure(f"daskserve, replicas_listen={replicas_listen}", url, given.kills)


if __name__ == "__main__":
    main()
