"""Shared clusters of real processes for the integration tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dask.config
import pytest
from dask_processes import PATIENCE_S, ExternalCluster, dask_scheduler, dask_worker
from distributed import Client
from distributed.utils import get_mp_context

import daskserve as serve

#: Time limit of a test without the mark ``limit_s``.
LIMIT_S = 60.0


class TooLongError(Exception):
    """A test hangs. Code under test never handles this error."""


@pytest.fixture(autouse=True)
def limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """End a hanging test with an error that shows where it hangs."""
    mark = request.node.get_closest_marker("limit_s")
    limit_s = LIMIT_S if mark is None else mark.args[0]

    def too_long(*_: Any) -> None:
        raise TooLongError(f"the test is still running after {limit_s:g} s")

    previous = signal.signal(signal.SIGALRM, too_long)
    # Repeated, because the test may continue and hang again.
    signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> Iterator[None]:
    """Make SIGINT work as in a terminal, here and in programs that tests start.

    A test run may be a background job of a shell, which ignores SIGINT.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(autouse=True, scope="session")
def _workers_with_imports() -> Iterator[None]:
    """Fork the workers of nannies from a process that has imported their modules, as Dask's own tests do.

    Otherwise each of them takes a second of CPU time to import them.
    """
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        context: Any = get_mp_context()
        context.set_forkserver_preload(["distributed", "daskserve.actors", "daskserve.cluster.worker.host"])
        yield


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
    """Yield the external cluster; check after a module's last test that nothing is left on it."""
    yield dask_cluster
    dask_cluster.assert_clean(PATIENCE_S)


@pytest.fixture
def external(clean_cluster: ExternalCluster) -> Iterator[ExternalCluster]:
    """Yield the external cluster; check after the test that nothing of daskserve is left on it."""
    yield clean_cluster
    try:
        clean_cluster.assert_clean(PATIENCE_S, topics=False)
    except BaseException:
        clean_cluster.sweep()  # leftovers must not fail the next tests
        raise


@pytest.fixture
def server(request: pytest.FixtureRequest) -> str:
    """Return the HTTP server to use; a test may parametrize this fixture indirectly."""
    return str(getattr(request, "param", "tornado"))


@pytest.fixture
def client(external: ExternalCluster, server: str) -> Iterator[serve.Client]:
    """Yield a new instance on the external cluster, on a free port."""
    with serve.start(dask_client=external.client, http_options={"port": 0, "server": server}) as client:
        yield client


@pytest.fixture
def url(client: serve.Client) -> str:
    """Return the URL of the instance's only proxy."""
    (only,) = client.http_urls()
    return only
