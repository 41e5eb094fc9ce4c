"""WebSockets whose connection moves to the event loop of user code, under both servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from blocking_websocket import WebSocketClient, talk
from starlette.middleware import Middleware
from wsproto.events import AcceptConnection, CloseConnection, Message

import daskserve as serve
from daskserve.common.types import Receive, Send
from daskserve.proxies.exchange.websocket import session as websocket
from daskserve.testing import local_instance

DEADLINE_S = 10.0
#: The records of this file's applications, and the events for which they wait.
NOTES: list[Any] = []
GO = threading.Event()
BEGAN = threading.Event()


async def application(scope: Any, receive: Receive, send: Send) -> None:
    """Echo; ``block`` blocks the event loop, ``bye`` closes, ``fail`` raises."""
    if scope["type"] == "lifespan":
        return
    early = None
    if scope["path"].endswith("/early"):
        assert (await receive())["type"] == "websocket.connect"
        early = asyncio.create_task(receive())  # waits while the connection moves
        await asyncio.sleep(0)
    await send({"type": "websocket.accept"})
    if early is None:
        assert (await receive())["type"] == "websocket.connect"
    while True:
        message = await (receive() if early is None else early)
        early = None
        if message["type"] == "websocket.disconnect":
            NOTES.append(message["code"])
            return
        text = message.get("text")
        if text == "block":
            BEGAN.set()
            GO.wait(DEADLINE_S)
        elif text == "bye":
            await send({"type": "websocket.close", "code": 4001})
        elif text == "fail":
            raise RuntimeError("broken")
        else:
            await send({"type": "websocket.send", "text": text, "bytes": message.get("bytes")})


async def blocker(request: Any) -> str:
    """Block the loop of the worker, where the servers are."""
    BEGAN.set()
    GO.wait(DEADLINE_S)
    return "done"


async def witness(scope: Any, receive: Receive, send: Send) -> None:
    """A shadow that records the messages that it receives."""
    if scope["type"] == "lifespan":
        return
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] != "websocket.disconnect":
        NOTES.append(message.get("text"))


class Watching:
    """A middleware of the proxy that counts messages."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        async def watched(message: Any) -> None:
            NOTES.append(message["type"])
            await send(message)

        await self._app(scope, receive, watched)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    NOTES.clear()
    GO.clear()
    BEGAN.clear()
    yield
    GO.set()


@pytest.fixture(params=["tornado", "asyncio"])
def server(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def serving(server: str, http: Any = None, **config: Any) -> Iterator[tuple[serve.Client, str]]:
    options = {"port": 0, "server": server, **(http or {})}
    with local_instance(workers=1, http_options=options) as client:
        client.create_backend("b", application, config={"health_check_period_s": 60, **config})
        client.create_endpoint("e", backend="b", route="/e", methods=["GET"])
        yield client, client.http_urls()[0]


def poll_for(condition: Any) -> None:
    done = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("the condition does not come true")


def is_moved(client: serve.Client, url: str, socket: WebSocketClient) -> bool:
    """Return whether messages pass while the event loop of the server is blocked."""
    client.create_backend("blocker", blocker, config={"event_loop": "worker"})
    client.create_endpoint("blocker", backend="blocker", route="/blocker")
    asking = threading.Thread(
        target=lambda: urllib.request.urlopen(f"{url}/blocker", timeout=DEADLINE_S).read()
    )
    asking.start()
    try:
        assert BEGAN.wait(DEADLINE_S)
        socket.set_timeout(0.3)
        return bool(socket.ask("x") == "x")
    except TimeoutError:
        return False
    finally:
        GO.set()
        asking.join()


def test_messages_pass_while_the_loop_of_the_server_is_blocked(server: str) -> None:
    with serving(server) as (client, url), talk(f"{url}/e") as socket:
        assert isinstance(socket.event(), AcceptConnection)
        assert is_moved(client, url, socket)


@pytest.mark.parametrize("event_loop", ["own", "worker"])
def test_all_messages_and_both_ends_pass(server: str, event_loop: str) -> None:
    options = {"max_websocket_message_bytes": 2_000_000, "websocket_compression": True}
    with serving(server, options, event_loop=event_loop) as (_, url):
        with talk(f"{url}/e") as socket:
            assert isinstance(socket.event(), AcceptConnection)
            for data in ("hello", "", "ü" * 1000, b"\x00\x01", os.urandom(1_900_000)):
                assert socket.ask(data) == data
            socket.send(Message(data="bye"))
            assert socket.closed() == 4001
        poll_for(lambda: NOTES == [4001])
        with talk(f"{url}/e/early") as socket:
            assert isinstance(socket.event(), AcceptConnection)
            assert socket.ask("first") == "first"
            socket.send(CloseConnection(code=4002))
            assert isinstance(socket.event(), CloseConnection)
        poll_for(lambda: NOTES == [4001, 4002])
        with talk(f"{url}/e") as socket:
            socket.event()
            socket.send(Message(data=bytes(2_000_001)))
            assert socket.closed() == 1009
        with talk(f"{url}/e") as socket:
            socket.event()
        poll_for(lambda: NOTES == [4001, 4002, 1009, 1006])


def test_an_application_that_fails_closes_with_1011(server: str, caplog: pytest.LogCaptureFixture) -> None:
    with serving(server) as (_, url), talk(f"{url}/e") as socket:
        socket.event()
        socket.send(Message(data="fail"))
        assert socket.closed() == 1011
    assert "broken" in caplog.text


@pytest.mark.parametrize("event_loop", ["own", "worker"])
def test_a_replica_that_stops_closes_with_1001(server: str, event_loop: str) -> None:
    with serving(server, event_loop=event_loop) as (client, url), talk(f"{url}/e") as socket:
        socket.event()
        assert socket.ask("x") == "x"
        client.delete_endpoint("e")
        client.delete_backend("b", blocking=False)
        assert socket.closed() == 1001
        poll_for(lambda: NOTES == [1001])


def test_a_client_that_does_not_answer_the_close_holds_up_no_replica(server: str) -> None:
    with serving(server) as (client, url), talk(f"{url}/e") as socket:
        socket.event()
        client.delete_endpoint("e")
        client.delete_backend("b")
        assert isinstance(socket.event(), CloseConnection)
        assert socket.event() is None


def test_a_proxy_that_stops_closes_with_1001(server: str) -> None:
    with serving(server) as (client, url), talk(f"{url}/e") as socket:
        socket.event()
        client.shutdown()
        assert socket.closed() == 1001


def test_a_handler_that_blocks_its_loop_delays_no_other_and_can_be_ended(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "CLOSE_TIMEOUT_S", 0.2)
    with serving(server, graceful_shutdown_timeout_s=0.1) as (client, url):
        client.create_backend("other", application)
        client.create_endpoint("other", backend="other", route="/other", methods=["GET"])
        with talk(f"{url}/e") as blocked, talk(f"{url}/other") as other:
            blocked.event()
            other.event()
            blocked.send(Message(data="block"))
            assert BEGAN.wait(DEADLINE_S)
            assert other.ask("x") == "x"
            client.delete_endpoint("e")
            client.delete_backend("b", blocking=False)
            assert blocked.closed() == 1011
            GO.set()


def test_middlewares_and_shadows_see_all_messages(server: str) -> None:
    with serving(server, {"middlewares": [Middleware(Watching)]}) as (client, url):
        with talk(f"{url}/e") as socket:
            socket.event()
            assert socket.ask("x") == "x"
            assert not is_moved(client, url, socket)
    assert NOTES.count("websocket.send") >= 1
    NOTES.clear()
    with serving(server) as (client, url):
        client.create_backend("witness", witness)
        client.shadow_traffic("e", "witness", 1.0)
        with talk(f"{url}/e") as socket:
            socket.event()
            assert socket.ask("seen") == "seen"
            poll_for(lambda: "seen" in NOTES)
