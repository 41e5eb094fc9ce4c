"""Deadlines, cancellations and departed clients, from the socket through handles to the last replica."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from dask_processes import fetch, poll_for
from gates import Gates, anew_for_each_test

from daskserve.client.client import Client
from daskserve.cluster.local.cluster import LocalCluster
from daskserve.context import current_request
from daskserve.errors import BadRequestError, RequestTimeoutError
from daskserve.options.http import HTTPOptions
from daskserve.testing import local_instance

PATIENCE_S = 10.0


class Notes(Gates):
    """Records the actions of user code."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []


GATES = Notes()
_fresh_gates = anew_for_each_test(GATES)


@pytest.fixture
def client() -> Iterator[Client]:
    with local_instance(http_options=HTTPOptions(port=0)) as client:
        yield client
        GATES.go.set()


def gauges(client: Client) -> dict[str, int]:
    """Return all gauges of the instance, summed over its processes."""
    cluster: LocalCluster = client._connection.cluster_connection._world  # type: ignore[attr-defined]

    async def count() -> dict[str, int]:
        return gauges_of(cluster)  # on the loop, where nothing changes concurrently

    return client._connection.cluster_connection.sync(count())


def gauges_of(cluster: LocalCluster) -> dict[str, int]:
    found = dict.fromkeys(("ingress", "ongoing", "queued", "abandoned", "calls", "in_flight", "waiting"), 0)
    for address in cluster.actors():
        actor: Any = cluster.actor(address)
        if "/replica/" in address.name:
            found["ongoing"] += actor.load().ongoing
            found["queued"] += actor.load().queued
            found["abandoned"] += actor._code._executor.abandoned
            found["calls"] += len(actor._code._executor.runs)
        elif "/proxy/" in address.name:
            found["ingress"] += actor._ingress.ongoing
    for process in [cluster.program, *(cluster.process(info.address) for info in cluster.workers())]:
        routers = process.shared.get("routers")
        for backend in routers._sets.values() if routers else ():
            found["in_flight"] += backend.in_flight
            found["waiting"] += backend.waiting
    return found


def wait_until_idle(client: Client) -> None:
    poll_for(lambda: not any(gauges(client).values()), what=lambda: gauges(client))


def serve(client: Client, name: str, definition: Any, *args: Any, **config: Any) -> Any:
    """Deploy a definition under a name and return its handle."""
    client.create_backend(name, definition, *args, config=config)
    client.create_endpoint(name, backend=name, route=f"/{name}")
    return client.get_handle(name)


def get(client: Client, path: str, **headers: str) -> tuple[int, str]:
    (url,) = client.http_urls()
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    reply = fetch(url + path, headers=named, timeout_s=PATIENCE_S)
    return reply.status, reply.text


async def hang(request: Any) -> str:
    GATES.notes.append("began")
    try:
        while not GATES.go.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.002)
    except asyncio.CancelledError:
        GATES.notes.append("cancelled")
        raise
    return "went on"


def hang_in_thread(request: Any) -> str:
    GATES.notes.append("began")
    GATES.go.wait(PATIENCE_S)
    return "went on"


# ---- deadlines


def test_a_late_async_handler_is_cancelled_and_frees_its_slot(client: Client) -> None:
    handle = serve(client, "b", hang, max_concurrent_queries=1)
    status, text = get(client, "/b", X_Request_ID="7", X_Request_Timeout_Seconds="0.05")
    assert (status, text) == (408, "Request 7 timed out after 0.05s.")
    with pytest.raises(RequestTimeoutError, match="was not answered before its deadline"):
        handle.options(timeout_s=0.05).remote().result(PATIENCE_S)
    poll_for(lambda: GATES.notes == ["began", "cancelled"] * 2, what=lambda: GATES.notes)
    wait_until_idle(client)
    GATES.go.set()
    assert get(client, "/b") == (200, "went on")
    assert handle.options(timeout_s=PATIENCE_S).remote().result() == "went on"


def test_a_late_plain_handler_keeps_its_slot_until_it_returns(client: Client) -> None:
    handle = serve(client, "b", hang_in_thread, max_concurrent_queries=1)
    assert get(client, "/b", X_Request_Timeout_Seconds="0.05")[0] == 408
    only = {"abandoned": 1, "calls": 1, "ongoing": 1}
    poll_for(
        lambda: {name: count for name, count in gauges(client).items() if count} == only,
        what=lambda: gauges(client),
    )
    # The slot is taken, so this request times out in the queue.
    with pytest.raises(RequestTimeoutError):
        handle.options(timeout_s=0.05).remote().result(PATIENCE_S)
    assert GATES.notes == ["began"]
    GATES.go.set()
    wait_until_idle(client)
    assert get(client, "/b") == (200, "went on")


def test_a_request_that_times_out_in_the_queue_is_never_run(client: Client) -> None:
    handle = serve(client, "b", hang, max_concurrent_queries=1)
    first = handle.remote()
    poll_for(lambda: GATES.notes == ["began"])
    assert get(client, "/b", X_Request_Timeout_Seconds="0.05")[0] == 408
    poll_for(lambda: gauges(client)["waiting"] == 0)
    GATES.go.set()
    assert first.result(PATIENCE_S) == "went on"
    assert GATES.notes == ["began"]


def test_the_timeout_of_a_handle_must_be_positive(client: Client) -> None:
    handle = serve(client, "b", hang)
    for timeout_s in (0, -1.0, float("nan")):
        with pytest.raises(BadRequestError, match="timeout_s must be more than 0"):
            handle.options(timeout_s=timeout_s)


async def return_deadline(request: Any) -> float | None:
    found = current_request.get()
    assert found is not None
    return found.deadline


class Between:
    """Calls another deployment and returns both deadlines."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def __call__(self, request: Any) -> list[float | None]:
        return [await return_deadline(request), await self.handle.remote()]


def test_nested_calls_have_no_more_time_than_their_request(client: Client) -> None:
    inner = serve(client, "inner", return_deadline)
    serve(client, "same", Between, inner)
    serve(client, "more", Between, inner.options(timeout_s=1000))
    less = serve(client, "less", Between, inner.options(timeout_s=1))
    assert get(client, "/same") == (200, "[null,null]")
    for name, is_less in (("same", False), ("more", False), ("less", True)):
        own, childs = json.loads(get(client, f"/{name}", X_Request_Timeout_Seconds="60")[1])
        assert childs < own - 50 if is_less else childs == pytest.approx(own, abs=1), (own, childs)
    own, childs = less.options(timeout_s=60).remote().result(PATIENCE_S)
    assert childs < own - 50


# ---- the queue


def test_a_full_queue_rejects_with_503_and_retry_after(client: Client) -> None:
    serve(client, "b", hang, max_concurrent_queries=1, max_queued_requests=1)
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(get(client, "/b")[0])) for _ in range(2)]
    for thread in threads:
        thread.start()
    poll_for(lambda: gauges(client)["waiting"] == 1)
    reply = fetch(f"{client.http_urls()[0]}/b")
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert "as many as max_queued_requests allows" in reply.text
    GATES.go.set()
    for thread in threads:
        thread.join()
    assert statuses == [200, 200]


# ---- clients that disconnect


class Calls:
    """Calls another deployment from async code."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def __call__(self, request: Any) -> Any:
        return await self.handle.remote()


class CallsInThread(Calls):
    """Calls another deployment from a plain function, which cannot be cancelled itself."""

    def __call__(self, request: Any) -> Any:  # type: ignore[override]
        return self.handle.remote().result(PATIENCE_S)


class CallsWithoutAwaiting(Calls):
    """Calls another deployment, then waits for something else."""

    async def __call__(self, request: Any) -> Any:
        response = self.handle.remote()
        await asyncio.sleep(PATIENCE_S)
        return await response


class CallsInBackground(Calls):
    async def __call__(self, request: Any) -> Any:
        self.response = self.handle.remote()
        return "done"


class CleansUp(Calls):
    async def __call__(self, request: Any) -> Any:
        try:
            return await self.handle.remote()
        finally:
            GATES.go.set()
            GATES.notes.append(await self.handle.remote())


class RunsOn(Calls):
    def __call__(self, request: Any) -> Any:  # type: ignore[override]
        for _ in range(2):
            try:
                self.handle.remote().result(PATIENCE_S)
            except Exception as error:
                GATES.notes.append(type(error).__name__)


def disconnect_during(client: Client, path: str) -> None:
    """Send a request, and close the connection once the innermost user code has begun."""
    (url,) = client.http_urls()
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        poll_for(lambda: "began" in GATES.notes)


@pytest.mark.parametrize(
    ("front", "middle"),
    [
        (Calls, Calls),
        (CallsInThread, Calls),
        (Calls, CallsInThread),
        (CallsInThread, CallsInThread),
        (CallsWithoutAwaiting, CallsWithoutAwaiting),
    ],
)
def test_a_disconnect_cancels_the_request_two_levels_down(client: Client, front: Any, middle: Any) -> None:
    leaf = serve(client, "leaf", hang)
    serve(client, "front", front, serve(client, "middle", middle, leaf))
    disconnect_during(client, "/front")
    poll_for(lambda: "cancelled" in GATES.notes)
    wait_until_idle(client)
    GATES.go.set()
    assert get(client, "/leaf") == (200, "went on")


def test_a_nested_call_continues_after_its_request_was_answered(client: Client) -> None:
    leaf = serve(client, "leaf", hang)
    serve(client, "front", CallsInBackground, leaf)
    assert get(client, "/front") == (200, "done")
    poll_for(lambda: "began" in GATES.notes)
    assert gauges(client)["ongoing"] == 1
    GATES.go.set()
    wait_until_idle(client)
    assert GATES.notes == ["began"]


def test_cancelled_async_code_may_call_to_clean_up_and_is_cancelled_once(client: Client) -> None:
    leaf = serve(client, "leaf", hang)
    serve(client, "front", CleansUp, leaf)
    disconnect_during(client, "/front")
    poll_for(lambda: "went on" in GATES.notes, what=lambda: GATES.notes)
    wait_until_idle(client)


def test_a_plain_function_of_a_cancelled_request_cannot_call(client: Client) -> None:
    leaf = serve(client, "leaf", hang)
    serve(client, "front", RunsOn, leaf)
    disconnect_during(client, "/front")
    poll_for(lambda: GATES.notes.count("RequestCancelledError") == 2, what=lambda: GATES.notes)
    wait_until_idle(client)
