"""User code that ends, blocks or forks its process: only its own requests are affected."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from clusters import Load, nannied_cluster, pids, running, worker_of
from dask_processes import fetch, poll_for
from distributed import Client

import daskserve as serve


class Odd(BaseException):
    pass


class Faulty:
    def __call__(self, request: Any) -> str:
        fault = request.query_params.get("fault")
        if fault == "exit":
            os._exit(3)
        if fault == "sys.exit":
            sys.exit(3)
        if fault == "BaseException":
            raise Odd("not an Exception")
        if fault == "fork":
            child = os.fork()
            if not child:
                time.sleep(20)
                os._exit(0)
            return f"{os.getpid()} {child}"
        return f"{os.getpid()} {os.fork()}" if fault == "return twice" else str(os.getpid())


@pytest.fixture(scope="module")
def dask() -> Iterator[Client]:
    with nannied_cluster(4) as client:
        yield client


@pytest.fixture
def served(dask: Client) -> Iterator[serve.Client]:
    options = {"port": 0, "system_workers": ["0"]}
    with serve.start(http_options=options, dask_client=dask) as client:
        yield client


def deploy(client: serve.Client, isolation: str = "thread") -> str:
    config = {"num_replicas": 3, "isolation": isolation}
    client.create_backend("b", Faulty, config=config)
    client.create_endpoint("e", backend="b", route="/e")
    return client.http_urls()[0]


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.nightly)])
def test_a_request_that_ends_its_process_twice_fails_no_other(
    served: serve.Client, dask: Client, isolation: str
) -> None:
    url = deploy(served, isolation)
    own = worker_of(served, "proxy")
    assert worker_of(served, "controller") == own
    assert own not in running(served, "b")
    workers, replicas = set(pids(dask).values()), names(served)
    with Load(url) as load:
        assert fetch(f"{url}/e?fault=exit").status == 502
        load.more()
        poll_for(lambda: len(replicas - names(served)) == 2 and len(running(served, "b")) == 3, 20)
        poll_for(lambda: len(pids(dask)) == 4, 20)
        load.more()
    assert load.failures == []
    lost = workers - set(pids(dask).values())
    assert len(lost) == (2 if isolation == "thread" else 0)
    assert len(replicas - names(served)) == 2
    assert worker_of(served, "proxy") == own


def names(client: serve.Client) -> set[str]:
    return {each.name for each in client.status().replicas("b")}


@pytest.mark.nightly
@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.nightly)])
def test_exits_and_forks_in_a_handler_cost_nothing(
    served: serve.Client, dask: Client, isolation: str
) -> None:
    url = deploy(served, isolation)
    before = names(served)
    with Load(url) as load:
        for fault in ("sys.exit", "BaseException"):
            assert fetch(f"{url}/e?fault={fault}").status == 500
        parent, child = map(int, fetch(f"{url}/e?fault=return+twice").text.split())
        assert child, "the parent answers"
        assert parent != child
        poll_for(lambda: not is_running(child), 10)
        load.more()
    assert load.failures == []
    assert names(served) == before


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.nightly
def test_a_process_that_a_handler_forked_keeps_no_connection_and_no_port_open(dask: Client) -> None:
    with serve.start(http_options={"port": 0}, dask_client=dask) as client:
        url = deploy(client)
        worker = worker_of(client, "proxy")
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port), timeout=8) as connection:
            connection.sendall(b"GET /e HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
            parent, child = map(int, fetch(f"{url}/e?fault=fork").text.split())
            try:
                assert parent == pids(dask)[worker], "the replica in the proxy's process answers"
                os.kill(parent, signal.SIGKILL)
                assert connection.recv(10_000) == b"", "the connection ends with the worker"
                poll_for(lambda: answers(url), 15, what="the next proxy has not the same port")
                assert is_running(child)
            finally:
                os.kill(child, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        return fetch(f"{url}/e").status == 200
    except OSError:
        return False
