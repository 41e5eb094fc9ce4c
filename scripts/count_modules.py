"""Counts the modules and functions of daskserve that a warm request enters.

It starts a cluster of two workers and sends requests one after the other. A function counts if nearly all
enter it; functions of background work, such as heartbeats, do not count. Modules and functions of all
processes that a request passes are counted together.

Run: ``python scripts/count_modules.py [--list] [--case NAME]``.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import daskserve as serve
from daskserve.cluster.dask.launch import start_local_cluster
from daskserve.common.settings import LocalClusterSize

REQUESTS = 100
#: The profiler of a process: an attribute of a module that all processes have imported.
PLACE = "daskserve_entered"


class Echo:
    """The deployment under test, with a plain method."""

    def __call__(self, value: Any) -> str:
        return "ok"


def watch_thread(module: Any = sys) -> None:
    """Count the functions that the current thread enters, and those of all threads that start later."""
    entered = module.__dict__.setdefault(PLACE, {})

    def enter(frame: Any, event: str, _: Any) -> None:
        # The continuation of a coroutine is not counted as an entry.
        if event == "call" and frame.f_lasti < 8:
            code = frame.f_code
            path = code.co_filename.replace("/proxies/", "/daskserve/proxies/")
            if "/daskserve/" in path and "/scripts/" not in path:
                key = path.rpartition("/daskserve/")[2], code.co_qualname
                entered[key] = entered.get(key, 0) + 1

    threading.setprofile(enter)
    sys.setprofile(enter)


async def watch_loop() -> None:
    """Start counting on the event loop of a process."""
    watch_thread()


def take_counts() -> dict[tuple[str, str], int]:
    """Return how often the functions of this process were entered since the last call."""
    entered = sys.__dict__[PLACE]
    found = dict(entered)
    entered.clear()
    return found


def count(dask: Any, request: Callable[[], object]) -> list[list[tuple[str, str]]]:
    """Return the modules and functions that each request enters, in each process, in the order of entry."""
    for _ in range(REQUESTS):
        request()
    take_counts()
    dask.run(take_counts)
    for _ in range(REQUESTS):
        request()
    processes = (take_counts(), *dask.run(take_counts).values())
    return [[key for key, times in entered.items() if times >= 0.9 * REQUESTS] for entered in processes]


def getter(url: str) -> Callable[[], object]:
    """Return a function that sends a GET over a persistent connection."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))

    def get() -> bytes:
        connection.request("GET", "/")
        response = connection.getresponse()
        assert response.status == 200
        return response.read()

    return get


def case_of(name: str) -> list[list[tuple[str, str]]]:
    """Return the functions that a request of one case enters, by process."""
    cluster, dask = start_local_cluster(LocalClusterSize(2, 2), has_dashboard=False)
    dask.run(watch_loop)
    watch_thread()
    dask.loop.add_callback(watch_thread)
    location = "NoServer" if name == "handle" else "HeadOnly"
    try:
        with serve.start(http_options={"location": location, "port": 0}, dask_client=dask) as client:
            workers = sorted(dask.scheduler_info()["workers"])
            if name == "handle":
                echo = serve.deployment(name="echo", actor_options={"workers": workers[:1]})(Echo)
                handle = serve.run(echo.bind(), route_prefix=None)
                return count(dask, lambda: handle.remote(1).result())
            (url,) = client.http_urls()
            head = [each for each in workers if _holds_proxy(client, each)]
            others = [each for each in workers if each not in head]
            echo = serve.deployment(
                name="echo", actor_options={"workers": head if name == "get" else others}
            )(Echo)
            serve.run(echo.bind())
            return count(dask, getter(url))
    finally:
        sys.setprofile(None)
        dask.close()
        cluster.close()


def _holds_proxy(client: Any, worker: str) -> bool:
    return any(each.kind == "proxy" and each.worker == worker for each in client.status().actors)


CASES = {
    "get": "a warm GET, the replica in the proxy's process",
    "hop": "a warm GET, the replica in another process",
    "handle": "handle.remote(...).result() from another process",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="list the functions")
    parser.add_argument("--case", choices=CASES, help="only this case")
    arguments = parser.parse_args()
    for name, title in CASES.items():
        if arguments.case in (None, name):
            found = sorted({each for process in case_of(name) for each in process})
            print(f"{title}: {len({module for module, _ in found})} modules, {len(found)} functions")
            if arguments.list:
                print_functions(found)


def print_functions(found: Iterable[tuple[str, str]]) -> None:
    """Print the functions of each module."""
    by_module: dict[str, list[str]] = {}
    for module, function in found:
        by_module.setdefault(module, []).append(function)
    for module, functions in by_module.items():
        print(f"  {module:52} {', '.join(functions)}")


if __name__ == "__main__":
    main()
