"""Applications on a cluster: handles between processes, programs that find each other's, nothing restarts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dask_processes import ExternalCluster, fetch, poll_for
from distributed import Client

import daskserve as serve


@pytest.fixture(scope="module")
def cluster(dask_cluster: ExternalCluster) -> Iterator[ExternalCluster]:
    with Client(dask_cluster.address):
        yield dask_cluster
        serve.shutdown()


@serve.deployment
class Model:
    def __init__(self, more: int) -> None:
        self.more = more

    def __call__(self, number: int) -> tuple[int, int]:
        return number + self.more, os.getpid()

    def pid(self) -> int:
        return os.getpid()


@serve.deployment
class Ingress:
    def __init__(self, model: serve.Handle, pids: dict[str, serve.Handle]) -> None:
        self.model, self.pids = model, pids

    async def __call__(self, request: Any) -> dict[str, Any]:
        number, pid = await self.model.remote(int(request.query_params["n"]))
        return {"n": number, "pid": pid, "own": os.getpid()}

    async def all_pids(self) -> dict[str, int]:
        found = {name: await handle.remote() for name, handle in self.pids.items()}
        own = serve.get_deployment_handle("Model")
        return {**found, "own": os.getpid(), "looked up": await own.pid.remote()}


def application(more: int = 1) -> serve.Application:
    """Return an application of three processes: two children, and a worker."""
    model = Model.options(config={"isolation": "process"}).bind(more)
    other = Model.bind(0)
    ingress = Ingress.options(config={"isolation": "process"})
    return ingress.bind(model, {"model": model.pid, "other": other.pid})


def test_handles_work_in_child_processes_and_workers(cluster: ExternalCluster) -> None:
    handle = serve.run(application(), name="a", route_prefix="/a", http_options={"port": 0})
    (url,) = serve.connect().http_urls()
    answer = fetch(f"{url}/a?n=1").json
    pids = handle.all_pids.remote().result(30)
    assert (answer["n"], answer["pid"], answer["own"]) == (2, pids["model"], pids["own"])
    assert pids["looked up"] == pids["model"]
    assert len({os.getpid(), pids["model"], pids["other"], pids["own"]}) == 4


def test_only_what_changed_restarts(cluster: ExternalCluster) -> None:
    before = serve.run(application(), name="a", route_prefix="/a").all_pids.remote().result(30)
    same = serve.run(application(), name="a", route_prefix="/a").all_pids.remote().result(30)
    assert same == before
    changed = serve.run(application(5), name="a", route_prefix="/a")
    after = changed.all_pids.remote().result(30)
    assert (after["own"], after["other"]) == (before["own"], before["other"])
    assert after["model"] != before["model"]


OTHER_PROGRAM = """
import sys
from distributed import Client
import daskserve as serve

@serve.deployment
class Late:
    def __call__(self, number):
        return number

with Client(sys.argv[1]):
    assert serve.connect().instance_name == sys.argv[2] == serve.status().instance
    print(sorted(serve.get_app_handle("a").all_pids.remote().result(30)))
    print(serve.run(Late.bind(), name="late", route_prefix="/late").remote(3).result(30))
    serve.connect().disconnect()
"""


def test_other_programs_use_the_instance_that_run_started(cluster: ExternalCluster, tmp_path: Path) -> None:
    serve.run(application(), name="a", route_prefix="/a")
    script = tmp_path / "other.py"
    script.write_text(OTHER_PROGRAM)
    command = [sys.executable, str(script), cluster.address, serve.connect().instance_name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines() == ["['looked up', 'model', 'other', 'own']", "3"], ended.stderr
    assert serve.get_app_handle("late").remote(4).result(30) == 4
    (url,) = serve.connect().http_urls()
    serve.delete("late")
    assert fetch(f"{url}/late").status == 404
    assert fetch(f"{url}/a?n=1").status == 200


@serve.deployment
class Waiting:
    """Waits for a file before it calls the model."""

    def __init__(self, model: serve.Handle, folder: Path) -> None:
        self.model, self.folder = model, folder

    def __call__(self, number: int) -> int:
        (self.folder / "began").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.005)
        return int(self.model.remote(number).result(10)[0])


def test_shutdown_drains_an_application_and_keeps_its_records(
    cluster: ExternalCluster, tmp_path: Path
) -> None:
    start = partial(
        serve.start,
        name="drained",
        store=f"sqlite:///{tmp_path}/records.db",
        http_options={"location": "NoServer"},
        dask_client=Client.current(),
    )
    with ThreadPoolExecutor() as threads:
        with start() as client:
            handle = client.run(Waiting.bind(Model.bind(1), tmp_path), route_prefix=None)
            response = handle.remote(4)
            poll_for((tmp_path / "began").exists)
            ending = threads.submit(client.shutdown)
            poll_for(lambda: client.status() == serve.Status())  # the client is closed
            (tmp_path / "go").touch()
            assert response.result(10) == 5
            ending.result(10)
    with start() as client:
        poll_for(lambda: client.status().applications["default"].status == "RUNNING")
        assert client.get_app_handle("default").remote(7).result(10) == 8
        client.delete_application("default")
