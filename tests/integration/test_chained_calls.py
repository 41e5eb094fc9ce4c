"""Responses as arguments between processes: large results go directly from worker to worker."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from clusters import nannied_cluster, pids, running
from dask_processes import poll_for
from distributed import Client

import daskserve as serve
from daskserve.cluster.distributed_internals import actors_on
from daskserve.errors import ActorLostError, UnavailableError

MIB = 1 << 20
LARGE_BYTES = 50 * MIB

CALLER = f"""
import sys, time
from distributed import Client
import daskserve as serve
with Client(sys.argv[1]) as dask:
    client = serve.connect(dask_client=dask)
    made = client.get_handle("maker").remote({LARGE_BYTES})
    print(client.get_handle("reader").remote(made).result(20)[1], flush=True)
    time.sleep(60)
"""


class Maker:
    def __call__(self, size: int) -> np.ndarray[Any, Any]:
        return np.ones(size, dtype=np.uint8)


class Reader:
    def __call__(self, array: Any) -> tuple[int, int]:
        return os.getpid(), int(array.sum())


def kept_here(dask_worker: Any) -> int:
    links: list[Any] = [actor.connection for actor in actors_on(dask_worker) if hasattr(actor, "connection")]
    return sum(len(connection._registry.kept) for connection in links)


def kept(dask: Client) -> int:
    """Return the number of results that stay in the workers."""
    return sum(dask.run(kept_here).values())


@pytest.fixture(scope="module")
def dask() -> Iterator[Client]:
    with nannied_cluster(2) as client:
        yield client


@pytest.fixture(scope="module")
def client(dask: Client) -> Iterator[serve.Client]:
    with serve.start(dask_client=dask, detached=True, http_options={"location": "NoServer"}) as client:
        client.deploy("maker", Maker)
        client.deploy("reader", Reader, config={"num_replicas": 2})
        client.deploy("isolated", Reader, config={"isolation": "process"})
        yield client
        client.shutdown()


def test_a_large_result_reaches_all_replicas_but_not_the_caller(dask: Client, client: serve.Client) -> None:
    maker, reader = client.get_handle("maker"), client.get_handle("reader")
    assert reader.remote(maker.remote(1)).result(20)[1] == 1  # both workers are connected
    connection: Any = client._connection.cluster_connection
    before = connection.channels._traffic.received_bytes
    made = maker.remote(LARGE_BYTES)
    found = reader.broadcast("__call__", made).results(20)
    assert {pid for pid, _ in found} == set(pids(dask).values())
    assert [total for _, total in found] == [LARGE_BYTES] * 2
    assert client.get_handle("isolated").remote(made).result(20)[1] == LARGE_BYTES
    assert connection.channels._traffic.received_bytes - before < MIB
    assert kept(dask) == 1
    del made
    gc.collect()
    poll_for(lambda: kept(dask) == 0, what=lambda: kept(dask))


def test_a_killed_caller_leaves_no_result_behind(dask: Client, client: serve.Client) -> None:
    command = [sys.executable, "-c", CALLER, dask.scheduler_info()["address"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline().strip() == str(LARGE_BYTES)
        assert kept(dask) == 1
        program.kill()
    poll_for(lambda: kept(dask) == 0, what=lambda: kept(dask))


def failure_of_reading(client: serve.Client, made: serve.handle.Response) -> str:
    """Return the error of a call with a lost result; None if its own replica was lost, too."""
    with pytest.raises(UnavailableError) as caught:
        client.get_handle("reader").remote(made).result(30)
    return "" if isinstance(caught.value, ActorLostError) else str(caught.value)


def test_a_result_is_lost_with_its_worker(dask: Client, client: serve.Client) -> None:
    made = client.get_handle("maker").remote(LARGE_BYTES)
    poll_for(made.done, what=lambda: made)
    (worker,) = running(client, "maker")
    os.kill(pids(dask)[worker], signal.SIGKILL)
    poll_for(lambda: re.search("which is lost|no longer has a result", failure_of_reading(client, made)))
