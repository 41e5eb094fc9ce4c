"""The table of failures, on real processes: the results for callers when processes die, hang or leave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from clusters import (
    WORKERS,
    Load,
    nannied_cluster,
    pid_of_replica,
    pids,
    replica_without_proxy,
    restore,
    running,
    serve_pids,
    worker_of,
)
from dask_processes import dask_worker, fetch, poll_for
from distributed import Client

import daskserve as serve
from daskserve import stores
from daskserve.errors import StoreLostError

EPHEMERAL = {"http_options": {"port": 0}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Client]:
    with nannied_cluster(WORKERS) as dask:
        yield dask


@pytest.fixture
def dask(cluster: Client) -> Client:
    """Return a cluster of four workers, whatever earlier tests have done to it."""
    restore(cluster)
    return cluster


def incarnations(client: serve.Client, backend: str = "b") -> set[str]:
    return {actor.name for actor in client.status().replicas(backend)}


@pytest.mark.smoke
@pytest.mark.parametrize("server", ["tornado", pytest.param("asyncio", marks=pytest.mark.nightly)])
def test_a_killed_replica_is_replaced_and_no_get_fails(server: str, dask: Client) -> None:
    with serve.start(dask_client=dask, http_options={"port": 0, "server": server}) as client:
        with Load(serve_pids(client), connections=16) as load:
            victim = replica_without_proxy(client)
            os.kill(pids(dask)[victim], signal.SIGKILL)
            poll_for(lambda: len(running(client, "b")) == 2 and victim not in running(client, "b"))
            load.more()
        assert load.failures == []


@pytest.mark.parametrize("is_busy", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_killed_controller_is_replaced_while_requests_continue(
    is_busy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Two workers are left; busy task threads do not delay the recovery, and no ping has to fail first."""
    with nannied_cluster(3) as dask, serve.start(dask_client=dask, **EPHEMERAL) as client:
        with Load(serve_pids(client)) as load:
            before = incarnations(client)
            if is_busy:
                sleeping = dask.map(time.sleep, [20] * 6, pure=False)
                poll_for(lambda: sum(map(len, dask.processing().values())) >= 6)
            victim = worker_of(client, "controller")
            assert victim not in running(client, "b")
            os.kill(pids(dask)[victim], signal.SIGKILL)
            assert client.get_backend_config("b").num_replicas == 2
            assert incarnations(client) == before, "living replicas are adopted, not restarted"
            client.create_backend("after", pid_of_replica)
            load.more()
            if is_busy:
                dask.cancel(sleeping)
        assert load.failures == []
        assert client.status().epoch == 2
        assert "does not answer" not in caplog.text  # the supervisor, which is in this process


class Holds:
    """Holds a request until a file exists, and creates a file when it is deleted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def __call__(self, request: Any) -> str:
        (self.folder / "begun").touch()
        while not (self.folder / "go").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        return "done"

    def __del__(self) -> None:
        (self.folder / "gone").touch()


@pytest.mark.nightly
def test_a_draining_replica_ends_although_its_controller_died(tmp_path: Path) -> None:
    """It finishes its requests in flight, and then leaves nothing in its worker."""

    def threads() -> dict[str, list[str]]:
        def look() -> list[str]:
            return [each.name for each in threading.enumerate() if each.name.startswith("daskserve-held#")]

        return {worker: found for worker, found in dask.run(look).items() if found}

    with nannied_cluster(3) as dask, serve.start(dask_client=dask, **EPHEMERAL) as client:
        client.create_backend("held", Holds, tmp_path)
        client.create_endpoint("held", backend="held")
        request = client.get_handle("held").remote()
        poll_for((tmp_path / "begun").exists)
        victim = worker_of(client, "controller")
        assert victim not in running(client, "held")
        client.delete_endpoint("held")
        client.delete_backend("held", blocking=False)
        poll_for(lambda: not running(client, "held"))
        assert threads() != {}
        os.kill(pids(dask)[victim], signal.SIGKILL)
        poll_for(lambda: client.status().epoch == 2)
        (tmp_path / "go").touch()
        assert request.result(10) == "done"
        poll_for(lambda: threads() == {}, 10, what=threads)
        assert (tmp_path / "gone").exists()
        poll_for(lambda: "held" not in client.list_backends())


@pytest.mark.nightly
def test_a_stopped_controller_is_replaced_and_is_harmless_when_resumed(dask: Client) -> None:
    with serve.start(dask_client=dask, **EPHEMERAL) as client:
        serve_pids(client)
        before = incarnations(client)
        pid = pids(dask)[worker_of(client, "controller")]
        os.kill(pid, signal.SIGSTOP)
        try:
            client.create_backend("after", pid_of_replica)
            assert client.status().epoch == 2
        finally:
            os.kill(pid, signal.SIGCONT)

        def actors() -> list[str]:
            found: dict[str, list[str]] = dask.run(_actors_on)
            return [name for names in found.values() for name in names]

        poll_for(lambda: sum(name.endswith("/controller") for name in actors()) == 1, what=actors)
        client.update_backend_config("b", {"num_replicas": 1})
        assert incarnations(client) < before
        assert client.status().epoch == 2


def _actors_on(dask_worker: Any) -> list[str]:
    return [
        name
        for actor in dask_worker.state.actors.values()
        if type(actor).__name__ == "Host"
        for name in actor.registry.entries
    ]


@pytest.mark.smoke
def test_retiring_a_worker_moves_its_replicas_first(dask: Client) -> None:
    with serve.start(dask_client=dask, **EPHEMERAL) as client:
        with Load(serve_pids(client)) as load:
            victim = replica_without_proxy(client)
            assert victim in dask.retire_workers([victim])
            assert len(running(client, "b")) == 2
            assert victim not in running(client, "b")
            load.more()
        assert load.failures == []


def test_retiring_the_controllers_worker_moves_the_controller(dask: Client) -> None:
    with serve.start(dask_client=dask, **EPHEMERAL) as client:
        with Load(serve_pids(client, num_replicas=1)) as load:
            victim = worker_of(client, "controller")
            assert victim in dask.retire_workers([victim])
            assert worker_of(client, "controller") != victim
            client.create_backend("after", pid_of_replica)
            load.more()
        assert load.failures == []


@pytest.mark.nightly
def test_the_end_of_a_worker_lifetime_fails_no_request(tmp_path: Path) -> None:
    def workers() -> dict[str, Any]:
        return dict(dask.scheduler_info(n_workers=-1)["workers"])

    def grown() -> list[str]:
        client.update_backend_config("b", {"num_replicas": len(running(client, "b")) + 1})
        return running(client, "b")

    with nannied_cluster(2) as dask, serve.start(dask_client=dask, **EPHEMERAL) as client:
        url = serve_pids(client, num_replicas=1)
        with dask_worker(dask.scheduler.address, tmp_path, name="mortal", extra=("--lifetime", "8 seconds")):
            mortal = poll_for(lambda: [key for key, each in workers().items() if each["name"] == "mortal"])[0]
            poll_for(lambda: mortal in grown())
            with Load(url) as load:
                poll_for(lambda: mortal not in workers(), 30)
                load.more()
        assert load.failures == []
        poll_for(lambda: mortal not in running(client, "b"))


@pytest.mark.nightly
def test_waiting_replicas_make_an_adaptive_cluster_grow() -> None:
    with nannied_cluster(1) as dask, serve.start(dask_client=dask, **EPHEMERAL) as client:
        dask.cluster.adapt(minimum=1, maximum=3, interval="100ms", wait_count=2)
        client.create_backend(
            "b", pid_of_replica, config={"num_replicas": 3}, actor_options={"num_cpus": 2}, timeout_s=25
        )
        assert len(set(running(client, "b"))) == 3


@pytest.mark.nightly
def test_an_adaptive_cluster_without_workers_starts_its_first_one() -> None:
    with nannied_cluster(0) as dask:
        dask.cluster.adapt(minimum=0, maximum=2, interval="100ms", wait_count=2)
        with serve.start(dask_client=dask, **EPHEMERAL) as client:
            assert fetch(f"{serve_pids(client, num_replicas=1)}/e").status == 200
            assert len(dask.scheduler_info(n_workers=-1)["workers"]) == 1


@pytest.mark.nightly
def test_restarting_the_cluster_brings_all_deployments_back() -> None:
    """A separate cluster, because Dask waits for as many workers as it had nannies, retired ones too."""
    with nannied_cluster(2) as dask, serve.start(dask_client=dask, **EPHEMERAL) as client:
        url = serve_pids(client)
        dask.restart()

        def answers() -> bool:
            try:
                return fetch(f"{url}/e", timeout_s=2.0).status == 200
            except OSError:
                return False

        poll_for(answers)
        poll_for(lambda: len(running(client, "b")) == 2)


@pytest.mark.nightly
def test_the_idle_timeout_does_not_end_a_served_cluster() -> None:
    import dask

    # Long enough for a slow machine to start a cluster, which counts as idle during the start.
    with dask.config.set({"distributed.scheduler.idle-timeout": "5s"}):
        with nannied_cluster(1) as client_of_dask:
            with serve.start(dask_client=client_of_dask, **EPHEMERAL) as client:
                url = serve_pids(client, num_replicas=1)
                time.sleep(6.5)  # longer than the timeout, to show that nothing happens
                assert fetch(f"{url}/e").status == 200
            scheduler = client_of_dask.cluster.scheduler
            poll_for(lambda: scheduler.idle_timeout == 5.0)
            scheduler.idle_timeout = None  # closing the cluster fails if the scheduler has already closed


@pytest.mark.smoke
@pytest.mark.parametrize("scheme", ["sqlite", pytest.param("file", marks=pytest.mark.nightly)])
def test_a_new_cluster_on_an_old_store_brings_all_deployments_back(scheme: str, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/store.db" if scheme == "sqlite" else f"file://{tmp_path}/store"
    options: dict[str, Any] = {"name": "lasting", "store": store, **EPHEMERAL}
    with nannied_cluster(2) as dask:
        client = serve.start(dask_client=dask, **options)
        serve_pids(client)
        client.update_backend_config("b", {"user_config": None, "num_replicas": 1})
        for path in tmp_path.iterdir():
            path.rename(path.with_name(f"lost-{path.name}"))
        with pytest.raises(StoreLostError, match="removed"):
            client.create_endpoint("headless", backend="b")
        assert "store" in client.status().problems
        assert client.rewrite_store() > 0
        assert client.status().problems == {}
        client.create_endpoint("headless", backend="b")
        epoch = client.status().epoch
        port = urlsplit(client.http_urls()[0]).port
        dask.cluster.close()  # everything dies at once, without a shutdown of the instance
    with (
        socket.create_server(("127.0.0.1", port)),  # another program has its automatic port by now
        nannied_cluster(2) as dask,
        serve.start(dask_client=dask, **options) as client,
    ):
        poll_for(lambda: len(running(client, "b")) == 1)
        assert fetch(f"{client.http_urls()[0]}/e").status == 200
        assert set(client.list_endpoints()) == {"e", "headless"}
        assert client.status().epoch > epoch


@pytest.mark.nightly
def test_requests_to_damaged_code_get_503_until_it_is_deployed_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    options: dict[str, Any] = {"name": "damaged", "store": url, **EPHEMERAL}

    def deploy(client: serve.Client) -> None:
        client.deploy("pid", pid_of_replica, version="1")

    with nannied_cluster(1) as dask:
        deploy(serve.start(dask_client=dask, **options))
        dask.cluster.close()  # everything dies at once
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
        db.execute("UPDATE daskserve_records SET value = x'00' WHERE key LIKE 'code/%'")
    (found,) = stores.check(url).instances.values()
    assert list(found.problems) == ["code/pid@1"]
    with nannied_cluster(1) as dask, serve.start(dask_client=dask, **options) as client:
        address = f"{client.http_urls()[0]}/pid"
        answer = fetch(address, timeout_s=10)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "its code is lost or cannot be loaded; it has to be deployed again" in answer.text
        deploy(client)
        assert fetch(address).status == 200
        assert client.status().problems == {}
