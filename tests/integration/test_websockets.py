"""WebSockets over a real socket, across processes, to plain ASGI applications."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from blocking_websocket import talk
from clusters import nannied_cluster, pids, worker_of
from dask_processes import ExternalCluster, fetch, poll_for, within
from wsproto.events import AcceptConnection, CloseConnection, Message

import daskserve as serve


def application() -> Any:
    """Return a Starlette application that echoes, reports its process id, and records disconnects."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route, WebSocketRoute
    from starlette.websockets import WebSocket, WebSocketDisconnect

    left: list[int] = []

    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                message = await socket.receive()
                if message["type"] == "websocket.disconnect":
                    raise WebSocketDisconnect(message["code"])
                if message.get("text") == "who":
                    await socket.send_text(str(os.getpid()))
                elif message.get("text") == "bye":
                    await socket.close(4001)
                elif message.get("text") is not None:
                    await socket.send_text(message["text"])
                else:
                    await socket.send_bytes(message["bytes"])
        except WebSocketDisconnect as error:
            left.append(error.code)

    async def disconnects(request: Any) -> JSONResponse:
        return JSONResponse(left)

    return Starlette(routes=[WebSocketRoute("/echo", echo), Route("/left", disconnects)])


@pytest.fixture(
    params=[
        pytest.param(("HeadOnly", "tornado"), marks=pytest.mark.nightly),
        pytest.param(("EveryWorker", "tornado"), marks=pytest.mark.nightly),
        ("HeadOnly", "asyncio"),
    ],
    ids=str,
)
def served(request: pytest.FixtureRequest, external: ExternalCluster) -> Iterator[tuple[serve.Client, str]]:
    """Yield an instance that serves the application at ``/app``, with the proxy on another worker."""
    location, server = request.param
    options = {"port": 0, "location": location, "server": server, "max_websocket_message_bytes": 4_000_000}
    with serve.start(http_options=options, dask_client=external.client) as client:
        client.create_backend("app", application())
        client.create_endpoint("app", backend="app", route="/app", methods=["GET"])
        yield client, client.http_urls()[0]


@pytest.mark.smoke
def test_messages_of_any_size_pass_in_both_directions(served: tuple[serve.Client, str]) -> None:
    _, url = served
    with talk(f"{url}/app/echo") as client:
        assert isinstance(client.event(), AcceptConnection)
        for data in ("hello", "", "ü" * 1000, b"\x00\x01", os.urandom(3_000_000)):
            assert client.ask(data) == data
        text = base64.b64encode(os.urandom(600_000)).decode()
        for _ in range(5):
            assert client.ask(text) == text
        client.send(Message(data="bye"))
        assert client.closed() == 4001


def test_the_application_gets_the_close_code_of_its_clients(served: tuple[serve.Client, str]) -> None:
    _, url = served
    with talk(f"{url}/app/echo") as client:
        client.event()
        client.send(CloseConnection(code=4002))
        assert isinstance(client.event(), CloseConnection)
    with talk(f"{url}/app/echo") as client:
        client.event()
    left = f"{url}/app/left"
    poll_for(lambda: sorted(fetch(left).json) == [1006, 4002], what=lambda: fetch(left).json)


def test_an_isolated_replica_that_stops_closes_its_websockets(
    served: tuple[serve.Client, str],
) -> None:
    client, url = served
    client.create_backend("apart", application(), config={"isolation": "process"})
    client.create_endpoint("apart", backend="apart", route="/apart", methods=["GET"])
    with talk(f"{url}/apart/echo") as socket:
        socket.event()
        assert socket.ask("x") == "x"
        client.delete_endpoint("apart")
        with within(10):  # before its grace period of 20 s ends
            client.delete_backend("apart", blocking=False)
            assert socket.closed() == 1001


def test_a_websocket_whose_replica_dies_is_closed_with_an_error() -> None:
    with nannied_cluster(3) as dask, serve.start(dask_client=dask, http_options={"port": 0}) as client:
        workers = pids(dask)
        (victim,) = set(workers) - {worker_of(client, "proxy"), worker_of(client, "controller")}
        client.create_backend("b", application(), actor_options={"workers": [victim]})
        client.create_endpoint("e", backend="b", route="/e", methods=["GET"])
        with talk(f"{client.http_urls()[0]}/e/echo") as socket:
            socket.event()
            assert socket.ask("x") == "x"
            os.kill(workers[victim], signal.SIGKILL)
            assert socket.closed() == 1011
