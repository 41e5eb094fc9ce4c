"""Processes that user code starts, in workers of nannies and in processes of replicas."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil
import pytest
from clusters import nannied_cluster
from dask_processes import alive, poll_for

import daskserve as serve

LIMIT_S = 30
METHODS = ("fork", "spawn", "forkserver")


class Starts:
    """Starts processes in the usual ways."""

    def __call__(self, request: Any) -> None: ...

    def pool(self, method: str) -> Any:
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
            return list(pool.map(math.factorial, range(4)))

    async def load(self, method: str) -> Any:
        """Fetch values from daemonic processes through queues, as loaders of training data do."""
        context: Any = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            return pool.map(math.factorial, range(4))

    def leave(self, method: str) -> list[int]:
        """Leave a process running; return the ids of its parent and itself."""
        context: Any = multiprocessing.get_context(method)
        child = context.Process(target=time.sleep, args=(600,))
        child.start()
        return [os.getpid(), child.pid]


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    with nannied_cluster(n_workers=1) as dask_client:
        with serve.start(dask_client=dask_client, http_options={"port": 0}) as client:
            yield client


@pytest.mark.smoke
@pytest.mark.parametrize("isolation", ["process", pytest.param("thread", marks=pytest.mark.nightly)])
def test_user_code_may_start_processes_which_end_with_their_worker(
    isolation: str, client: serve.Client
) -> None:
    config = {"isolation": isolation, "max_concurrent_queries": 3}
    client.deploy(isolation, Starts, config=config, route_prefix=None)
    starts = client.get_handle(isolation)
    for method in METHODS:
        assert starts.pool.remote(method).result(LIMIT_S) == [1, 1, 2, 6]
        assert starts.load.remote(method).result(LIMIT_S) == [1, 1, 2, 6]
    parent, children = 0, []
    for method in METHODS:
        parent, child = starts.leave.remote(method).result(LIMIT_S)
        children.append(psutil.Process(child))
    os.kill(parent, signal.SIGKILL)
    poll_for(lambda: not alive(children), what=children)
