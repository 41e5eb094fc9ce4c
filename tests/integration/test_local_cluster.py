"""The local cluster of processes that daskserve starts for programs without a cluster."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from dask_processes import alive, fetch, is_listening, poll_for, wait_until_gone, within
from distributed.client import _get_global_client

import daskserve as serve
from daskserve.cluster.dask import launch, server_process
from daskserve.cluster.dask.supervised_worker import _Subprocess
from daskserve.testing import wait_until


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    """Yield an instance that was started without a cluster."""
    before = psutil.Process().children(recursive=True)
    options = {
        "daskserve.local-cluster": {"n-workers": 2, "threads-per-worker": 3},
        "distributed.nanny.environ.OF_THE_WORKERS": "yes",
    }
    with dask.config.set(options), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")  # as a nanny that the program started before does
        client = serve.start(http_options={"port": 0}, dashboard=False)
    started = [each for each in psutil.Process().children(recursive=True) if each not in before]
    with client:
        yield client
    wait_until_gone(started, 5)
    assert _get_global_client() is None


def test_a_local_cluster_has_the_configured_size(client: serve.Client) -> None:
    default = _get_global_client()
    assert default is not None
    assert sorted(default.nthreads().values()) == [3, 3]


@pytest.mark.smoke
def test_workers_of_a_local_cluster_run_on_uvloop(client: serve.Client) -> None:
    default = _get_global_client()
    assert default is not None
    loops = default.run(lambda dask_worker: type(dask_worker.loop.asyncio_loop).__module__)
    assert set(loops.values()) == {"uvloop"}


@pytest.mark.smoke
def test_modules_of_the_program_can_be_imported_in_workers(client: serve.Client) -> None:
    """Also by import path: the workers have the program's ``sys.path``."""
    client.create_backend("pids", lambda request: os.getpid(), config={"num_replicas": 4})
    client.create_backend("path", "served.Counter")
    for tag in ("pids", "path"):
        client.create_endpoint(tag, backend=tag, route=f"/{tag}")
    (url,) = client.http_urls()
    # Two replicas in each worker, so that calls also reach replicas on the worker without the proxy.
    handle = client.get_handle("pids")
    found = {handle.remote().result() for _ in range(50)} | {fetch(f"{url}/path").json[0]}
    assert os.getpid() not in found
    assert len(found) == 2


def test_instances_share_a_local_cluster_until_the_last_ends(client: serve.Client) -> None:
    """A second start uses the cluster of the first; shutting it down does not affect the first."""
    with serve.start(http_options={"port": 0}) as second:
        assert second.scheduler_address == client.scheduler_address
        with serve.start(detached=True, http_options={"port": 0}):
            assert serve.connect().scheduler_address == client.scheduler_address
    assert is_listening(client.http_urls()[0])


def test_dasks_profiler_is_off_in_its_processes(client: serve.Client) -> None:
    dask_client = _get_global_client()
    assert dask_client is not None

    def is_profiled() -> bool:
        return bool(dask.config.get("distributed.worker.profile.enabled"))

    assert set(dask_client.run(is_profiled).values()) == {False}
    assert is_profiled()  # nothing has changed in the program


def test_its_workers_have_the_variables_of_dasks_configuration(client: serve.Client) -> None:
    dask_client = _get_global_client()
    assert dask_client is not None
    for variables in dask_client.run(lambda: dict(os.environ)).values():
        assert (variables["OF_THE_WORKERS"], variables["OMP_NUM_THREADS"]) == ("yes", "1")
        assert "MALLOC_TRIM_THRESHOLD_" not in variables


def test_a_local_cluster_whose_workers_cannot_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local and detached starts raise soon and leave nothing of the cluster."""
    default = _get_global_client()
    before = psutil.Process().children(recursive=True)
    monkeypatch.setattr(server_process, "_MAIN", "import sys; sys.exit(3)")
    size = launch.LocalClusterSize(n_workers=2, threads_per_worker=1)
    for start in (launch.start_local_cluster, launch.start_detached_cluster):
        with (
            pytest.raises(serve.errors.InstanceError, match=r"could not be started \(exit status 3\)"),
            within(5),
        ):
            start(size, has_dashboard=False)
        assert _get_global_client() is default
        poll_for(lambda: alive(psutil.Process().children(recursive=True)) == alive(before), 5)


STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


async def test_a_worker_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    ignores, ends = tmp_path / "ignores", []
    command = [sys.executable, "-S", "-c", STUBBORN, str(ignores)]
    process = _Subprocess(command, "w", lambda status, lived_s: ends.append(status))
    await process.start({})
    await wait_until(ignores.exists)
    await process.kill(timeout=0.05)
    assert (ends, process.is_alive()) == ([-signal.SIGKILL], False)


def worker_pids() -> set[int]:
    """Return the processes of the local cluster's workers."""
    found = set()
    for each in alive(psutil.Process().children()):
        with suppress(psutil.Error):
            if any("SupervisedWorker" in part for part in each.cmdline()):
                found.add(each.pid)
    return found


@pytest.mark.nightly
def test_workers_that_die_come_back(client: serve.Client) -> None:
    """Whatever ends them, with and without requests, one or all. Retired workers do not come back."""

    @serve.deployment(name="mortal")
    class Mortal:
        def __call__(self, request: Any) -> int:
            if "end" in request.query_params:
                os._exit(0)
            return os.getpid()

        def pid(self) -> int:
            return os.getpid()

    handle = serve.run(Mortal.bind(), name="mortal", route_prefix="/mortal")
    (url,) = client.http_urls()
    default = _get_global_client()
    assert default is not None

    def answers() -> bool:
        try:
            return fetch(f"{url}/mortal").status == 200
        except OSError:
            return False

    def check(dead: set[int]) -> None:
        """Wait for new workers in place of the dead ones, and for their answers."""
        poll_for(lambda: not dead & worker_pids() and len(worker_pids()) == 2)
        poll_for(answers)
        assert handle.pid.remote().result(20) in worker_pids()
        default.wait_for_workers(2, timeout=20)

    victim = handle.pid.remote().result(20)
    with suppress(OSError):
        fetch(f"{url}/mortal?end")  # its retry may end the other one, too
    check({victim})
    before = worker_pids()
    for pid, number in zip(before, (signal.SIGKILL, signal.SIGTERM), strict=True):
        os.kill(pid, number)
    check(before)
    before = worker_pids()
    default.restart(timeout=20)
    check(before)
    retired = next(iter(default.run(os.getpid)))
    assert retired in default.retire_workers([retired])
    poll_for(lambda: len(worker_pids()) == 1)
    assert handle.pid.remote().result(20) in worker_pids()
    assert len(worker_pids()) == 1
