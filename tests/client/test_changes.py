"""The lines that a blocking program prints."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest

from daskserve.client.instance.calls import ControllerCalls
from daskserve.client.serving.changes import SETTLED_S, ChangeReports, changes, is_settled
from daskserve.client.views.status import ActorStatus, BackendStatus, EndpointStatus, Status
from daskserve.common.clock import LoopClock
from daskserve.testing import local_instance


def status(
    running: int = 1,
    *,
    word: str = "HEALTHY",
    version: str = "v1",
    message: str = "",
    route: str | None = "/echo",
    replicas: Mapping[str, str] | None = None,
    **others: Any,
) -> Status:
    """Return the status of an instance with one backend that wants two replicas."""
    found = {"a": "RUNNING", "b": "RUNNING"} if replicas is None else replicas
    values = {
        "instance": "daskserve",
        "epoch": 1,
        "http_urls": ("http://127.0.0.1:8000",),
        "actors": tuple(ActorStatus("replica", f"echo#{name}", state) for name, state in found.items()),
        "backends": {"echo": BackendStatus(word, 2, running, version, message)},
        "endpoints": {"echo": EndpointStatus(route, ("GET",), {"echo": 1.0}, {})},
    }
    return Status(**{**values, **others})


def test_the_first_lines_say_the_address_and_what_runs() -> None:
    assert list(changes(None, status(2))) == [
        "Serving at http://127.0.0.1:8000. Press Ctrl-C to stop.",
        "echo: HEALTHY, 2 of 2 replicas run (at /echo)",
    ]
    assert next(changes(None, status(http_urls=()))) == "Serving at no address. Press Ctrl-C to stop."


def test_an_actor_is_named_as_its_user_did() -> None:
    old, new = (
        {tag: BackendStatus("HEALTHY", 1, 1, "v1")} for tag in ("echo:log::0123abcd", "echo:log::4567abcd")
    )
    actors = (ActorStatus("replica", "echo:log::4567abcd#a", "RUNNING"),)
    assert list(changes(status(backends=old, actors=()), status(backends=new, actors=actors))) == [
        "The previous version of echo:log was deleted",
        "echo:log: HEALTHY, 1 of 1 replica runs",
    ]
    waiting = status(backends=new, actors=())
    assert list(changes(waiting, status(backends=new, actors=actors))) == [
        "echo:log: HEALTHY, 1 of 1 replica runs (echo:log#a ready)"
    ]
    assert list(changes(waiting, status(backends={}, actors=()))) == ["echo:log was deleted"]


def test_nothing_is_said_while_nothing_changes() -> None:
    assert list(changes(status(), status())) == []


def test_replicas_that_came_and_went_are_named() -> None:
    before = status(2)
    after = status(1, word="UNHEALTHY", replicas={"b": "RUNNING", "c": "STARTING"})
    assert list(changes(before, after)) == ["echo: UNHEALTHY, 1 of 2 replicas run (echo#a gone)"]
    again = status(2, replicas={"b": "RUNNING", "c": "RUNNING"})
    assert list(changes(after, again)) == ["echo: HEALTHY, 2 of 2 replicas run (echo#c ready)"]
    many = status(9, replicas=dict.fromkeys("abcdef", "RUNNING"))
    assert list(changes(before, many)) == ["echo: HEALTHY, 9 of 2 replicas run (4 replicas ready)"]


def test_an_update_says_its_version_route_and_what_it_waits_for() -> None:
    after = status(2, word="UPDATING", version="v2", route="/new", message="no room\nmore")
    assert list(changes(status(2), after)) == [
        "echo: UPDATING, 2 of 2 replicas run (version v2; at /new; no room)"
    ]
    hidden = status(2, route=None)
    assert list(changes(status(2), hidden)) == ["echo: HEALTHY, 2 of 2 replicas run (without a route)"]


def test_addresses_controllers_workers_and_deletions_have_lines() -> None:
    after = status(
        epoch=2,
        http_urls=("http://b:8000",),
        unresponsive_workers=("tcp://c:1",),
        broken_routes={"tcp://a:1": {"tcp://b:1": "scheduler", "tcp://d:1": "none"}},
        backends={},
        endpoints={},
    )
    before = status(broken_routes={"tcp://a:1": {"tcp://d:1": "scheduler"}})
    assert list(changes(before, after)) == [
        "Listening at http://b:8000",
        "No longer listening at http://127.0.0.1:8000",
        "The controller was replaced",
        "echo was deleted",
        "Worker tcp://a:1 does not reach tcp://b:1 directly",
        "Worker tcp://c:1 does not answer",
    ]


def test_an_instance_is_settled_when_all_is_healthy() -> None:
    assert is_settled(status(2))
    assert not is_settled(status(1, word="UNHEALTHY"))
    assert not is_settled(status(2, replicas={"a": "STARTING"}))


def test_changes_are_reported_as_they_are_notified() -> None:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait_for(text: str) -> None:
        while text not in (line := lines.get(timeout=10)):
            assert line

    with local_instance() as client:
        client.deploy("echo", lambda value: value)
        connection, instance = client._connection.cluster_connection, client.instance_name
        reports = ChangeReports(ControllerCalls(connection, instance), lines.put)

        async def start() -> asyncio.Task[None]:
            await connection.cluster(instance).listener.start()
            return asyncio.create_task(reports.run())

        async def end(task: asyncio.Task[None]) -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        task = connection.sync(start())
        wait_for("echo: HEALTHY, 1 of 1")
        client.deploy("echo", lambda value: value, config={"num_replicas": 2})
        wait_for("2 of 2 replicas run")
        client.delete_deployment("echo")
        wait_for("echo was deleted")
        connection.sync(end(task))


class CountedCalls:
    """A connection with calls and a callback for lost workers; its other parts are not used."""

    instance = "daskserve"

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.cluster_connection = self.listener = self
        self.count = 0
        self.watched: set[str] = set()
        self.backends = ["echo"]

    def cluster(self, instance: str) -> CountedCalls:
        return self

    def watch(self, key: str, watcher: Callable[[Any], None]) -> Callable[[], None]:
        self.watched.add(key)
        return lambda: self.watched.remove(key)

    def on_worker_left(self, callback: Callable[[str], None]) -> Callable[[], None]:
        self.lose_worker = callback
        self.watched.add("workers")
        return lambda: self.watched.remove("workers")

    async def call(self, verb: str) -> dict[str, Any]:
        self.count += 1
        assert self.count < 5, "the status is asked for without a pause"
        backend = BackendStatus("HEALTHY", 2, 2, "v1")
        return asdict(status(2, backends=dict.fromkeys(self.backends, backend), endpoints={}))


@pytest.mark.virtual_time
async def test_a_notification_leads_to_one_call_and_then_the_pauses_continue() -> None:
    calls = CountedCalls()
    running = asyncio.create_task(ChangeReports(calls, lambda line: None).run())  # type: ignore[arg-type]
    counts = []
    for _ in range(2):
        await asyncio.sleep(SETTLED_S / 3)
        counts.append(calls.count)
        calls.lose_worker("tcp://a:1")
    await asyncio.sleep(SETTLED_S / 2)
    assert (counts, calls.count, running.done()) == ([1, 2], 3, False)
    running.cancel()


@pytest.mark.virtual_time
async def test_a_deleted_backend_is_watched_no_more_and_nothing_is_at_the_end() -> None:
    calls = CountedCalls()
    running = asyncio.create_task(ChangeReports(calls, lambda line: None).run())  # type: ignore[arg-type]
    await asyncio.sleep(1)
    assert calls.watched == {"workers", "routes", "backend/echo"}
    calls.backends = ["other"]
    calls.lose_worker("tcp://a:1")
    await asyncio.sleep(1)
    assert calls.watched == {"workers", "routes", "backend/other"}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not calls.watched
