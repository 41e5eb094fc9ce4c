"""What happens to a request when its client disconnects, before and after it has the response."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route

import daskserve as serve
from daskserve.common.types import Envelope, EnvelopeKind
from daskserve.data.replica.execution.message_pipe import ClientDisconnectedError, MessagePipe
from daskserve.data.replica.execution.socket_pipe import open_socket_pipe
from daskserve.proxies.exchange.websocket import session
from daskserve.proxies.server import disconnects
from daskserve.testing import local_instance

DEADLINE_S = 10.0
CLIENTS = 20


def note(request: Request, text: str) -> None:
    """Append a line to the file that the request names."""
    with Path(request.query_params["file"]).open("a") as file:
        file.write(f"{text}\n")


async def respond(request: Request) -> PlainTextResponse:
    async def task() -> None:
        await asyncio.sleep(0.1)
        note(request, "background")

    return PlainTextResponse("done", background=BackgroundTask(task))


async def wait(request: Request) -> PlainTextResponse:
    note(request, "begun")
    try:
        if request.query_params.get("long"):
            await asyncio.sleep(DEADLINE_S)
        while not await request.is_disconnected():  # noqa: ASYNC110 - this is what is tested
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        note(request, "cancelled")
        raise
    note(request, "disconnected")
    return PlainTextResponse("ignored", background=BackgroundTask(note, request, "background"))


class NotedStream(StreamingResponse):
    """Records its end. Starlette leaves a generator that waits for its client to the garbage collector."""

    def __init__(self, request: Request, content: Any) -> None:
        super().__init__(content)
        self._request = request

    async def __call__(self, *asgi: Any) -> None:
        try:
            await super().__call__(*asgi)
        finally:
            note(self._request, "closed")


async def stream(request: Request) -> StreamingResponse:
    async def lines() -> Any:
        note(request, "begun")
        while True:
            yield "line\n"
            await asyncio.sleep(0.01)

    return NotedStream(request, lines())


async def passes_on(request: Request, call_next: Any) -> Any:
    return await call_next(request)


async def late(scope: Any, receive: Any, send: Any) -> None:
    """Send the start of a response, and nothing more until the client has left."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]})
    await silent(scope, receive, send)


async def silent(scope: Any, receive: Any, send: Any) -> None:
    """Return without a response once the client has left."""
    note(Request(scope), f"begun with state {scope['state']}")
    while (await receive())["type"] != "http.disconnect":
        pass
    note(Request(scope), "disconnected")


async def push(scope: Any, receive: Any, send: Any) -> None:
    """Only send, like a news feed."""
    await receive()
    await send({"type": "websocket.accept"})
    file = Path(dict(parse_qsl(scope["query_string"].decode()))["file"])
    file.write_text("begun\n")
    try:
        while True:
            await send({"type": "websocket.send", "text": "news"})
            await asyncio.sleep(0.01)
    except OSError:
        file.write_text("begun\nerror\n")
        raise
    except asyncio.CancelledError:
        file.write_text("begun\ncancelled\n")
        raise


def application() -> Starlette:
    # Behind such a middleware, `is_disconnected` is never true, under any server.
    behind = Starlette(
        routes=[Route("/respond", respond), Route("/stream", stream)],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=passes_on)],
    )
    return Starlette(
        routes=[
            Route("/wait", wait),
            Mount("/behind", behind),
            Mount("/late", late),
            Mount("/silent", silent),
            Mount("/push", push),
        ]
    )


async def plain(request: Request) -> str:
    note(request, "begun")
    try:
        await asyncio.sleep(DEADLINE_S if request.query_params.get("long") else 0.2)
        note(request, "ended")
    except asyncio.CancelledError:
        note(request, "cancelled")
        raise
    return "done"


async def endless(request: Request) -> Any:
    note(request, "begun")
    try:
        while True:
            yield "line\n"
            await asyncio.sleep(0.01)
    finally:
        note(request, "closed")


PLACES: dict[str, dict[str, Any]] = {
    "own": {},
    "worker": {"event_loop": "worker"},
    "process": {"isolation": "process"},
}


MODES = (None, "cancel", "disconnect")
#: A child gets the option like a thread, and one for each kind of backend and mode would take long to start.
IN_THREADS = [(place, mode) for place in ("own", "worker") for mode in MODES]
APPS = [*IN_THREADS, ("process", None), ("process", "cancel")]
STREAMS = [*IN_THREADS, ("process", None)]
PLAIN = [*IN_THREADS, *(("process", mode) for mode in MODES)]


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    options = {"port": 0}
    with pytest.MonkeyPatch.context() as patch, local_instance(http_options=options) as client:
        patch.setattr(disconnects, "PERIOD_S", 0.02)  # the servers find out sooner whether a client has left
        kinds = (("app", application(), APPS), ("plain", plain, PLAIN), ("endless", endless, STREAMS))
        for kind, definition, ways in kinds:
            for place, mode in ways:
                tag = f"{kind}-{place}-{mode}"
                client.create_backend(tag, definition, config={**PLACES[place], "on_disconnect": mode})
                client.create_endpoint(tag, backend=tag, route=f"/{tag}")
        yield client


def begin(client: serve.Client, path: str, file: Path, more: str = "", headers: str = "") -> socket.socket:
    """Send a request, and return its connection."""
    place = urlsplit(client.http_urls()[0])
    connection = socket.create_connection((place.hostname, place.port), timeout=DEADLINE_S)
    connection.sendall(f"GET {path}?file={file}{more} HTTP/1.1\r\nHost: h\r\n{headers}\r\n".encode())
    return connection


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def wait_for(file: Path, *expected: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while lines_of(file) != list(expected):
        assert time.monotonic() < deadline, lines_of(file)
        time.sleep(0.01)


@pytest.mark.parametrize("place", PLACES)
def test_background_tasks_run_although_their_clients_have_left(
    client: serve.Client, place: str, tmp_path: Path
) -> None:
    file = tmp_path / "seen"
    for _ in range(CLIENTS):
        with begin(client, f"/app-{place}-None/behind/respond", file) as connection:
            received = b""
            while not received.endswith(b"done"):
                received += connection.recv(4096)
    wait_for(file, *["background"] * CLIENTS)


@pytest.mark.parametrize(("place", "mode"), [each for each in APPS if each[1] != "cancel"])
def test_an_application_receives_the_disconnect_and_continues(
    client: serve.Client, place: str, mode: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "seen"
    with begin(client, f"/app-{place}-{mode}/wait", file):
        wait_for(file, "begun")
    wait_for(file, "begun", "disconnected", "background")
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize(("place", "mode"), STREAMS)
def test_a_stream_ends_when_its_client_leaves(
    client: serve.Client, place: str, mode: str | None, tmp_path: Path
) -> None:
    for path in (f"/app-{place}-{mode}/behind/stream", f"/endless-{place}-{mode}"):
        file = tmp_path / path.split("-")[0].strip("/")
        with begin(client, path, file) as connection:
            received = b""
            while b"line" not in received:
                received += connection.recv(4096)
        wait_for(file, "begun", "closed")


@pytest.mark.parametrize(("place", "mode"), PLAIN)
def test_a_plain_callable_is_cancelled_unless_the_option_says_otherwise(
    client: serve.Client, place: str, mode: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "seen"
    more = "" if mode == "disconnect" else "&long=1"
    with begin(client, f"/plain-{place}-{mode}", file, more):
        wait_for(file, "begun")
    wait_for(file, "begun", "ended" if mode == "disconnect" else "cancelled")


def test_an_application_is_cancelled_if_the_option_says_so(client: serve.Client, tmp_path: Path) -> None:
    for place in PLACES:
        file = tmp_path / place
        with begin(client, f"/app-{place}-cancel/wait", file, "&long=1"):
            wait_for(file, "begun")
        wait_for(file, "begun", "cancelled")


@pytest.mark.parametrize("place", PLACES)
def test_the_start_of_a_response_does_not_wait_for_its_first_part(
    client: serve.Client, place: str, tmp_path: Path
) -> None:
    file = tmp_path / "seen"
    with begin(client, f"/app-{place}-None/late/", file) as connection:
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            received += connection.recv(4096)
    assert b"\r\nx-a: b\r\n" in received
    wait_for(file, "begun with state {}", "disconnected")


@pytest.mark.parametrize("place", ["own", "worker"])
def test_an_application_need_not_answer_a_client_that_has_left(
    client: serve.Client, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "seen"
    with begin(client, f"/app-{place}-None/silent/", file):
        wait_for(file, "begun with state {}")
    wait_for(file, "begun with state {}", "disconnected")
    assert not [each.message for each in caplog.records if each.levelno >= logging.ERROR]


HANDSHAKE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AQIDBAUGBwgJCgsMDQ4PEA==\r\n"
)


@pytest.mark.parametrize("place", PLACES)
def test_code_that_only_sends_to_a_websocket_ends_after_its_client_has_left(
    client: serve.Client,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(session, "DISCONNECT_GRACE_S", 0.1)
    file = tmp_path / "seen"
    with begin(client, f"/app-{place}-None/push/", file, headers=HANDSHAKE):
        wait_for(file, "begun")
    deadline = time.monotonic() + DEADLINE_S
    while lines_of(file) not in (["begun", "error"], ["begun", "cancelled"]):
        assert time.monotonic() < deadline, lines_of(file)
        time.sleep(0.01)
    assert not [each.message for each in caplog.records if each.levelno >= logging.ERROR]


async def test_a_message_to_a_websocket_whose_client_has_left_is_an_error() -> None:
    class Gone:
        async def send(self, message: Any) -> None:
            raise ConnectionResetError

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.disconnect", "code": 1006, "reason": ""}

    async def send(message: Any) -> None:
        pass

    async def tell(pipe: MessagePipe) -> None:
        with pytest.raises(ClientDisconnectedError):
            await pipe.send({"type": "websocket.send", "text": "hi"})
        await pipe.send({"type": "websocket.close", "code": 1000})  # an application may clean up

    envelope = Envelope(EnvelopeKind.HTTP, {"type": "websocket"}, is_direct=True)
    executor: Any = SimpleNamespace(is_on_worker_loop=True, loop=asyncio.get_running_loop())
    pipe = open_socket_pipe(executor, envelope, receive, send, None)
    await pipe.send({"type": "websocket.accept"})
    await pipe.send({"type": "websocket.send", "text": "hi"})
    pipe._receiver.take_socket(Gone())  # type: ignore[attr-defined]
    await tell(pipe)
    far = open_socket_pipe(executor, replace(envelope, is_direct=False), receive, send, None)
    await far.send({"type": "websocket.accept"})
    await far.receive()
    await tell(far)
    closed = open_socket_pipe(executor, envelope, receive, send, None)
    closed.close()
    await tell(closed)
