"""The effects of each fault of user code, in both kinds of isolation.

Setup: four workers with nannies, one of them for the controller and the proxy (``system_workers``). On each
of the others are a replica of a backend under load, from connections that send one GET after another, and a
replica of the backend with the fault. A single GET triggers the fault. Measured: its response, the number of
worker processes that ended, of replicas with the fault that were replaced, and of requests of the load that
failed, the longest request of the load, and the time until all replicas run again.

Run: ``python benchmarks/bench_faults.py [--faults NAME,...] [--isolation thread,process] [--async]``. It
prints a line per case, and exits with 1 if a request of the load failed.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from distributed import Client, LocalCluster

import daskserve as serve

WORKERS = 4
CONNECTIONS = 4
REPLICAS = 3
MEMORY = "450 MiB"
#: Detection of a hanging replica within about 2 s instead of 35 s.
QUICK = {"health_check_period_s": 0.5, "health_check_timeout_s": 0.5, "health_check_threshold": 2}
TIMEOUT_S = 30.0


def exit_at_once(_: Any) -> str:
    os._exit(3)


def sys_exit(_: Any) -> str:
    sys.exit(3)


class Unusual(BaseException):
    pass


def base_exception(_: Any) -> str:
    raise Unusual("not an Exception")


def fork(_: Any) -> str:
    child = os.fork()
    if not child:
        time.sleep(0.2)
        os._exit(0)
    os.waitpid(child, 0)
    return "forked"


def fork_that_returns(_: Any) -> str:
    """Fork, and let the child continue as if it were the parent."""
    return f"from {os.fork()}"


def use_pool(_: Any) -> str:
    """Compute in forked processes, and end them by a signal."""
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:  # the end of the block terminates it
        return str(pool.map(abs, [-1, 2]))


def leave_fork(_: Any) -> str:
    """Leave a forked process behind, then end this process."""
    if not os.fork():
        time.sleep(20)
        os._exit(0)
    os._exit(3)


def set_signal_handler(_: Any) -> str:
    signal.signal(signal.SIGTERM, lambda *_: None)
    return "set"


def raise_signal(_: Any) -> str:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    return "survived"


def hold_interpreter(_: Any) -> str:
    ctypes.PyDLL(None).usleep(10_000_000)  # PyDLL keeps the interpreter's lock
    return "held"


def crash(_: Any) -> str:
    ctypes.string_at(0)
    return "survived"


def never_return(_: Any) -> str:
    threading.Event().wait()
    return "never"


def start_thread(_: Any) -> str:
    """Start a thread that never ends."""
    threading.Thread(target=threading.Event().wait).start()
    return "started"


def fill_memory(_: Any) -> str:
    held = []
    for _ in range(40):
        held.append(bytearray(os.urandom(1 << 20) * 20))
        time.sleep(0.05)
    return f"holds {len(held)}"


def recurse(_: Any) -> str:
    def deeper(depth: int) -> int:
        return deeper(depth + 1) + 1

    return str(deeper(0))


FAULTS: dict[str, Callable[[Any], str]] = {
    each.__name__: each
    for each in (
        exit_at_once,
        crash,
        sys_exit,
        base_exception,
        recurse,
        fork,
        fork_that_returns,
        use_pool,
        leave_fork,
        set_signal_handler,
        raise_signal,
        hold_interpreter,
        never_return,
        start_thread,
        fill_memory,
    )
}


def fine(_: Any) -> str:
    return "fine"


class Fault:
    """A backend with a fault."""

    def __init__(self, name: str) -> None:
        self._fault = FAULTS[name]

    def __call__(self, request: Any) -> str:
        return self._fault(request)


class AsyncFault:
    """The same in async code."""

    def __init__(self, name: str) -> None:
        self._fault = FAULTS[name]

    async def __call__(self, request: Any) -> str:
        return self._fault(request)


class Load:
    """GETs over keep-alive connections, with their times and failures."""

    def __init__(self, url: str, path: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)
        self._path = path
        self.failures: list[str] = []
        self.longest_s = 0.0
        self.answered = 0
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(CONNECTIONS)]

    def __enter__(self) -> Load:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join()

    def _run(self) -> None:
        connection = HTTPConnection(*self._address, timeout=TIMEOUT_S)
        while not self._is_over.is_set():
            began = time.monotonic()
            try:
                connection.request("GET", self._path)
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 200:
                    self.failures.append(f"{answer.status} {body[:80]!r}")
            except OSError as error:
                self.failures.append(repr(error))
                connection.close()
            self.answered += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            time.sleep(0.01)
        connection.close()


def get(url: str, timeout_s: float = TIMEOUT_S) -> str:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port or 0, timeout=timeout_s)
    began = time.monotonic()
    try:
        connection.request("GET", f"{parts.path}?{parts.query}")
        answer = connection.getresponse()
        answer.read()
        what = str(answer.status)
    except OSError as error:
        what = type(error).__name__
    finally:
        connection.close()
    return f"{what} after {time.monotonic() - began:.1f} s"


def is_whole(client: serve.Client) -> bool:
    return all(each.status == "HEALTHY" for each in client.status().backends.values())


def once(name: str, isolation: str, is_async: bool) -> bool:
    with (
        LocalCluster(  # type: ignore[no-untyped-call]
            n_workers=WORKERS,
            threads_per_worker=2,
            memory_limit=MEMORY,
            dashboard_address=None,
            protocol="tcp",
            silence_logs=50,
        ) as cluster,
        Client(cluster) as dask,  # type: ignore[no-untyped-call]
        serve.start(http_options={"port": 0, "system_workers": ["0"]}, dask_client=dask) as client,
    ):
        config = {"isolation": isolation, **QUICK}
        client.create_backend(
            "faulty", AsyncFault if is_async else Fault, name, config={**config, "num_replicas": REPLICAS}
        )
        client.create_endpoint("faulty", backend="faulty", route="/faulty")
        client.create_backend("fine", fine, config={"num_replicas": WORKERS - 1})
        client.create_endpoint("fine", backend="fine", route="/fine")
        url = client.http_urls()[0]
        before = dask.run(os.getpid)
        tags = {each.name for each in client.status().replicas("faulty")}
        with Load(url, "/fine") as load:
            time.sleep(0.5)
            base_s, load.longest_s = load.longest_s, 0.0
            began = time.monotonic()
            answer = get(f"{url}/faulty?poison=1")
            time.sleep(0.5)
            while not is_whole(client) and time.monotonic() - began < 60:
                time.sleep(0.02)
            whole_s = time.monotonic() - began
            time.sleep(1.0)
        after = dask.run(os.getpid)
        lost = len(set(before.values()) - set(after.values()))
        replaced = len(tags - {each.name for each in client.status().replicas("faulty")})
        print(
            f"{name:20} {isolation:8} {'async' if is_async else 'plain':6} {answer:24} workers lost {lost}  "
            f"replicas replaced {replaced}  others failed {len(load.failures)} of {load.answered}, longest "
            f"{load.longest_s * 1000:.0f} ms (before: {base_s * 1000:.0f})  whole after {whole_s:.1f} s",
            flush=True,
        )
        for each in load.failures[:3]:
            print("    ", each, flush=True)
        return not load.failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--isolation", default="thread,process")
    parser.add_argument("--async", dest="is_async", action="store_true", help="faults in async code")
    given = parser.parse_args()
    cases = [(name, each) for name in given.faults.split(",") for each in given.isolation.split(",")]
    held = [once(name, isolation, given.is_async) for name, isolation in cases]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
