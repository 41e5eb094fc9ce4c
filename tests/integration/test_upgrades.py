"""An instance on a new cluster takes over the store and the port of the old instance, under load."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from clusters import Load, nannied_cluster, pid_of_replica, pids, running, worker_of
from dask_processes import HERE, Program, fetch, poll_for, within
from distributed import Client, LocalCluster
from ports import free_port

import daskserve as serve
from daskserve.errors import PortInUseError, StoreTakenError


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
    health_port = free_port()
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
            # It listens once all replicas run, not earlier.
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


@pytest.mark.nightly
def test_an_instance_keeps_its_store_until_another_one_serves_and_continues_without_it(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/store.db", "name": "shared"}
    with nannied_cluster(2) as old_dask, dask_cluster() as new_dask:
        old = serve.start(dask_client=old_dask, http_options={"port": 0}, **options)
        old.create_backend("b", pid_of_replica, config={"num_replicas": 2})
        old.create_endpoint("e", backend="b", route="/e")
        (url,) = old.http_urls()
        port = urlsplit(url).port
        with pytest.raises(PortInUseError):
            serve.start(dask_client=new_dask, http_options={"port": port}, **options)
        old.update_backend_config("b", {"max_concurrent_queries": 3})
        assert old.status().owns_store

        new = serve.start(dask_client=new_dask, http_options={"port": free_port()}, **options)
        with within(5):
            with pytest.raises(StoreTakenError, match="Another cluster has taken over the store"):
                old.update_backend_config("b", {"num_replicas": 1})
        assert new.get_backend_config("b").max_concurrent_queries == 3
        new.update_backend_config("b", {"num_replicas": 1})
        poll_for(lambda: not old.status().owns_store)
        poll_for(lambda: b"taken over" in fetch(f"{url}/-/healthz").body)

        victim = next(each for each in running(old, "b") if each != worker_of(old, "proxy"))
        os.kill(pids(old_dask)[victim], signal.SIGKILL)
        poll_for(lambda: victim not in running(old, "b") and len(running(old, "b")) == 2)
        assert fetch(f"{url}/e").status == 200
        old.shutdown()
        new.update_backend_config("b", {"num_replicas": 2})
        new.shutdown()


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["at its claim", "at any moment"])
def test_a_cluster_that_is_killed_while_it_takes_over_leaves_one_that_serves(
    when: str, tmp_path: Path
) -> None:
    """The next start finds all acknowledged changes."""
    path = tmp_path / "store.db"
    options: dict[str, Any] = {"store": f"sqlite:///{path}", "name": "shared"}
    with dask_cluster() as old_dask, dask_cluster() as next_dask:
        old = serve.start(dask_client=old_dask, http_options={"port": 0}, **options)
        old.create_backend("b", answer)
        old.create_endpoint("e", backend="b", route="/e")
        acknowledged = 3
        old.update_backend_config("b", {"max_concurrent_queries": acknowledged})
        (url,) = old.http_urls()
        with contextlib.closing(sqlite3.connect(path)) as store:
            newest = "SELECT max(epoch) FROM daskserve_epochs"
            before = store.execute(newest).fetchone()
            program = [str(HERE / "taking_over.py"), options["store"], str(free_port())]
            taking = Program(program, tmp_path)
            try:
                taking.wait_for_line("begins")
                if when == "at its claim":
                    poll_for(lambda: store.execute(newest).fetchone() != before, every_s=0.0005)
                else:
                    time.sleep(random.Random().uniform(0, 1.5))
                taking.process.kill()
            finally:
                taking.kill()

        assert fetch(f"{url}/e").status == 200
        try:
            old.update_backend_config("b", {"max_concurrent_queries": 5})
            acknowledged = 5
        except StoreTakenError:
            pass  # what was killed had the store
        assert fetch(f"{url}/e").status == 200
        new = serve.start(dask_client=next_dask, http_options={"port": free_port()}, **options)
        assert new.get_backend_config("b").max_concurrent_queries == acknowledged
        new.update_backend_config("b", {"max_concurrent_queries": 7})
        with pytest.raises(StoreTakenError):
            old.update_backend_config("b", {"max_concurrent_queries": 9})
        (url,) = new.http_urls()
        assert fetch(f"{url}/e").status == 200
        old.shutdown()
        assert new.get_backend_config("b").max_concurrent_queries == 7
        new.shutdown()
