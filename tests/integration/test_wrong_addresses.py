"""Addresses at which no Dask scheduler answers, and connections that are closed: one clear error, soon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import dask
import pytest
from dask_processes import ExternalCluster, dask_scheduler, dask_worker, listener, within
from distributed import Client
from distributed.client import _get_global_client

import daskserve as serve
from daskserve.errors import ClusterUnreachableError, NotRunningError, PortInUseError

NO_SERVER = {"location": "NoServer"}


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    """Give each attempt a second, and what lost its owner half of one; the defaults are five."""
    with dask.config.set({"daskserve.timeouts": {"connect-s": 1, "grace-s": 0.5}}):
        yield


def assert_unreachable(address: str) -> None:
    for call in (serve.start, serve.connect):
        with pytest.raises(ClusterUnreachableError) as caught, within(4):
            call(address=address)
        assert f"No Dask scheduler answers at {address!r}" in str(caught.value)
        assert "such as tcp://host:8786" in str(caught.value)
    assert _get_global_client() is None


def test_nothing_listens() -> None:
    with listener() as port:
        pass
    assert_unreachable(f"tcp://127.0.0.1:{port}")


def test_silent_server() -> None:
    with listener() as port:
        assert_unreachable(f"tcp://127.0.0.1:{port}")


def test_http_server(client: serve.Client, url: str) -> None:
    """As when the port of the dashboard, or of daskserve itself, is given by mistake."""
    assert_unreachable(url.replace("http", "tcp"))
    assert_unreachable(url)


def test_worker_instead_of_the_scheduler(external: ExternalCluster) -> None:
    """A Dask server, but not the right one."""
    assert_unreachable(next(iter(external.client.scheduler_info(n_workers=-1)["workers"])))


@pytest.mark.parametrize(
    "address", ["", "no address at all", "tcp://", "udp://127.0.0.1:1", "tls://127.0.0.1:1"]
)
def test_no_address(address: str) -> None:
    assert_unreachable(address)


def test_connection_made_in_vain_is_closed(external: ExternalCluster, client: serve.Client) -> None:
    """A failed call by address does not leave its Dask client behind as the default one."""
    with pytest.raises(NotRunningError, match=f"{external.address}; start one"):
        serve.connect(address=external.address)
    port = int(client.http_urls()[0].rpartition(":")[2])
    with pytest.raises(PortInUseError):
        serve.start(address=external.address, http_options={"port": port})
    assert _get_global_client() is None
    with pytest.raises(NotRunningError, match=r"pass address=\.\.\."):
        serve.connect()


def test_start_by_address(external: ExternalCluster) -> None:
    with serve.start(address=external.address, http_options=NO_SERVER) as client:
        assert client.list_backends() == {}
    # The connection is the program's default one, as after distributed.Client(address).
    default = _get_global_client()
    assert default is not None
    default.close()


def test_closed_dask_client(external: ExternalCluster) -> None:
    """Starting through a closed client, and calling after it was closed, say so at once."""
    with Client(external.address, set_as_default=False) as dask_client:
        client = serve.start(http_options={"port": 0}, dask_client=dask_client)
        client.create_backend("tag", "served.echo")
        client.create_endpoint("tag", backend="tag")
        client.get_handle("tag").remote().result(10)
    for call in (client.list_backends, client.status, lambda: client.get_handle("tag")):
        with (
            pytest.raises(ClusterUnreachableError, match=f"client of {external.address} is closed"),
            within(1),
        ):
            call()
    with within(1):
        client.shutdown()
    for start in (serve.start, serve.connect):
        with pytest.raises(ClusterUnreachableError, match=f"{external.address} is closed"), within(1):
            start(dask_client=dask_client)
    # The instance ends as one does whose owner vanished: after its grace.
    external.assert_clean(10)


def test_lost_scheduler(tmp_path: Path) -> None:
    """When the cluster dies under a client, calls fail within seconds and shutdown does no harm."""
    with ExitStack() as stack:
        with dask_scheduler(tmp_path) as address:
            worker = stack.enter_context(dask_worker(address, tmp_path))
            with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
                dask_client = stack.enter_context(Client(address, set_as_default=False, timeout=1))
            dask_client.wait_for_workers(1)
            client = serve.start(http_options=NO_SERVER, dask_client=dask_client)
            client.create_backend("tag", "served.echo")
        worker.wait(10)
        for call in (client.list_backends, lambda: client.create_backend("other", "served.echo")):
            with pytest.raises(ClusterUnreachableError, match=address), within(10):
                call()
        with within(5):
            client.shutdown()
