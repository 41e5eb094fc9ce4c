"""Applications on a cluster: handles between processes, programs that find each other's, nothing restarts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dask_processes import ExternalCluster, fetch
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
