"""Addresses without a Dask scheduler and closed connections give one clear error soon."""

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
NO_GRACE = "import dask; dask.config.set({'daskserve.scheduler.grace-s': 0})"


@pytest.fixture(autouse=True)
def short_timeouts() -> Iterator[None]:
    """Shorten the connect timeout and the owner's grace period to 0.5 s; both defaults are 5 s."""
    with dask.config.set({"daskserve.timeouts": {"connect-s": 0.5, "grace-s": 0.5}}):
        yield


def assert_unreachable(address: str) -> None:
    for call in (serve.start, serve.connect):
        with pytest.raises(ClusterUnreachableError) as caught, within(3):
            call(address=address)
        assert f"No Dask scheduler answers at {address!r}" in str(caught.value)
        assert "such as tcp://host:8786" in str(caught.value)
    assert _get_global_client() is None


def test_an_address_without_a_listener_is_unreachable() -> None:
    with listener() as port:
        pass
    assert_unreachable(f"tcp://127.0.0.1:{port}")


def test_a_silent_server_is_unreachable() -> None:
    with listener() as port:
        assert_unreachable(f"tcp://127.0.0.1:{port}")


def test_an_http_server_is_unreachable(client: serve.Client, url: str) -> None:
    """For example, the port of the dashboard or of daskserve itself, given by mistake."""
    assert_unreachable(url.replace("http", "tcp"))
    assert_unreachable(url)


def test_a_worker_address_is_refused(external: ExternalCluster) -> None:
    """A worker is a Dask server, but not a scheduler."""
    assert_unreachable(next(iter(external.client.scheduler_info(n_workers=-1)["workers"])))


def test_an_invalid_address_is_refused() -> None:
    for address in ("", "no address at all", "tcp://", "udp://127.0.0.1:1", "tls://127.0.0.1:1"):
        assert_unreachable(address)


def test_a_failed_connection_is_closed(external: ExternalCluster, client: serve.Client) -> None:
    """A failed call by address does not leave its Dask client as the default client."""
    with pytest.raises(NotRunningError, match=f"{external.address}; start one"):
        serve.connect(address=external.address, name="another")
    port = int(client.http_urls()[0].rpartition(":")[2])
    with pytest.raises(PortInUseError):
        serve.start(address=external.address, http_options={"port": port})
    assert _get_global_client() is None
    with pytest.raises(NotRunningError, match=r"pass address=\.\.\."):
        serve.connect()


def test_start_accepts_an_address(external: ExternalCluster) -> None:
    with serve.start(address=external.address, http_options=NO_SERVER) as client:
        assert client.list_backends() == {}
    # The connection becomes the program's default client, as after distributed.Client(address).
    default = _get_global_client()
    assert default is not None
    default.close()


def test_a_closed_dask_client_is_reported(external: ExternalCluster) -> None:
    """A start through a closed client and a call after its close raise at once."""
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
    # The instance ends like one whose owner vanished: after its grace period.
    external.assert_clean(10)


@pytest.mark.nightly
def test_calls_fail_soon_after_the_scheduler_is_lost(tmp_path: Path) -> None:
    """If the cluster dies and no program waits for it, calls fail within seconds; shutdown still works."""
    with ExitStack() as stack:
        stack.enter_context(dask.config.set({"daskserve.scheduler.grace-s": 0}))
        with dask_scheduler(tmp_path) as address:
            worker = stack.enter_context(dask_worker(address, tmp_path, prelude=NO_GRACE))
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
