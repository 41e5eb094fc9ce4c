"""`shutdown` lets the requests under way complete, over HTTP and by handle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import daskserve as serve
from daskserve.client.hosting import hosting
from daskserve.client.instance.connection import InstanceConnection, Verbs
from daskserve.client.serving.leaving import leave_instance
from daskserve.errors import ClusterUnreachableError, ReplicaStartError, RequestTimeoutError, ServeError
from daskserve.testing import local_instance, local_instance_async, wait_until


def poll_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@serve.deployment
class Back:
    def __call__(self, number: int) -> int:
        return number + 1


@serve.deployment
class Middle:
    def __init__(self, back: serve.Handle) -> None:
        self.back = back

    async def __call__(self, number: int) -> int:
        return 10 * int(await self.back.remote(number))


@serve.deployment
class Front:
    """Records that a request has begun, and continues when the test allows it."""

    def __init__(self, middle: serve.Handle, folder: Path) -> None:
        self.middle, self.folder = middle, folder

    async def __call__(self, request: object) -> str:
        (self.folder / f"began-{time.monotonic_ns()}").touch()
        await asyncio.to_thread(poll_for, (self.folder / "go").exists)
        return str(await self.middle.remote(4))


def takes_requests(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/routes", timeout=10).is_success
    except httpx.HTTPError:
        return False


def test_requests_under_way_reach_the_end_of_the_chain_after_shutdown_began(tmp_path: Path) -> None:
    with local_instance(http_options={"port": 0}) as client, ThreadPoolExecutor() as threads:
        handle = client.run(Front.bind(Middle.bind(Back.bind()), tmp_path), route_prefix="/")
        url = client.http_urls()[0]
        answer = threads.submit(httpx.get, url, timeout=10)
        by_handle = handle.remote(None)
        poll_for(lambda: len(list(tmp_path.iterdir())) == 2)
        ending = threads.submit(client.shutdown)
        poll_for(lambda: not takes_requests(url))
        assert not ending.done()
        (tmp_path / "go").touch()
        assert answer.result(10).text == "50"
        assert by_handle.result(10) == "50"
        ending.result(10)


def test_an_interrupted_shutdown_ends_the_instance_without_draining(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_instance_async() as client:
            handle = await client.run(Front.bind(Middle.bind(Back.bind()), tmp_path), route_prefix=None)
            response = handle.remote(None)
            await wait_until(lambda: any(tmp_path.iterdir()))
            ending = asyncio.create_task(client.shutdown())
            await asyncio.sleep(0.05)
            assert not ending.done()
            ending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ending
            async with asyncio.timeout(8):  # much less than its grace period
                with pytest.raises(ServeError):
                    await response
        (tmp_path / "go").touch()

    asyncio.run(main())


def test_a_request_that_takes_longer_than_its_grace_period_is_ended(tmp_path: Path) -> None:
    with local_instance() as client:
        short = Front.options(graceful_shutdown_timeout_s=0.2)
        handle = client.run(short.bind(Middle.bind(Back.bind()), tmp_path), route_prefix=None)
        response = handle.remote(None)
        poll_for(lambda: any(tmp_path.iterdir()))
        began = time.monotonic()
        client.shutdown()
        assert time.monotonic() - began < 8
        with pytest.raises(ServeError):
            response.result(10)


async def test_an_application_that_cannot_be_restored_does_not_keep_the_others_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    class Verbs:
        """Finds the changes of this program."""

        async def _request_of(self, name: str) -> str:
            return f"ours-{name}"

    async def restore(verbs: Any, kept: str, found: str) -> None:
        if kept == "a":
            raise ReplicaStartError("The old version does not start.")
        done.append(f"restored {kept}")

    async def leave(*_: Any) -> None:
        done.append("left")

    monkeypatch.setattr(hosting, "restore_application", restore)
    monkeypatch.setattr(hosting, "leave_instance", leave)
    form: Any = SimpleNamespace(verbs=lambda _: Verbs())
    connection: Any = SimpleNamespace(cluster_connection=SimpleNamespace(is_open=True))
    mode = hosting.HostingMode(restores=True)
    one: Any = hosting._Hosting(form, connection, hosting.Source(()), mode, print, print, False)
    one._deployed = one._expected = {name: f"ours-{name}" for name in "ab"}
    one._kept = {name: name for name in "ab"}
    with pytest.raises(ReplicaStartError):
        await one._leave()
    assert done == ["restored b", "left"]


async def test_an_application_that_ends_too_late_keeps_no_other_running() -> None:
    done: list[str] = []

    async def delete(name: str, request_id: str) -> None:
        if name == "a":
            raise RequestTimeoutError("Application 'a' was not deleted within 60 s.")
        done.append(name)

    async def answer(value: Any) -> Any:
        return value

    async def disconnect(*, asynchronous: bool) -> None:
        done.append("disconnected")

    cluster_connection = SimpleNamespace(
        started=set(), is_open=True, ask=lambda _: answer({"x": {"owner": "another program"}})
    )
    connection = SimpleNamespace(
        cluster_connection=cluster_connection, instance="x", is_guest=False, disconnect=disconnect
    )
    verbs: Any = SimpleNamespace(
        _connection=connection, _asynchronous=True, _delete_application=delete, _run=lambda found: found
    )
    with pytest.raises(RequestTimeoutError):
        await leave_instance(verbs, {"a": "1", "b": "2"})
    assert done == ["b", "disconnected"]


async def test_an_instance_that_could_not_be_shared_is_shared_by_the_next_change() -> None:
    answers: list[Any] = [ClusterUnreachableError("It is away."), None]

    async def ask(verb: str, instance: str) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    async def wait(asked: Any) -> Any:
        return await asked

    connection: Any = SimpleNamespace(ask=ask, wait=wait, started=())
    verbs = Verbs(InstanceConnection(connection, "x"), asynchronous=True)
    await verbs._share()
    await verbs._share()
    await verbs._share()
    assert answers == []
