"""Operations that cannot succeed fail soon with a clear error, leave nothing behind, and can be retried."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dask
import pytest
from dask_processes import (
    ExternalCluster,
    dask_scheduler,
    dask_worker,
    fetch,
    listener,
    poll_for,
    within,
)
from distributed import Client
from starlette.middleware import Middleware

import daskserve as serve
from daskserve.errors import PortInUseError

NO_SERVER = {"location": "NoServer"}


def assert_works(client: serve.Client, tag: str) -> None:
    """Check that the same name works with a valid callable."""
    client.create_backend(tag, lambda request: "good")
    client.create_endpoint(tag, backend=tag)
    assert client.get_handle(tag).remote().result(10) == "good"


# ---- starting


@pytest.mark.parametrize(
    "shares_port", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["exclusive", "SO_REUSEPORT"]
)
@pytest.mark.parametrize("location", ["HeadOnly", pytest.param("EveryWorker", marks=pytest.mark.nightly)])
def test_a_taken_port_is_named_in_the_error(
    shares_port: bool, location: str, external: ExternalCluster
) -> None:
    """The error names the port and the remedy; with a free port the same start works."""
    with listener(shares_port=shares_port) as port:
        options = {"port": port, "location": location}
        with pytest.raises(PortInUseError, match=f'127.0.0.1:{port} is in use.*"port"') as caught, within(5):
            serve.start(http_options=options, dask_client=external.client)
        assert isinstance(caught.value, (ValueError, OSError))
        external.assert_clean(topics=False)
    with serve.start(http_options=options, dask_client=external.client) as client:
        assert client.http_urls() == [f"http://127.0.0.1:{port}"]


def test_the_port_of_another_instance_is_refused(external: ExternalCluster, client: serve.Client) -> None:
    """Two instances cannot share a port; the first one is not affected."""
    port = int(client.http_urls()[0].rpartition(":")[2])
    for detached in (False, True):
        with pytest.raises(PortInUseError, match=str(port)), within(5):
            serve.start(detached=detached, http_options={"port": port}, dask_client=external.client)
    assert fetch(f"{client.http_urls()[0]}/-/routes").status == 200
    # The failed detached instance does not block a new one.
    serve.start(detached=True, http_options={"port": 0}, dask_client=external.client).shutdown()


class RaisingMiddleware:
    def __init__(self, app: Any) -> None:
        raise RuntimeError("no such database")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "203.0.113.7", "port": 0}, "203.0.113.7.*not an address of this machine"),
        ({"host": "no.such.host.invalid", "port": 0}, "no.such.host.invalid.*does not resolve"),
        ({"middlewares": [Middleware(RaisingMiddleware)], "port": 0}, "no such database"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_http_options_are_refused(
    options: dict[str, Any], message: str, external: ExternalCluster
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message), within(10):
        serve.start(http_options=options, dask_client=external.client)


def test_start_refuses_invalid_arguments(external: ExternalCluster) -> None:
    with pytest.raises(ValueError, match="carrier-pigeon://loft"):
        serve.start(store="carrier-pigeon://loft", http_options=NO_SERVER, dask_client=external.client)
    with pytest.raises(TypeError, match="http_options must be"):
        serve.start(http_options=8000, dask_client=external.client)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="either dask_client or address"):
        serve.start(address=external.address, dask_client=external.client)
    with (
        dask.config.set({"daskserve.timeouts.chnage-s": 1}),
        pytest.raises(ValueError, match=r"daskserve\.timeouts\.chnage_s, which is not an option"),
    ):
        serve.start(http_options=NO_SERVER, dask_client=external.client)
    with (
        dask.config.set({"daskserve.controller.callback": "nowhere:callback"}),
        pytest.raises(
            ValueError, match=r"daskserve\.controller\.callback='nowhere:callback' failed: .* no module"
        ),
        within(5),
    ):
        serve.start(http_options=NO_SERVER, dask_client=external.client)


@pytest.mark.nightly
def test_clusters_without_workers_or_with_busy_workers_are_refused(tmp_path: Path) -> None:
    """First there is no worker, then no free task thread. With a free thread, the same call works."""
    with ExitStack() as stack:
        address = stack.enter_context(dask_scheduler(tmp_path))
        dask_client = stack.enter_context(Client(address, set_as_default=False))
        with (
            pytest.raises(serve.errors.InstanceError, match=f"{address} has no workers; add one"),
            within(5),
        ):
            serve.start(http_options=NO_SERVER, dask_client=dask_client)
        stack.enter_context(dask_worker(address, tmp_path, threads=1))
        dask_client.wait_for_workers(1)
        go = tmp_path / "go"
        busy = dask_client.submit(lambda: poll_for(go.exists))
        poll_for(lambda: any(dask_client.processing().values()))
        with (
            dask.config.set({"daskserve.timeouts.proxy-s": 1}),
            pytest.raises(serve.errors.InstanceError, match=r"free task thread for 1 s.*add workers"),
            within(5),
        ):
            serve.start(http_options=NO_SERVER, dask_client=dask_client)
        assert (
            dask_client.run_on_scheduler(lambda dask_scheduler: [*dask_scheduler.plugins]).count(
                "daskserve-supervisor"
            )
            == 0
        )
        go.touch()
        busy.result(10)
        with serve.start(http_options=NO_SERVER, dask_client=dask_client) as client:
            assert_works(client, "tag")


# ---- servers that use a Dask client


#: Makes the first Dask client of daskserve in a process fail to connect.
_FIRST_CLIENT_FAILS = """
import distributed
import daskserve.cluster.{module} as module

class FailsOnce(distributed.Client):
    has_failed = False
    async def _start(self, *args, **kwargs):
        if not FailsOnce.has_failed:
            FailsOnce.has_failed = True
            raise OSError("no route to the scheduler")
        return await super()._start(*args, **kwargs)

module.Client = FailsOnce
"""


@pytest.mark.nightly
@pytest.mark.parametrize("module", ["scheduler.supervisor", "worker.host"])
def test_a_client_that_fails_to_connect_once_fails_only_one_start(module: str, tmp_path: Path) -> None:
    prelude = _FIRST_CLIENT_FAILS.format(module=module)
    of_scheduler, of_worker = (prelude, "") if module == "scheduler.supervisor" else ("", prelude)
    with ExitStack() as stack:
        address = stack.enter_context(dask_scheduler(tmp_path, prelude=of_scheduler))
        stack.enter_context(dask_worker(address, tmp_path, prelude=of_worker))
        dask_client = stack.enter_context(Client(address, set_as_default=False))
        dask_client.wait_for_workers(1)
        with (
            pytest.raises((OSError, serve.errors.InstanceError), match="no route to the scheduler"),
            within(10),
        ):
            serve.start(http_options=NO_SERVER, dask_client=dask_client)
        with serve.start(http_options=NO_SERVER, dask_client=dask_client) as client:
            assert_works(client, "tag")
