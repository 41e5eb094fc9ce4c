"""A running instance needs no free task threads on its workers."""

from __future__ import annotations

import time
from pathlib import Path

from dask_processes import ExternalCluster, fetch, poll_for

import daskserve as serve


def test_deploying_on_fully_busy_workers(
    external: ExternalCluster, client: serve.Client, url: str, tmp_path: Path
) -> None:
    """Create, call, update and delete use no task thread."""
    go = tmp_path / "go"
    dask = external.client
    threads = sum(dask.nthreads().values())
    busy = [dask.submit(poll_for, go.exists, pure=False) for _ in range(threads + 2)]
    try:
        poll_for(lambda: sum(map(len, dask.processing().values())) >= threads)
        started = time.monotonic()
        client.create_backend("echo", "served.echo", config={"num_replicas": 4})
        client.create_endpoint("echo", backend="echo", route="/echo")
        assert fetch(f"{url}/echo?text=quick").text == "quick"
        assert client.get_handle("echo").remote(text="quick").result(5) == "quick"
        client.update_backend_config("echo", {"num_replicas": 1})
        client.delete_endpoint("echo")
        client.delete_backend("echo")
        assert time.monotonic() - started < 1
        assert not any(future.done() for future in busy)
    finally:
        go.touch()
        dask.gather(busy)
