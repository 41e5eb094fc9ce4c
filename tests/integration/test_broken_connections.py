"""Broken connections between two live processes, as after a middlebox has dropped their state."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import dask
import pytest
from clusters import worker_of
from dask_processes import ExternalCluster, Reply, fetch, poll_for, within
from distributed import Client

import daskserve as serve
from daskserve.cluster.dask.connection import connection_of
from daskserve.errors import ActorLostError

#: How long a broken connection may delay a request: far less than the suspension of a dead worker.
SOON_S = 1.5


class HoldsOneCall:
    """Answers with the number of the call, except for one call, which it holds."""

    def __init__(self) -> None:
        self.calls = 0
        self.held = 0
        self.ongoing = 0

    async def __call__(self, request: Any = None) -> Any:
        import asyncio

        self.calls += 1
        self.ongoing += 1
        try:
            if self.calls == self.held:
                await asyncio.Event().wait()
            return str(self.calls)
        finally:
            self.ongoing -= 1

    async def hold_next(self) -> None:
        self.held = self.calls + 1

    async def state(self) -> list[int]:
        return [self.calls, self.ongoing]


def cut(dask_worker: Any) -> int:
    """Break the connections of all channels of this worker without closing them on either side."""
    (host,) = dask_worker.state.actors.values()
    channels = list(host.connection.channels._serving)
    for channel in channels:
        channel._transport.sock.shutdown(socket.SHUT_RDWR)
    return len(channels)


class Stage:
    """A backend with one replica, which is not on the worker of the proxy."""

    def __init__(self, client: serve.Client, external: ExternalCluster) -> None:
        self._dask = external.client
        self.worker = next(each for each in self._dask.run(int) if each != worker_of(client, "proxy"))
        client.deploy("s", HoldsOneCall, actor_options={"workers": [self.worker]}, route_prefix="/s")
        self.url = client.http_urls()[0] + "/s"
        self.handle = client.get_handle("s")

    def cut(self) -> None:
        assert self._dask.run(cut, workers=[self.worker])[self.worker] >= 1

    def ask(self, method: str) -> Any:
        return self.handle.options(method_name=method).remote().result(20)

    def held_request(self, method: str) -> tuple[threading.Thread, list[Reply]]:
        """Start a request that hangs in the replica; return its thread and the list for its answer."""
        self.ask("hold_next")
        before = self.ask("state")[0]
        replies: list[Reply] = []
        thread = threading.Thread(target=lambda: replies.append(fetch(self.url, method)))
        thread.start()
        poll_for(lambda: self.ask("state") == [before + 1, 1])
        return thread, replies


@pytest.fixture
def stage(client: serve.Client, external: ExternalCluster) -> Iterator[Stage]:
    stage = Stage(client, external)
    assert fetch(stage.url).status == 200
    yield stage
    poll_for(lambda: stage.ask("state")[1] == 0)  # the interrupted request does not continue to run


def test_the_next_request_reopens_the_connection(stage: Stage) -> None:
    for _ in range(3):
        stage.cut()
        with within(SOON_S):
            assert fetch(stage.url, "POST").status == 200
        assert stage.ask("state")[1] == 0


def test_an_idempotent_request_in_flight_is_retried(stage: Stage) -> None:
    thread, replies = stage.held_request("GET")
    with within(SOON_S):
        stage.cut()
        thread.join(20)
    assert [(each.status, each.text) for each in replies] == [(200, "3")]


def test_a_request_that_is_not_idempotent_fails_and_is_not_retried(stage: Stage) -> None:
    thread, replies = stage.held_request("POST")
    stage.cut()
    thread.join(20)
    (reply,) = replies
    request_id = reply.headers["x-request-id"]
    assert (reply.status, reply.text) == (
        502,
        f"Request {request_id} failed: the replica that had it was lost.",
    )
    assert stage.ask("state") == [2, 0]


def test_a_call_in_flight_fails_as_begun(stage: Stage) -> None:
    stage.ask("hold_next")
    response = stage.handle.remote()
    poll_for(lambda: stage.ask("state") == [2, 1])
    stage.cut()
    with pytest.raises(ActorLostError) as caught, within(SOON_S):
        response.result(20)
    assert caught.value.begun
    assert stage.handle.remote().result(20) == "3"


@pytest.mark.parametrize("route", ["direct", "scheduler"])
def test_another_worker_at_the_same_address_is_detected(
    route: str, external: ExternalCluster, client: serve.Client
) -> None:
    """Its process does not have the actor, or has another incarnation of it."""
    controller = next(each for each in client.status().actors if each.kind == "controller")
    with dask.config.set({"daskserve.channel.route": route}):
        with Client(external.address, set_as_default=False) as dask_client:
            connection = connection_of(dask_client)
            cluster = connection.cluster(client.instance_name)
            here = connection.sync(cluster.controller())
            assert here.worker == controller.worker
            for wrong in (replace(here, incarnation=here.incarnation + 1), replace(here, name="nobody")):
                with pytest.raises(ActorLostError, match="is not on") as caught:
                    connection.sync(cluster.call(wrong, "ping"))
                assert not caught.value.begun
            assert connection.sync(cluster.call(here, "ping")) == here.incarnation
