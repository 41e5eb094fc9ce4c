"""Clusters that tests may damage, and load that notices."""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from dask_processes import poll_for
from distributed import Client, LocalCluster

import daskserve as serve


@contextmanager
def nannied_cluster(n_workers: int = 3, **options: Any) -> Iterator[Client]:
    """A cluster of the test's own: in-process scheduler, workers with nannies that start them anew."""
    given = {"threads_per_worker": 2, "dashboard_address": "127.0.0.1:0", "protocol": "tcp", **options}
    with LocalCluster(n_workers=n_workers, **given) as cluster:
        with Client(cluster, set_as_default=False) as client:
            client.wait_for_workers(n_workers, timeout=30)
            yield client


class Load:
    """GET requests over keep-alive connections until it is ended; what fails is kept."""

    def __init__(self, url: str, path: str = "/e", connections: int = 4, timeout_s: float = 15.0) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._is_over = False
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._path = path
        self._timeout_s = timeout_s
        self._threads = [threading.Thread(target=self._run) for _ in range(connections)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        poll_for(lambda: self.answered >= 20, what=lambda: self.failures[:3])
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def more(self, count: int = 50) -> None:
        """Return after so many further answers."""
        until = self.answered + count
        poll_for(lambda: self.answered >= until, what=lambda: f"stalled; failed: {self.failures[:3]}")

    def _run(self) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self._is_over:
            try:
                if connection is None:
                    connection = http.client.HTTPConnection(self._host or "", self._port, self._timeout_s)
                connection.request("GET", self._path)
                response = connection.getresponse()
                text = response.read()
                if response.status == 200:
                    self.answered += 1
                else:
                    self.failures.append(f"{response.status} {text[:100]!r}")
            except OSError as error:
                self.failures.append(repr(error))
                if connection is not None:
                    connection.close()
                connection = None
            except http.client.HTTPException as error:
                self.failures.append(repr(error))
                if connection is not None:
                    connection.close()
                connection = None
        if connection is not None:
            connection.close()


def pids(dask: Client) -> dict[str, int]:
    """Return the process of each worker."""
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
    """Serve a backend that tells its process at ``/e``; return the address."""
    client.create_backend("b", pid_of_replica, config={"num_replicas": num_replicas})
    client.create_endpoint("e", backend="b", route="/e")
    return client.http_urls()[0]


def replica_without_proxy(client: serve.Client) -> str:
    """Return a worker that holds a replica, but neither the proxy nor the controller."""
    others = {worker_of(client, "proxy"), worker_of(client, "controller")}
    return next(worker for worker in running(client, "b") if worker not in others)
