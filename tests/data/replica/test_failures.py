"""An exception in user code is logged once: by its replica, with the id of the request."""

from __future__ import annotations

import asyncio
import logging
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette import exceptions
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

import daskserve as serve
from daskserve.data.replica.errors.log import FailureLog
from daskserve.errors import UserCodeError
from daskserve.payload.packed_errors import (
    PackedError,
    dump_error,
    is_logged,
    load_error,
    note_logged,
    pack_in_steps,
    pack_now,
    received_error,
)
from daskserve.testing import local_instance

DEADLINE_S = 10.0


async def begin_and_fail() -> AsyncIterator[str]:
    yield "begun"
    raise ValueError("boom")


class ApiError(Exception):
    """Cannot be unpickled by calling its class, and has no text."""

    def __init__(self, message: str, *, response: Any) -> None:
        super().__init__(message)
        self.response = response

    def __str__(self) -> str:
        return self.response  # type: ignore[no-any-return]


class Failing:
    """Fails in every way that a callable can."""

    def __init__(self, log_file: str = "") -> None:
        if log_file:  # in a process of its own
            logging.basicConfig(filename=log_file, format="%(name)s %(message)s")

    async def __call__(self, request: Request) -> Any:
        if request.url.path.endswith("stream"):
            return begin_and_fail()
        if request.url.path.endswith("exit"):
            raise SystemExit(3)
        if request.url.path.endswith("missing"):
            raise exceptions.HTTPException(404)
        if request.url.path.endswith("odd"):
            raise ApiError("503", response=503)
        raise ValueError("boom")

    async def call(self) -> None:
        raise ValueError("boom")

    def plain(self) -> None:
        raise ValueError("boom")

    async def odd(self) -> None:
        try:
            raise ApiError("503", response=503)
        except ApiError as cause:
            error = ApiError("no rate", response=402)
            error.add_note("a note")
            raise error from cause

    async def items(self) -> AsyncIterator[str]:
        async for item in begin_and_fail():
            yield item

    def plain_items(self) -> Iterator[str]:
        yield "begun"
        raise ValueError("boom")

    async def exit(self) -> None:
        raise SystemExit(3)


def seen(response: Any) -> Any:
    """Return the error of `Failing.odd` as a caller gets it."""
    with pytest.raises(ApiError) as caught:
        response.result(DEADLINE_S)
    error = caught.value
    cause = error.__cause__
    assert cause is not None
    traceback = str(cause.__cause__)
    return (
        (type(error).__name__, error.args, error.response, error.__notes__),
        (type(cause).__name__, cause.args, error.__context__ is cause, type(cause.__cause__).__name__),
        [line.split(", in ")[1] for line in traceback.splitlines() if ", in " in line],
    )


class Caller:
    """Calls a deployment that fails."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def __call__(self, request: Request) -> None:
        await self.through()

    async def through(self) -> None:
        await self.inner.call.remote()

    async def seen(self) -> Any:
        return await asyncio.to_thread(seen, self.inner.odd.remote())

    async def instead(self) -> None:
        try:
            await self.inner.call.remote()
        except ValueError as error:
            raise KeyError("mine") from error


def application() -> Starlette:
    async def fail(request: Request) -> None:
        raise ValueError("boom")

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("begun")(scope, receive, send)
        raise ValueError("boom")

    async def begun(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        raise ValueError("boom")

    async def refuse(socket: WebSocket) -> None:
        raise ValueError("boom")

    async def open_and_fail(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("begun")
        raise ValueError("boom")

    return Starlette(
        routes=[
            Route("/fail", fail),
            Route("/behind", type("Behind", (), {"__call__": staticmethod(behind)})()),
            Route("/begun", type("Begun", (), {"__call__": staticmethod(begun)})()),
            WebSocketRoute("/refuse", refuse),
            WebSocketRoute("/open", open_and_fail),
        ]
    )


@serve.accept_batch
def batch(requests: list[Any]) -> list[Any]:
    raise ValueError("boom")


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    with local_instance(http_options={"port": 0}) as client:
        for place in ("own", "worker"):
            client.deploy(place, Failing, config={"event_loop": place})
        client.deploy("caller", Caller, client.get_handle("own"))
        client.create_backend("app", application())
        client.create_endpoint("app", backend="app", route="/app")
        client.create_backend("batch", batch, config={"max_batch_size": 4})
        client.create_endpoint("batch", backend="batch", route="/batch")
        yield client


def ask(client: serve.Client, path: str) -> int:
    """Send a request with the id ``id-42`` and return the status, 0 if the response is cut off."""
    request = urllib.request.Request(client.http_urls()[0] + path, headers={"x-request-id": "id-42"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (OSError, HTTPException):
        return 0


async def open_socket(url: str) -> None:
    request = HTTPRequest(url, headers={"x-request-id": "id-42"})
    try:
        connection = await websocket_connect(request)
    except HTTPClientError:
        return  # refused
    while await connection.read_message() is not None:
        pass
    connection.close()


def the_record(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """Return the only record of at least level WARNING, once there is one."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := [each for each in caplog.records if each.levelno >= logging.WARNING]):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(0.02)  # another one would follow at once
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert record is found[0]
    return record


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *(("/own", 500), ("/own/stream", 0), ("/own/exit", 500), ("/own/odd", 500)),
        *(("/worker", 500), ("/worker/stream", 0), ("/worker/exit", 500), ("/worker/odd", 500)),
        *(("/app/fail", 500), ("/app/behind", 200), ("/app/begun", 0)),
        ("/batch", 500),
    ],
)
def test_an_error_over_http_is_logged_once_with_the_request_id(
    client: serve.Client, caplog: pytest.LogCaptureFixture, path: str, status: int
) -> None:
    assert ask(client, path) == status
    record = the_record(caplog)
    backend = path.split("/")[1]
    assert record.name == "daskserve.replica"
    assert record.getMessage().startswith(f"Request id-42 to {backend}#")
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], BaseException)


@pytest.mark.parametrize("path", ["/app/refuse", "/app/open"])
def test_an_error_in_a_websocket_is_logged_once(
    client: serve.Client, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    asyncio.run(open_socket(client.http_urls()[0].replace("http", "ws", 1) + path))
    assert the_record(caplog).getMessage().startswith("Request id-42 to app#")


@pytest.mark.parametrize("place", ["own", "worker"])
@pytest.mark.parametrize("method", ["call", "plain", "exit", "items", "plain_items"])
def test_an_error_of_a_call_is_logged_once(
    client: serve.Client, caplog: pytest.LogCaptureFixture, place: str, method: str
) -> None:
    handle = client.get_handle(place).options(method_name=method)
    error = UserCodeError if method == "exit" else ValueError
    if "items" in method:
        answers = handle.options(stream=True).remote()
        with pytest.raises(error):
            list(answers)
    else:
        answers = handle.remote()
        with pytest.raises(error):
            answers.result(DEADLINE_S)
    record = the_record(caplog)
    assert record.getMessage().startswith(f"Request {answers.request_id} to {place}#")


def test_an_error_that_passes_through_another_replica_is_logged_where_it_was_raised(
    client: serve.Client, caplog: pytest.LogCaptureFixture
) -> None:
    answer = client.get_handle("caller").through.remote()
    with pytest.raises(ValueError, match="boom"):
        answer.result(DEADLINE_S)
    assert the_record(caplog).getMessage().startswith(f"Request {answer.request_id} to own#")


def test_another_error_raised_in_its_place_is_logged_too(
    client: serve.Client, caplog: pytest.LogCaptureFixture
) -> None:
    answer = client.get_handle("caller").instead.remote()
    with pytest.raises(KeyError, match="mine"):
        answer.result(DEADLINE_S)
    messages = [each.getMessage().split("#")[0] for each in caplog.records]
    assert messages == [f"Request {answer.request_id} to {name}" for name in ("own", "caller")]


def test_an_error_is_the_same_wherever_it_is_raised_and_caught(client: serve.Client) -> None:
    client.deploy("child", Failing, config={"isolation": "process"})
    found = [seen(client.get_handle(place).odd.remote()) for place in ("own", "worker", "child")]
    found.append(client.get_handle("caller").seen.remote().result(DEADLINE_S))  # in the same process
    client.delete_deployment("child")
    assert (
        found
        == [
            (
                ("ApiError", ("no rate",), 402, ["a note"]),
                ("ApiError", ("503",), True, "RemoteTraceback"),
                ["odd", "odd"],
            )
        ]
        * 4
    )


def test_an_http_exception_is_a_response(client: serve.Client, caplog: pytest.LogCaptureFixture) -> None:
    assert ask(client, "/own/missing") == 404
    assert caplog.records == []


def test_a_process_of_its_own_logs_its_errors_itself(
    client: serve.Client, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "log"
    client.deploy("child", Failing, str(file), config={"isolation": "process"})
    assert (ask(client, "/child"), ask(client, "/child/stream"), ask(client, "/child/exit")) == (500, 0, 500)
    answer = client.get_handle("child").call.remote()
    with pytest.raises(ValueError, match="boom"):
        answer.result(DEADLINE_S)
    client.delete_deployment("child")
    lines = [line for line in file.read_text().splitlines() if line.startswith("daskserve.replica ")]
    requests = ["id-42"] * 3 + [answer.request_id]
    assert [line.split("#")[0] for line in lines] == [
        f"daskserve.replica Request {request} to child" for request in requests
    ]
    assert caplog.records == []


# ---- the note


def packed(error: BaseException) -> PackedError:
    """Return a packed error, whichever way packs it."""
    *_, found = [pack_now(error)] if pack_now(error) else pack_in_steps(error)
    assert found is not None
    return found


def test_the_same_error_is_logged_for_each_request_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    error, log = packed(ValueError("one object")), FailureLog("model#1")
    for request_id in ("a", "a", "b"):
        log.log(error, request_id)
    assert [each.getMessage() for each in caplog.records] == [
        "Request a to model#1 failed",
        "Request b to model#1 failed",
    ]
    for request, expected in (
        (None, log.log),
        (SimpleNamespace(is_shown=False), log.log),
        (SimpleNamespace(is_shown=True), log.log_in_short),
    ):
        assert log.logs_for(cast("Any", request)) == expected


class Odd(Exception):
    """An error that cannot be pickled, and refuses attributes."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        raise TypeError("never")


def test_the_note_crosses_processes() -> None:
    for error in (ValueError("x"), Odd("x"), serve.errors.ServeError("x")):
        assert not is_logged(error)
        note_logged(error, "a", "b")
        found = packed(error)
        for each in (error, found, received_error(found.data), load_error(dump_error(found))):
            assert is_logged(each)
            assert is_logged(each, "b")
            assert not is_logged(each, "c")
    assert not is_logged(load_error(dump_error(KeyError())))
