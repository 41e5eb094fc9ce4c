"""A steady load of several kinds of requests, from a program that also starts what they go to.

The backend ``spread`` has a replica on each worker with the resource ``spread``, ``far`` one on a worker with
the resource ``far``. Every worker has a proxy; the program sends its requests to the one of its own machine.

`main` runs the program. It prints a line for each request, and one a second with what the status says of the
network, until there is a file ``stop`` in its folder. `read_requests` and `last_status` read these lines.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dask_processes import fetch
from distributed import Client

import daskserve as serve

PORT = 8000
#: How long user code takes for a request, and how long a client waits before its next one.
WORK_S, PAUSE_S = 0.05, 0.02
CLIENTS_PER_KIND = 2
#: Longer than any silence that clients may notice, so that a timeout of the load hides nothing.
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Request:
    """One request of the load: when it began, on the monotonic clock of all processes, and its end."""

    kind: str
    #: The number of the client, of those that send this kind one after the other.
    client: int
    began: float
    took_s: float
    #: The HTTP status, or the name of the error of a call.
    outcome: str

    @property
    def is_good(self) -> bool:
        return self.outcome == "200"

    @property
    def ended(self) -> float:
        return self.began + self.took_s


def read_requests(output: str) -> list[Request]:
    """Return the requests that a program has printed."""
    return [Request(**each) for each in _read("request ", output)]


def has_each_client_ended_one(requests: Iterable[Request], since: float, kinds: Iterable[str]) -> bool:
    """Return whether each client of these kinds has ended a request since a time, so that none hangs."""
    latest: dict[tuple[str, int], float] = {}
    for each in requests:
        latest[each.kind, each.client] = max(each.ended, latest.get((each.kind, each.client), 0.0))
    return all(
        latest.get((kind, number), 0.0) > since for kind in kinds for number in range(CLIENTS_PER_KIND)
    )


def last_status(output: str) -> dict[str, Any]:
    """Return what the program has printed last of the status; empty before."""
    found = list(_read("status ", output))
    return found[-1] if found else {}


def _read(start: str, output: str) -> Iterable[Any]:
    lines = output.splitlines(keepends=True)
    return (
        json.loads(each.removeprefix(start)) for each in lines if each[-1] == "\n" and each.startswith(start)
    )


# ---- in the program


def print_line(kind: str, value: Any) -> None:
    sys.stdout.write(f"{kind} {json.dumps(value)}\n")
    sys.stdout.flush()


async def work(request: Any) -> str:
    await asyncio.sleep(WORK_S)
    return "done"


def start_backends(client: Any, spread: int) -> None:
    for name, replicas in (("spread", spread), ("far", 1)):
        config = {"num_replicas": replicas}
        client.create_backend(name, work, config=config, actor_options={"resources": {name: 1}})
        client.create_endpoint(name, backend=name, route=f"/{name}", methods=["GET", "POST"])


def main(address: str, folder: Path, here: str, spread: int) -> None:
    def by_http(method: str, name: str) -> Callable[[], str]:
        return lambda: str(fetch(f"http://{here}:{PORT}/{name}", method, timeout_s=TIMEOUT_S).status)

    def by_handle(name: str) -> Callable[[], str]:
        handle = client.get_handle(name)

        def call() -> str:
            assert handle.remote().result(timeout_s=TIMEOUT_S) == "done"
            return "200"

        return call

    def keep_sending(kind: str, send: Callable[[], str], number: int) -> None:
        while not (folder / "stop").exists():
            began = time.monotonic()
            try:
                outcome = send()
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            print_line("request", asdict(Request(kind, number, began, time.monotonic() - began, outcome)))
            time.sleep(PAUSE_S)

    with Client(address) as dask_client:
        options = {"host": "0.0.0.0", "port": PORT, "location": "EveryWorker"}
        with serve.start(dask_client=dask_client, http_options=options) as client:
            start_backends(client, spread)
            kinds = {
                "GET": by_http("GET", "spread"),
                "POST": by_http("POST", "spread"),
                "GET far": by_http("GET", "far"),
                "call": by_handle("spread"),
                "call far": by_handle("far"),
            }
            threads = [
                threading.Thread(target=keep_sending, args=(*each, number))
                for each in kinds.items()
                for number in range(CLIENTS_PER_KIND)
            ]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                status = client.status()
                shown = {
                    "broken_routes": {worker: dict(each) for worker, each in status.broken_routes.items()},
                    "unresponsive_workers": list(status.unresponsive_workers),
                    "backends": {name: each.running for name, each in status.backends.items()},
                }
                print_line("status", shown)
                time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
