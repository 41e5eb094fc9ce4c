"""Isolated backends on a real cluster: child processes, environments, and their end (row CL58)."""

from __future__ import annotations

import os
import signal
import sysconfig
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from dask_processes import ExternalCluster, alive, dask_worker, fetch, poll_for, wait_until_gone

import daskserve as serve
from daskserve.errors import BadRequestError

ISOLATED = {"isolation": "process"}


def worker_pids(external: ExternalCluster) -> set[int]:
    return set(external.client.run(os.getpid).values())


class Model:
    """Returns its process id and its constructor argument."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def __call__(self, request: Any) -> list[Any]:
        import sys

        return [os.getpid(), sys.prefix]

    def connected(self) -> Any:
        """Call another backend through ``serve.connect()``."""
        return serve.connect().get_handle("inner").remote(text="plain").result(5)

    async def handed_on(self) -> Any:
        """Call another backend by the handle from the constructor."""
        return await self.inner.remote(text="async")

    def in_own_thread(self) -> Any:
        """Call another backend by the handle in a thread that has no context of the replica."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: self.inner.remote(text="thread").result(5)).result()


class Trouble(Exception):
    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason, code)
        self.code = code


def pid_of(url: str) -> int:
    reply = fetch(url)
    assert reply.status == 200, reply
    return int(reply.json[0])


def test_an_isolated_backend_answers_from_a_process_that_ends_with_it(
    client: serve.Client, url: str, external: ExternalCluster
) -> None:
    client.create_backend("model", Model, config=serve.config.BackendConfig(**ISOLATED))
    client.create_endpoint("model", backend="model", route="/model")
    pid = pid_of(f"{url}/model")
    workers = worker_pids(external)
    assert pid not in workers
    child = psutil.Process(pid)
    assert child.ppid() in workers
    assert client.get_handle("model").remote().result(5)[0] == pid
    assert client.get_backend_config("model").isolation == "process"
    with pytest.raises(BadRequestError, match="cannot be changed in place"):
        client.update_backend_config("model", {"isolation": "thread"})
    client.delete_endpoint("model")
    client.delete_backend("model")
    assert alive([child]) == []


def test_handles_and_connect_work_inside(client: serve.Client, url: str, external: ExternalCluster) -> None:
    client.create_backend("inner", "served.echo")
    client.create_endpoint("inner", backend="inner")
    outer = client.get_handle("inner")
    client.create_backend("outer", Model, outer, config=ISOLATED)
    client.create_endpoint("outer", backend="outer")
    handle = client.get_handle("outer")
    assert handle.options(method_name="connected").remote().result(10) == "plain"
    assert handle.options(method_name="handed_on").remote().result(10) == "async"
    assert handle.options(method_name="in_own_thread").remote().result(10) == "thread"


def test_errors_reach_the_caller_with_their_own_type(client: serve.Client) -> None:
    def fail(request: Any) -> None:
        raise Trouble("what went wrong", 7)

    def relay(request: Any) -> list[Any]:
        try:
            serve.connect().get_handle("fails").remote().result(5)
        except Trouble as error:
            return [error.code, str(error.__cause__)]
        return []

    here = {"workers": ["worker-0"]}
    client.create_backend("fails", fail, config=ISOLATED, actor_options=here)
    client.create_endpoint("fails", backend="fails")
    client.create_backend("relay", relay, actor_options=here)
    client.create_endpoint("relay", backend="relay")
    status, cause = client.get_handle("relay").remote().result(5)  # to a replica in its own worker
    assert status == 7
    assert "in fail" in cause
    with pytest.raises(Trouble) as caught:
        client.get_handle("fails").remote().result(5)
    assert caught.value.code == 7
    assert "in fail" in str(caught.value.__cause__)


def test_a_killed_process_is_replaced(client: serve.Client, url: str, external: ExternalCluster) -> None:
    client.create_backend("model", Model, config=ISOLATED)
    client.create_endpoint("model", backend="model", route="/model")
    first = pid_of(f"{url}/model")
    os.kill(first, signal.SIGKILL)
    began = time.monotonic()
    # GET requests are retried or wait, so none of them fails.
    second = pid_of(f"{url}/model")
    assert second != first
    assert time.monotonic() - began < 10
    assert psutil.Process(second).ppid() in worker_pids(external)


@pytest.mark.nightly
def test_processes_end_with_a_killed_worker(external: ExternalCluster, tmp_path: Path) -> None:
    def child_pid(request: Any) -> int:
        return os.getpid()

    with dask_worker(external.address, tmp_path, name="doomed") as doomed:
        poll_for(lambda: len(external.client.scheduler_info(n_workers=-1)["workers"]) == 3)
        with serve.start(dask_client=external.client, http_options={"location": "NoServer"}) as client:
            client.create_backend("model", child_pid, config=ISOLATED, actor_options={"workers": ["doomed"]})
            client.create_endpoint("model", backend="model")
            child = psutil.Process(client.get_handle("model").remote().result(5))
            doomed.process.kill()
            wait_until_gone([child], 5)


def make_environment(folder: Path, *paths: Path | str) -> str:
    """Create a virtualenv without pip that also finds the packages of other folders."""
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    lines = (f"import site; site.addsitedir({str(path)!r})\n" for path in paths)
    (packages / "more.pth").write_text("".join(lines))
    return str(folder)


@pytest.mark.nightly
def test_backends_and_deployments_run_in_their_own_environments(
    client: serve.Client, url: str, tmp_path: Path
) -> None:
    """CL58: a different environment replaces the replicas; a change of the config does not."""

    def prefix(request: Any) -> list[Any]:
        import sys

        return [os.getpid(), sys.prefix]

    ours = sysconfig.get_path("purelib")
    one, two = make_environment(tmp_path / "one", ours), make_environment(tmp_path / "two", ours)
    client.create_backend("classic", prefix, env=one)
    client.create_endpoint("classic", backend="classic", route="/classic")
    assert fetch(f"{url}/classic").json[1] == one
    assert client.get_backend_config("classic").isolation == "process"

    modern = serve.deployment(name="modern", env=one)(prefix)
    client.run(modern.bind(), route_prefix="/modern")
    pid = pid_of(f"{url}/modern")
    client.run(modern.options(max_concurrent_queries=3).bind(), route_prefix="/modern")
    assert fetch(f"{url}/modern").json == [pid, one]
    client.run(modern.options(env=two).bind(), route_prefix="/modern")
    assert fetch(f"{url}/modern").json[1] == two
