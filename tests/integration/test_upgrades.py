"""An instance on a new cluster takes over the store and the port of the one before it, under load."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from clusters import Load
from dask_processes import fetch
from distributed import Client, LocalCluster

import daskserve as serve


@contextmanager
def dask_cluster() -> Iterator[Client]:
    """Yield a client of a cluster in this process, which starts in a moment."""
    options: dict[str, Any] = {"processes": False, "protocol": "tcp", "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(n_workers=1, threads_per_worker=4, **options) as cluster:
        with Client(cluster, set_as_default=False) as client:
            yield client


def answer(request: Any) -> str:
    return "ok"


def test_a_new_cluster_takes_over_and_no_request_fails(tmp_path: Path) -> None:
    options: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/store.db", "name": "upgraded"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        health_port = free.getsockname()[1]
    http: dict[str, Any] = {"port": 0, "health_port": health_port}
    health = f"http://127.0.0.1:{health_port}/-/healthz"
    with dask_cluster() as old_dask, dask_cluster() as new_dask:
        old = serve.start(dask_client=old_dask, http_options=http, **options)
        old.create_backend("b", answer, config={"num_replicas": 2})
        old.create_endpoint("e", backend="b", route="/e")
        (url,) = old.http_urls()
        assert fetch(health).status == 200
        with Load(url) as load:
            http |= {"port": urlsplit(url).port, "take_over": True}
            new = serve.start(dask_client=new_dask, http_options=http, **options)
            assert new.http_urls() == [url]
            # It listens when all replicas run, not earlier.
            assert [each.state for each in new.status().replicas("b")] == ["RUNNING", "RUNNING"]
            old.shutdown()
            load.more()
            assert fetch(health).status == 200
            new.update_backend_config("b", {"num_replicas": 1})
            load.more()
        assert load.failures == []
        new.shutdown()
        with pytest.raises(ConnectionRefusedError):
            fetch(health)
