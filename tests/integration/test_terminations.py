"""SIGTERM to `dask worker` programs under load, as systemd, Kubernetes and job schedulers send it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from clusters import Load, running, worker_of
from dask_processes import Program, dask_command, dask_scheduler, within
from distributed import Client

import daskserve as serve


def start_worker(address: str, folder: Path, name: str) -> Program:
    """Start a worker with a nanny."""
    options = ["--no-dashboard", "--host", "127.0.0.1", "--nthreads", "2", "--name", name]
    return Program(dask_command("worker", address, *options), folder, keeps_stdin=True)


def half_a_second(request: Any) -> str:
    time.sleep(0.5)
    return "done"


def test_sigterm_to_one_worker_after_the_other_fails_no_request(tmp_path: Path) -> None:
    with ExitStack() as stack:
        address = stack.enter_context(dask_scheduler(tmp_path))
        programs = {name: start_worker(address, tmp_path, name) for name in ("a", "b", "c")}
        for each in programs.values():
            stack.callback(each.kill)
        dask = stack.enter_context(Client(address, set_as_default=False))
        dask.wait_for_workers(3, timeout=60)
        names = {key: each["name"] for key, each in dask.scheduler_info(n_workers=-1)["workers"].items()}
        http: Any = {"port": 0, "server": "uvicorn"}
        client = stack.enter_context(serve.start(dask_client=dask, http_options=http))
        config: Any = {"num_replicas": 2, "max_concurrent_queries": 10, "isolation": "process"}
        client.create_backend("b", half_a_second, config=config)
        client.create_endpoint("e", backend="b", route="/e")
        url = client.http_urls()[0]

        with Load(url) as load:
            # The nanny and all of its processes, as systemd does for a service.
            service = programs[names[worker_of(client, "proxy")]]
            for each in (psutil.Process(service.process.pid), *service.descendants()):
                os.kill(each.pid, signal.SIGTERM)
            assert service.wait(30) == 0, service.report()
            load.more(5)
            # The nanny alone, as the first process of a container.
            container = programs[names[worker_of(client, "controller")]]
            container.process.terminate()
            assert container.wait(30) == 0, container.report()
            load.more(5)
            assert client.http_urls() == [url]
            assert len(running(client, "b")) == 2
        assert load.failures == []
        # The last worker has nobody to wait for.
        (last,) = (each for each in programs.values() if each.process.poll() is None)
        last.process.terminate()
        with within(15):
            assert last.wait() == 0, last.report()
