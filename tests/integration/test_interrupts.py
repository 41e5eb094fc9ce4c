"""Ctrl-C during a blocking call leaves nothing half-finished."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from controller_starts import controller_start
from dask_processes import PATIENCE_S, ExternalCluster, Program, poll_for, wait_until_gone

import daskserve as serve
from daskserve.cluster.dask.connection import DaskConnection, connection_of
from daskserve.errors import InstanceError


def interrupt(call: Callable[[], Any], when: Callable[[], Any]) -> None:
    """Make the call, raise KeyboardInterrupt in it once the condition is true, and catch the error.

    The condition must imply that the call has started; otherwise the interrupt comes too early.
    """

    def wait() -> None:
        poll_for(when, 20, every_s=0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait, daemon=True)
    is_raised = False
    # One block from the thread's start to its end, so that the interrupt is always caught here.
    try:
        thread.start()
        call()
        # The call has returned before the signal; wait for it.
        thread.join()
    except KeyboardInterrupt:
        is_raised = True
    thread.join()
    assert is_raised


def is_in(function: Callable[..., Any]) -> bool:
    """Return whether the main thread is executing the function or a function that it calls."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def nightly(*values: Any) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.nightly) for each in values]


@pytest.fixture(autouse=True, scope="module")
def imports(dask_cluster: ExternalCluster) -> None:
    """Import everything, so that the interrupt does not hit an import."""
    serve.start(http_options={"port": 0}, dask_client=dask_cluster.client).shutdown()


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("delay_ms", [0, 20, *nightly(5, 10, 30, 40, 60)])
def test_interrupted_start_leaves_nothing(delay_ms: int, detached: bool, external: ExternalCluster) -> None:
    """An interrupt at any moment leaves nothing, and the next start works."""
    passed = threading.Event()
    timer = threading.Timer(delay_ms / 1000, passed.set)
    made: list[serve.Client] = []

    def start() -> None:
        timer.start()
        made.append(serve.start(detached=detached, http_options={"port": 0}, dask_client=external.client))

    interrupt(start, passed.is_set)
    for client in made:
        client.shutdown()
    external.assert_clean(topics=False)
    serve.start(detached=detached, http_options={"port": 0}, dask_client=external.client).shutdown()


@pytest.mark.parametrize("delay_ms", [2, *nightly(0, 5)])
def test_interrupted_start_keeps_an_existing_detached_instance(
    delay_ms: int, external: ExternalCluster
) -> None:
    """An interrupted second start does not end the existing instance."""
    passed = threading.Event()
    timer = threading.Timer(delay_ms / 1000, passed.set)

    def start() -> None:
        timer.start()
        with suppress(serve.errors.AlreadyRunningError):
            serve.start(detached=True, http_options={"port": 0}, dask_client=external.client)

    with serve.start(detached=True, http_options={"port": 0}, dask_client=external.client) as first:
        first.create_backend("echo", "served.echo")
        first.create_endpoint("echo", backend="echo")
        handle = first.get_handle("echo")
        interrupt(start, passed.is_set)
        assert handle.remote(text="lives").result(10) == "lives"
        assert list(serve.connect(dask_client=external.client).list_backends()) == ["echo"]


class Slow:
    """A class whose constructor waits for a file."""

    def __init__(self, folder: Path) -> None:
        (folder / "begun").touch()
        poll_for((folder / "go").exists)

    def __call__(self, request: Any) -> str:
        return "ready"


def test_interrupted_create_backend_is_rolled_back(client: serve.Client, tmp_path: Path) -> None:
    """The unfinished backend is removed, and its tag is free at once."""
    interrupt(lambda: client.create_backend("slow", Slow, tmp_path), (tmp_path / "begun").exists)
    assert client.list_backends() == {}
    client.create_backend("slow", "served.echo")
    client.create_endpoint("slow", backend="slow")
    assert client.get_handle("slow").remote(text="new").result(10) == "new"
    (tmp_path / "go").touch()
    poll_for(lambda: len(client.status().replicas()) == 1)


def test_interrupted_create_backend_keeps_an_existing_backend(client: serve.Client, tmp_path: Path) -> None:
    """The existing backend of that tag is not removed."""
    client.create_backend("taken", "served.echo")
    passed = threading.Event()

    def create() -> None:
        passed.set()
        with suppress(serve.errors.AlreadyRegisteredError):
            client.create_backend("taken", Slow, tmp_path)

    interrupt(create, passed.is_set)
    assert list(client.list_backends()) == ["taken"]


def test_interrupted_result_raises_at_once(client: serve.Client, tmp_path: Path) -> None:
    """Ctrl-C in ``result()`` raises at once, and the instance keeps working."""

    def wait_for_go(request: Any) -> str:
        (tmp_path / "begun").touch()
        poll_for((tmp_path / "go").exists)
        return "done"

    client.create_backend("wait", wait_for_go)
    client.create_endpoint("wait", backend="wait")
    response = client.get_handle("wait").remote()
    interrupt(response.result, lambda: (tmp_path / "begun").exists() and is_in(type(response).result))
    (tmp_path / "go").touch()
    assert response.result(10) == "done"


PROGRAM = """
import daskserve as serve
print("begin", flush=True)
serve.start({arguments}, http_options={{"port": 0}}, dashboard=False)
print("never", flush=True)
"""


@pytest.mark.parametrize(
    ("arguments", "processes"),
    [("False", 2), *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("False", 1), ("True", 2)))],
)
def test_interrupted_start_of_a_local_cluster_leaves_no_process(
    arguments: str, processes: int, tmp_path: Path
) -> None:
    """Ctrl-C during the start of the scheduler and workers leaves none of them."""
    program = Program(["-c", PROGRAM.format(arguments=arguments)], tmp_path)
    try:
        program.wait_for_line("begin")
        started = poll_for(lambda: len(found := program.descendants()) >= processes and found)
        program.interrupt()
        assert program.wait(10) != 0, program.report()
        assert "never" not in program.output
        assert "KeyboardInterrupt" in program.errors
        wait_until_gone(started, 5)
    finally:
        program.kill()


def test_a_start_that_arrives_after_its_cancellation_is_refused(external: ExternalCluster) -> None:
    """The two messages use separate connections, so the cancellation may arrive before the start."""
    connection = connection_of(external.client)
    with serve.start(http_options={"port": 0}, dask_client=external.client) as client:
        assert connection.sync(connection.ask("end_instance", instance="late", start_id="cancelled")) is True
        with pytest.raises(InstanceError, match="cancelled before it began"):
            connection.sync(start_late(connection))
        assert list(connection.sync(connection.ask("instances"))) == [client.instance_name]


def test_ending_an_instance_during_its_start_leaves_nothing(external: ExternalCluster) -> None:
    """Ending waits for the start, which fails; nothing is left."""
    connection = connection_of(external.client)
    with serve.start(http_options={"port": 0}, dask_client=external.client) as client:

        async def both() -> Any:
            starting = asyncio.ensure_future(start_late(connection))
            async with asyncio.timeout(10):
                while "late" not in await connection.ask("instances"):  # noqa: ASYNC110 (there is no event for it)
                    await asyncio.sleep(0)
                await connection.ask("end_instance", instance="late", start_id="cancelled")
            return await asyncio.gather(starting, return_exceptions=True)

        (outcome,) = connection.sync(both())
        assert outcome is None or isinstance(outcome, InstanceError)
        assert list(connection.sync(connection.ask("instances"))) == [client.instance_name]
        assert any(name.startswith(f"{client.instance_name}/") for name in actors_of(external))
        poll_for(lambda: not [name for name in actors_of(external) if name.startswith("late/")], 5)


def actors_of(external: ExternalCluster) -> list[str]:
    """Return the names of all actors on the cluster's workers."""

    def look(dask_worker: Any) -> list[str]:
        hosts = [each for each in dask_worker.state.actors.values() if type(each).__name__ == "Host"]
        return [name for host in hosts for name in host.registry.entries]

    found = external.client.run(look)
    return [name for names in found.values() for name in names]


async def start_late(connection: DaskConnection) -> None:
    await connection.ask(
        "start_instance",
        instance="late",
        owner=None,
        owns_cluster=False,
        grace_s=0.0,
        payload=controller_start().encode(),
        store="memory://",
        timeout_s=10.0,
        start_id="cancelled",
    )


def test_an_interrupt_before_the_call_is_known_to_have_begun(
    external: ExternalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connection_of(external.client)
    begun, ended = threading.Event(), threading.Event()

    async def never() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    hand_over = asyncio.run_coroutine_threadsafe

    def interrupted(*arguments: Any) -> Any:
        hand_over(*arguments)
        begun.wait(PATIENCE_S)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("asyncio.run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connection.sync(never())
    assert ended.wait(PATIENCE_S)
