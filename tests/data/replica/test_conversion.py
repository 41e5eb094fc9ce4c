"""What user code returns or raises, as a response."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import datetime
import enum
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pydantic
import pytest
from runs import respond_piped
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from daskserve.common.types import WHOLE_RESPONSE, Message
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.execution.message_pipe import open_pipe
from daskserve.data.replica.user_code.responses import (
    ConvertedResponse,
    Unfinished,
    dump_result,
    failed_response,
    finish,
    finish_in_thread,
    raised_response,
    to_answer,
)
from daskserve.errors import StreamOptionError, UserCodeError
from daskserve.payload.error_text import traceback_text
from daskserve.payload.packed_errors import PackedError, pack_now
from daskserve.payload.pickling import load

SCOPE: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "headers": []}


@dataclasses.dataclass
class Point:
    x: int
    when: datetime.date


class Model(pydantic.BaseModel):
    name: str
    at: datetime.datetime


class Color(enum.Enum):
    RED = "red"


class Opaque:
    pass


def head_and_body(answer: ConvertedResponse | Unfinished) -> tuple[int, dict[str, str], bytes]:
    assert isinstance(answer, ConvertedResponse)
    assert answer.message is not None
    assert answer.message["type"] == WHOLE_RESPONSE
    headers = {name.decode(): value.decode() for name, value in answer.message["headers"]}
    return answer.message["status"], headers, answer.message["body"]


# ---- whole results


@pytest.mark.parametrize(
    ("result", "content_type", "body"),
    [
        (None, "text/plain", b""),
        (b"\x00raw", "application/octet-stream", b"\x00raw"),
        (bytearray(b"raw"), "application/octet-stream", b"raw"),
        (memoryview(b"raw"), "application/octet-stream", b"raw"),
        ("grüß", "text/plain; charset=utf-8", "grüß".encode()),
        ({"a": [1, 2.5, None, True]}, "application/json", b'{"a":[1,2.5,null,true]}'),
        ([1, "ü"], "application/json", '[1,"ü"]'.encode()),
        (7, "application/json", b"7"),
        (False, "application/json", b"false"),
        ((1, 2), "application/json", b"[1,2]"),
        (np.float32(0.5), "application/json", b"0.5"),
        (np.int64(3), "application/json", b"3"),
        (np.bool_(True), "application/json", b"true"),
        (np.arange(4).reshape(2, 2), "application/json", b"[[0,1],[2,3]]"),
        (np.array(["a", "b"]), "application/json", b'["a","b"]'),
        ({"scores": np.ones(2), "n": np.int8(1)}, "application/json", b'{"scores":[1.0,1.0],"n":1}'),
        (Point(1, datetime.date(2020, 1, 2)), "application/json", b'{"x":1,"when":"2020-01-02"}'),
        (
            Model(name="n", at=datetime.datetime(2020, 1, 2)),
            "application/json",
            b'{"name":"n","at":"2020-01-02T00:00:00"}',
        ),
        (ValueError("no luck"), "application/json", b'"no luck"'),
    ],
)
def test_each_kind_of_result_has_its_content_type(result: Any, content_type: str, body: bytes) -> None:
    status, headers, written = head_and_body(to_answer(result))
    assert (status, headers["content-type"], written) == (200, content_type, body)
    assert "content-length" not in headers  # the server adds it


@pytest.mark.parametrize("result", [Opaque(), {"deep": [Opaque()]}])
def test_a_result_that_cannot_be_written_is_named_by_its_type(result: Any) -> None:
    with pytest.raises(UserCodeError, match=r"test_conversion\.Opaque cannot be written as JSON"):
        to_answer(result)


def test_a_result_that_contains_itself_is_an_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UserCodeError, match=r"builtins\.list"):
        to_answer(loop)


def test_the_result_of_a_call_is_pickled_or_named() -> None:
    assert load(dump_result("Method f", {"a": 1})) == {"a": 1}
    with pytest.raises(UserCodeError, match=r"Method f returned a _thread\.lock"):
        dump_result("Method f", threading.Lock())
    with pytest.raises(StreamOptionError, match=r"Method f is a generator; call it with .*stream=True"):
        dump_result("Method f", (n for n in range(3)))


# ---- Starlette's responses


def test_a_plain_response_is_passed_on_with_status_headers_and_cookies() -> None:
    response = Response("text", 201, headers={"x-key": "v"}, media_type="text/css")
    response.set_cookie("c", "1")
    status, headers, body = head_and_body(to_answer(response))
    assert (status, headers["x-key"], body) == (201, "v", b"text")
    assert headers["content-type"] == "text/css; charset=utf-8"
    assert headers["set-cookie"].startswith("c=1")
    assert head_and_body(to_answer(JSONResponse({"a": 1})))[2] == b'{"a":1}'


def test_responses_that_do_more_than_render_send_themselves() -> None:
    for response in (StreamingResponse(iter("ab")), Response("x", background=BackgroundTask(print))):
        answer = to_answer(response)
        assert isinstance(answer, Unfinished)
        assert not answer.needs_thread


# ---- unfinished results


def send_all(step: Callable[[UserExecutor, Any], Awaitable[Any]]) -> tuple[Any, list[Message]]:
    """Carry one step's messages over a real wall."""

    async def main() -> tuple[Any, list[Message]]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        executor = UserExecutor("b", contextvars.copy_context(), event_loop="own")
        try:
            return await step(executor, open_pipe(executor, "http", receive, send)), sent
        finally:
            assert await executor.close(5)

    return asyncio.run(main())


def finished(result: Any) -> tuple[Any, list[Message]]:
    async def step(executor: UserExecutor, pipe: Any) -> Any:
        scope = {**SCOPE, "asgi": {"spec_version": "2.4"}}
        if Unfinished(result).needs_thread:
            return await respond_piped(executor, pipe, lambda: finish_in_thread(result, pipe), is_async=False)
        return await respond_piped(executor, pipe, lambda: finish(scope, pipe, result))

    return send_all(step)


def bodies(sent: list[Message]) -> list[bytes]:
    return [message["body"] for message in sent if message["type"] == "http.response.body"]


def plain_chunks() -> Iterator[Any]:
    yield "a"
    yield b"b"
    yield {"c": 1}


async def async_chunks() -> AsyncIterator[Any]:
    for chunk in plain_chunks():
        yield chunk


@pytest.mark.parametrize("make", [plain_chunks, async_chunks])
def test_generators_are_streamed_chunk_by_chunk(make: Callable[[], Any]) -> None:
    result = make()
    assert to_answer(result) == Unfinished(result)
    answer, sent = finished(result)
    assert answer == ConvertedResponse()
    assert sent[0]["headers"] == [(b"content-type", b"text/plain; charset=utf-8")]
    assert b"".join(bodies(sent)) == b'ab{"c":1}'  # parts that are ready together are joined
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]


def fails_at(index: int) -> Iterator[Any]:
    for number in range(index):
        yield str(number)
    raise ValueError("broken")


async def fails_at_async(index: int) -> AsyncIterator[Any]:
    for chunk in fails_at(index):
        yield chunk


@pytest.mark.parametrize("make", [fails_at, fails_at_async])
@pytest.mark.parametrize("index", [0, 2])
def test_a_stream_that_fails_raises_its_error(make: Callable[[int], Any], index: int) -> None:
    with pytest.raises(PackedError, match="ValueError: broken"):
        finished(make(index))


def test_a_streaming_response_sends_itself_and_runs_its_background_task() -> None:
    ran: list[bool] = []

    async def note() -> None:
        ran.append(True)

    answer, sent = finished(StreamingResponse(async_chunks_of_text(), 202, background=BackgroundTask(note)))
    assert answer == ConvertedResponse()
    assert sent[0]["status"] == 202
    assert b"".join(bodies(sent)) == b"ab"
    assert ran == [True]


async def async_chunks_of_text() -> AsyncIterator[str]:
    yield "a"
    yield "b"


def test_an_awaitable_stands_for_its_result() -> None:
    async def later() -> str:
        return "text"

    answer, _ = finished(later())
    assert head_and_body(answer)[2] == b"text"


# ---- errors


def packed(error: Exception) -> PackedError:
    found = pack_now(error)
    assert found is not None
    return found


def test_an_error_is_not_shown_to_the_client() -> None:
    answer = failed_response(packed(ValueError("secret")), is_debug=False)
    status, headers, body = head_and_body(answer)
    assert (status, body) == (500, b"Internal Server Error")
    assert headers["content-type"].startswith("text/plain")
    assert answer.is_failure


def test_debug_answers_with_the_traceback() -> None:
    body = head_and_body(failed_response(packed(ValueError("secret")), is_debug=True))[2]
    assert body.startswith(b"Task Error. Traceback: ")
    assert b"ValueError: secret" in body


def test_a_client_that_leaves_in_the_middle_of_its_upload_is_no_failure() -> None:
    assert not raised_response(ClientDisconnect()).is_failure


def test_an_http_exception_is_an_answer_of_its_own() -> None:
    answer = raised_response(HTTPException(404, "no such thing", headers={"X-Key": "v"}))
    status, headers, body = head_and_body(answer)
    assert (status, headers["x-key"], body) == (404, "v", b"no such thing")
    assert not answer.is_failure
    assert head_and_body(raised_response(HTTPException(204))) == (204, {}, b"")


def test_a_users_traceback_begins_with_the_users_own_frame() -> None:
    def fail() -> None:
        raise ValueError("mine")

    ours: dict[str, Any] = {"__name__": "daskserve.data.replica.user_code.servable"}
    exec("def serve(f):\n try:\n  f()\n except ValueError as error:\n  return error", ours)
    text = traceback_text(ours["serve"](fail))
    assert "in fail" in text
    assert "in serve" not in text
    assert text.rstrip().endswith("ValueError: mine")


def test_an_error_of_ours_alone_keeps_its_traceback() -> None:
    ours: dict[str, Any] = {"__name__": "daskserve.data.replica.user_code.servable"}
    exec("def serve():\n try:\n  raise ValueError('own')\n except ValueError as error:\n  return error", ours)
    assert "in serve" in traceback_text(ours["serve"]())
