"""Clusters that tests may damage, and a load that records failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from dask_processes import HERE, PATIENCE_S, poll_for
from distributed import Client, LocalCluster
from distributed.core import Status

import daskserve as serve

#: The workers of a cluster that tests share.
WORKERS = 4


@contextmanager
def nannied_cluster(n_workers: int = 3, **options: Any) -> Iterator[Client]:
    """Yield a client of a new cluster: in-process scheduler, workers with nannies that restart them."""
    given = {"threads_per_worker": 2, "dashboard_address": "127.0.0.1:0", "protocol": "tcp", **options}
    with LocalCluster(n_workers=n_workers, **given) as cluster:
        with Client(cluster, set_as_default=False) as client:
            if n_workers:
                client.wait_for_workers(n_workers, timeout=30)
            yield client


def restore(dask: Client, n_workers: int = WORKERS) -> None:
    """Start workers in place of retired ones, and wait for the workers that nannies restart."""
    cluster: Any = dask.cluster
    for name, nanny in list(cluster.workers.items()):
        if nanny.status in (Status.closing_gracefully, Status.closing, Status.closed):
            cluster.sync(nanny.close)
            del cluster.workers[name]
    cluster.scale(n_workers)
    dask.wait_for_workers(n_workers, timeout=30)


class Load:
    """GET requests over keep-alive connections from another process; failures are recorded."""

    def __init__(self, url: str, path: str = "/e", connections: int = 4) -> None:
        self.answered = 0
        self.failures: list[str] = []
        parts = urlsplit(url)
        arguments = [parts.hostname or "", str(parts.port), path, str(connections)]
        self._command = [sys.executable, str(HERE / "load_program.py"), *arguments]

    def __enter__(self) -> Load:
        self._program = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        try:
            self.more(20)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        try:
            self._program.wait(PATIENCE_S)
        finally:
            self._program.kill()
            self._thread.join()
            self._program.wait()

    def more(self, count: int = 50) -> None:
        """Wait for ``count`` more answers."""
        until = self.answered + count
        poll_for(lambda: self.answered >= until, what=lambda: f"stalled; failed: {self.failures[:3]}")

    def _read(self) -> None:
        assert self._program.stdout is not None
        with self._program.stdout as lines:
            for line in lines:
                answered, failures = json.loads(line)
                self.answered += answered
                self.failures += failures


def pids(dask: Client) -> dict[str, int]:
    """Return the process id of each worker."""
    found: dict[str, int] = dask.run(os.getpid)
    return found


def worker_of(client: serve.Client, kind: str) -> str:
    """Return the worker that holds the instance's controller, or its only proxy."""
    (found,) = {actor.worker for actor in client.status().actors if actor.kind == kind}
    assert found is not None
    return found


def running(client: serve.Client, backend: str) -> list[str]:
    """Return the workers that hold a backend's running replicas."""
    return [actor.worker or "" for actor in client.status().replicas(backend) if actor.state == "RUNNING"]


def pid_of_replica(request: Any) -> str:
    return str(os.getpid())


def serve_pids(client: serve.Client, num_replicas: int = 2) -> str:
    """Serve a backend that answers with its process id at ``/e``; return the URL of the proxy."""
    client.create_backend("b", pid_of_replica, config={"num_replicas": num_replicas})
    client.create_endpoint("e", backend="b", route="/e")
    return client.http_urls()[0]


def replica_without_proxy(client: serve.Client) -> str:
    """Return a worker with a replica but without the proxy and the controller."""
    others = {worker_of(client, "proxy"), worker_of(client, "controller")}
    return next(worker for worker in running(client, "b") if worker not in others)
