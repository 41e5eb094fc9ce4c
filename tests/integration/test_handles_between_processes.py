"""Handles in the classic API between real processes (rows CL32 and CL35)."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from dask_processes import ExternalCluster

import daskserve as serve


class Echo:
    """Returns the parameter ``text`` of a request."""

    def __call__(self, request: Any) -> str:
        return request.query_params.get("text")

    def other(self, request: Any) -> str:
        return f"other {self(request)}"


@pytest.fixture
def echo(client: serve.Client) -> serve.Handle:
    client.create_backend("echo", Echo)
    client.create_endpoint("echo", backend="echo")
    return client.get_handle("echo")


def test_a_handle_works_inside_a_dask_task(external: ExternalCluster, echo: serve.Handle) -> None:
    """CL35: pickled into plain tasks on every worker."""

    def task(handle: serve.Handle, number: int) -> list[Any]:
        return [os.getpid(), handle.remote(text=number).result(10)]

    workers = list(external.client.scheduler_info(n_workers=-1)["workers"])
    futures = [
        external.client.submit(task, echo, number, workers=[workers[number % 2]], pure=False)
        for number in range(4)
    ]
    found = external.client.gather(futures)
    assert [text for _, text in found] == [0, 1, 2, 3]
    assert len({pid for pid, _ in found}) == 2


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


def test_threads_that_tasks_and_replicas_start_are_connected(
    external: ExternalCluster, client: serve.Client, echo: serve.Handle
) -> None:
    """They have no context of Dask or daskserve, but their process has only one worker."""

    def task(handle: serve.Handle) -> Any:
        return in_thread(lambda: handle.remote(text="x").result(10))

    assert external.client.submit(task, echo, pure=False).result() == "x"
    client.create_backend("names", lambda request: in_thread(lambda: serve.connect().list_backends()))
    client.create_endpoint("names", backend="names")
    assert set(client.get_handle("names").remote().result(10)) == {"echo", "names"}


def test_an_unpickled_handle_uses_the_default_client(external: ExternalCluster, echo: serve.Handle) -> None:
    """CL35: without a default client, the error names the remedy."""
    copy = pickle.loads(pickle.dumps(echo.options(method_name="other")))
    with pytest.raises(serve.errors.ServeError, match=r"create a distributed\.Client"):
        copy.remote(text="x")
    with external.client.as_current():
        assert copy.remote(text="x").result(10) == "other x"
