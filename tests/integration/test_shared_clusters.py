"""Programs that share a cluster: each ends what it has started, and leaves what others have deployed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest
from dask_processes import ExternalCluster, fetch, poll_for
from distributed import Client

import daskserve as serve
from daskserve.client.hosting.hosting import HostingMode, host
from daskserve.client.hosting.sources import Source
from daskserve.client.verbs.applications import RunTarget
from daskserve.errors import AlreadyRegisteredError, BadRequestError, NoCapacityError, ReplicaStartError

#: Serves until it is interrupted, like another user of the cluster.
OTHER = """
import sys
from daskserve.client.verbs.applications import RunTarget
from daskserve.client.hosting.hosting import HostingMode, host
from daskserve.client.hosting.sources import Source
target = RunTarget("served:asgi", "other", "/other")
host(Source((target,)), {"port": 0}, address=sys.argv[1], stay=HostingMode(), report=print)
"""


class Version:
    """Returns its version once a file with that name exists."""

    def __init__(self, number: str, folder: Path | None = None) -> None:
        self.number = int(number)
        if folder is not None:
            (folder / "begun").touch()
            poll_for((folder / "go").exists)

    def __call__(self, request: Any) -> int:
        return self.number


def version(number: str, *arguments: Any, **options: Any) -> serve.Application:
    return serve.deployment(name="version")(Version).options(**options).bind(number, *arguments)


def run(
    external: ExternalCluster, application: Any, *, name: str = "shop", http: Any = None, **how: Any
) -> list[str]:
    """Run the function behind the command, and return its output."""
    lines: list[str] = []
    source = Source((RunTarget(application, name, f"/{name}"),), how.pop("timeout_s", None))
    stay = HostingMode(**how)
    host(source, http or {}, address=external.address, stay=stay, report=lines.append)
    return lines


@contextmanager
def signalled(number: signal.Signals, when: Callable[[], Any]) -> Iterator[None]:
    """Send a signal to this process once a condition is true and the signal has a handler."""

    def send() -> None:
        poll_for(lambda: signal.getsignal(number) is not signal.SIG_DFL and when())
        os.kill(os.getpid(), number)

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        yield
        sending.result()


@pytest.fixture
def shop(external: ExternalCluster) -> Iterator[Callable[[], str]]:
    """Run an application that this program did not start; return a function that gets its answer."""
    (line,) = run(external, version("1"), http={"port": 0}, is_blocking=False)
    what, _, url = line.rpartition(" at ")
    assert what == "Application 'shop' runs"
    assert url.endswith("/shop.")
    try:
        yield lambda: fetch(url.removesuffix(".")).text
    finally:
        serve.connect(dask_client=external.client).shutdown()


def test_a_change_that_fails_leaves_the_previous_state(
    external: ExternalCluster, shop: Callable[[], str], tmp_path: Path
) -> None:
    with signalled(signal.SIGINT, (tmp_path / "begun").exists), pytest.raises(KeyboardInterrupt):
        run(external, version("2", tmp_path), is_blocking=False)
    assert shop() == "1"
    status = serve.connect(dask_client=external.client).status()
    assert (status.applications["shop"].status, status.applications["shop"].message) == ("RUNNING", "")
    with pytest.raises(ReplicaStartError, match="invalid literal"):
        run(external, version("x"), is_blocking=False)
    assert shop() == "1"
    with pytest.raises(NoCapacityError):
        run(external, version("2", ray_actor_options={"num_gpus": 1}), is_blocking=False, timeout_s=0.2)
    assert shop() == "1"
    # If the deploy was the first one, nothing is left.
    (tmp_path / "begun").unlink()
    with signalled(signal.SIGINT, (tmp_path / "begun").exists), pytest.raises(KeyboardInterrupt):
        run(external, version("2", tmp_path), name="new", is_blocking=False)
    (tmp_path / "go").touch()
    poll_for(lambda: list(serve.connect(dask_client=external.client).status().applications) == ["shop"])
    # An application of another program is not replaced by accident.
    with pytest.raises(AlreadyRegisteredError, match="Add --replace to replace it, --restore"):
        run(external, version("2"))
    with pytest.raises(
        BadRequestError, match=r"port is 0 instead of 1, server is 'tornado' instead of 'asyn"
    ):
        run(external, version("2"), http={"port": 1, "server": "asyncio"}, is_blocking=False)
    port = int(serve.connect(dask_client=external.client).http_urls()[0].rpartition(":")[2])
    run(external, version("1"), http={"port": port, "server": "tornado"}, is_blocking=False)
    assert shop() == "1"


def test_a_replaced_application_is_given_back_only_if_asked_to(
    external: ExternalCluster, shop: Callable[[], str]
) -> None:
    with signalled(signal.SIGTERM, lambda: shop() == "2"):
        lines = run(external, version("2", num_replicas=2), restores=True)
    assert lines == ["Giving back the version of application 'shop' from before."]
    assert shop() == "1"
    with signalled(signal.SIGTERM, lambda: shop() == "3"):
        lines = run(external, version("3"), replaces=True)
    assert lines == ["Application 'shop' keeps running in this version."]
    assert shop() == "3"

    def changed() -> bool:
        if shop() != "4":
            return False
        serve.connect(dask_client=external.client).run(version("5"), name="shop", route_prefix="/shop")
        return True

    with signalled(signal.SIGTERM, changed):
        run(external, version("4"), restores=True)
    assert shop() == "5", "somebody else has deployed it meanwhile"


@pytest.mark.parametrize("end", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGKILL])
def test_an_instance_serves_others_after_the_program_that_started_it(
    end: signal.Signals, external: ExternalCluster
) -> None:
    program = external.run_program(OTHER, DASK_DASKSERVE__TIMEOUTS__GRACE_S="0.1")
    try:
        poll_for(lambda: "Serving at" in program.output, what=program.report)
        url = program.output.partition("Serving at ")[2].partition(". Press")[0]
        client = serve.connect(dask_client=external.client)

        def end_other() -> bool:
            if fetch(f"{url}/shop").text != "1":
                return False
            assert fetch(f"{url}/other/path").text == "/other/path"
            program.process.send_signal(end)
            assert program.wait() == (0 if end is signal.SIGINT else -signal.SIGKILL), program.report()
            until = time.monotonic() + 0.5  # longer than an instance without its owner would exist
            while time.monotonic() < until:
                assert fetch(f"{url}/shop").text == "1"
            if end is signal.SIGKILL:
                assert fetch(f"{url}/other/path").text == "/other/path"
                client.delete_application("other")
            assert fetch(f"{url}/other/path").status == 404
            assert list(client.status().applications) == ["shop"]
            return True

        # The instance ends with the last application, because no program started it as detached.
        with signalled(signal.SIGTERM, end_other):
            run(external, version("1"))
        external.assert_clean(topics=False)
    finally:
        program.kill()


def test_a_client_that_only_connects_ends_nothing(external: ExternalCluster, shop: Callable[[], str]) -> None:
    with serve.connect(dask_client=external.client) as client:
        assert list(client.status().applications) == ["shop"]
    with serve.connect(address=external.address) as client:
        with signalled(signal.SIGTERM, lambda: True):
            client.serve_until_interrupted()
    assert shop() == "1"


def test_a_blocking_run_ends_only_the_application_that_it_has_started(
    external: ExternalCluster, shop: Callable[[], str]
) -> None:
    client = serve.connect(dask_client=external.client)
    url = client.http_urls()[0]
    with Client(external.address):
        with signalled(signal.SIGTERM, lambda: fetch(f"{url}/mine").text == "2"):
            serve.run(version("2"), name="mine", route_prefix="/mine", blocking=True)
        assert (fetch(f"{url}/mine").status, shop()) == (404, "1")
        with signalled(signal.SIGTERM, lambda: shop() == "3"):
            serve.run(version("3"), name="shop", route_prefix="/shop", blocking=True)
    assert shop() == "3", "it was there before"
    assert list(client.status().applications) == ["shop"]


def test_the_functions_of_the_package_tell_of_an_instance_of_another_program(
    external: ExternalCluster,
) -> None:
    with serve.start(dask_client=external.client, http_options={"port": 0}) as client:
        with Client(external.address):
            assert serve.status().instance == client.instance_name
            with pytest.raises(serve.errors.NotRunningError, match="belongs to another program; to use it"):
                serve.get_app_handle("shop")
        assert client.list_backends() == {}


def test_ends_by_several_clients_log_no_traceback(external: ExternalCluster) -> None:
    def logged() -> dict[str, str]:
        return {path.name: path.read_text() for path in external.folder.glob("*.err")}

    before = logged()
    with Client(external.address, set_as_default=False) as dask:
        first = serve.start(detached=True, dask_client=external.client, http_options={"port": 0})
        second, third = serve.connect(dask_client=dask), serve.connect(dask_client=dask)
        second.shutdown()
        first.shutdown()
        for client in (first, second, third):
            with pytest.raises(serve.errors.ClosedError):
                client.list_backends()
        with pytest.raises(serve.errors.NotRunningError):
            serve.connect(dask_client=dask)
    since = {name: text[len(before.get(name, "")) :] for name, text in logged().items()}
    assert not any("Traceback" in text for text in since.values()), since


def test_an_instance_that_others_use_outlives_its_client(external: ExternalCluster) -> None:
    with Client(external.address, set_as_default=False) as dask:
        with serve.start(dask_client=external.client, http_options={"port": 0}) as client:
            other = serve.connect(dask_client=dask)
            handle = other.run(version("1"), name="shop", route_prefix="/shop")
            assert client.status().applications["shop"].status == "RUNNING"
        assert handle.remote(None).result(10) == 1
        other.shutdown()


def test_a_program_without_a_client_uses_the_scheduler_of_dasks_configuration(
    external: ExternalCluster,
) -> None:
    with dask.config.set({"scheduler-address": external.address}):
        handle = serve.run(version("3"), name="configured", route_prefix=None, http_options={"port": 0})
        try:
            assert handle.remote(None).result(10) == 3
            found = serve.connect()
            assert found.scheduler_address == external.address
            assert "configured" in found.status().applications
        finally:
            serve.shutdown()
            distributed.default_client().close()  # later tests have none
