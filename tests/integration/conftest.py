"""Clusters shared by the integration tests: real processes, real sockets."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from dask_processes import PATIENCE_S, ExternalCluster, dask_scheduler, dask_worker
from distributed import Client

import daskserve as serve

#: No test waits longer than this for anything.
LIMIT_S = 60


class TooLongError(Exception):
    """A test hangs; no code under test takes this for an error of its own."""


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """End a test that hangs, with the place where it does."""

    def too_long(*_: Any) -> None:
        raise TooLongError(f"the test is still running after {LIMIT_S} s")

    previous = signal.signal(signal.SIGALRM, too_long)
    # Again and again, because the test may go on to the next thing that hangs.
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> Iterator[None]:
    """Let Ctrl-C do here, and in the programs that tests start, what it does in a terminal.

    A shell's background jobs, as a test run may be, have SIGINT ignored.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(scope="session")
def dask_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalCluster]:
    folder: Path = tmp_path_factory.mktemp("external")
    with ExitStack() as stack:
        address = stack.enter_context(dask_scheduler(folder))
        for number in range(2):
            stack.enter_context(dask_worker(address, folder, name=f"worker-{number}"))
        client = stack.enter_context(Client(address, set_as_default=False))
        client.wait_for_workers(2, timeout=30)
        yield ExternalCluster(address, client, folder)


@pytest.fixture(scope="module")
def clean_cluster(dask_cluster: ExternalCluster) -> Iterator[ExternalCluster]:
    """The external cluster, on which nothing at all may be left after the last test of a module."""
    yield dask_cluster
    dask_cluster.assert_clean(PATIENCE_S)


@pytest.fixture
def external(clean_cluster: ExternalCluster) -> Iterator[ExternalCluster]:
    """A cluster that others started, on which nothing of daskserve may be left after the test."""
    yield clean_cluster
    try:
        clean_cluster.assert_clean(PATIENCE_S, topics=False)
    except BaseException:
        clean_cluster.sweep()  # what one test left is not to fail those after it
        raise


@pytest.fixture
def server(request: pytest.FixtureRequest) -> str:
    """What carries HTTP, unless a test is parametrized (indirectly) to try both."""
    return str(getattr(request, "param", "tornado"))


@pytest.fixture
def client(external: ExternalCluster, server: str) -> Iterator[serve.Client]:
    """An instance of its own on the external cluster, on a free port."""
    with serve.start(dask_client=external.client, http_options={"port": 0, "server": server}) as client:
        yield client


@pytest.fixture
def url(client: serve.Client) -> str:
    """Where the instance's only proxy listens."""
    (only,) = client.http_urls()
    return only
