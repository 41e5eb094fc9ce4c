"""SIGTERM to `dask worker` programs under load, as systemd, Kubernetes and job schedulers send it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from clusters import Load, running
from dask_processes import Program, dask_command, dask_scheduler, within
from distributed import Client

import daskserve as serve


def start_worker(address: str, folder: Path, name: str) -> Program:
    """Start a worker, with a nanny if that is its name."""
    options = ["--no-dashboard", "--host", "127.0.0.1", "--nthreads", "2", "--name", name]
    options.append("--nanny" if name == "nanny" else "--no-nanny")
    return Program(dask_command("worker", address, *options), folder, keeps_stdin=True)


def half_a_second(request: Any) -> str:
    time.sleep(0.5)
    return "done"


@pytest.mark.nightly
def test_sigterm_to_one_worker_after_the_other_fails_no_request(tmp_path: Path) -> None:
    with ExitStack() as stack:
        address = stack.enter_context(dask_scheduler(tmp_path))
        programs = {name: start_worker(address, tmp_path, name) for name in ("nanny", "plain", "last")}
        for each in programs.values():
            stack.callback(each.kill)
        dask = stack.enter_context(Client(address, set_as_default=False))
        dask.wait_for_workers(3, timeout=60)
        http: Any = {"port": 0, "server": "asyncio", "location": "EveryWorker"}
        client = stack.enter_context(serve.start(dask_client=dask, http_options=http))
        config: Any = {"num_replicas": 3, "max_concurrent_queries": 10}
        client.create_backend("b", half_a_second, config=config)
        client.create_endpoint("e", backend="b", route="/e")
        url = client.http_urls()[0]

        with Load(url) as load:
            # The nanny and all of its processes, as systemd does for a service.
            service = programs["nanny"]
            for each in (psutil.Process(service.process.pid), *service.descendants()):
                os.kill(each.pid, signal.SIGTERM)
            assert service.wait(30) == 0, service.report()
            load.more(5)
            programs["plain"].process.terminate()
            assert programs["plain"].wait(30) == 0, programs["plain"].report()
            load.more(5)
            assert client.http_urls() == [url]
            assert len(running(client, "b")) == 3
        assert load.failures == []
        # The last worker has nobody to wait for.
        programs["last"].process.terminate()
        with within(15):
            assert programs["last"].wait() == 0, programs["last"].report()
