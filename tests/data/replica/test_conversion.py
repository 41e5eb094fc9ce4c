"""Responses made from the results and errors of user code."""

from __future__ import annotations

import dataclasses
import datetime
import threading
from typing import Any

import numpy as np
import pydantic
import pytest
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from tables import case

from daskserve.common.types import WHOLE_RESPONSE
from daskserve.data.replica.user_code.responses import (
    ConvertedResponse,
    Unfinished,
    dump_result,
    raised_response,
    to_response,
)
from daskserve.errors import StreamOptionError, UserCodeError
from daskserve.payload.error_text import traceback_text


@dataclasses.dataclass
class Point:
    x: int
    when: datetime.date


class Model(pydantic.BaseModel):
    name: str
    at: datetime.datetime


class Opaque:
    pass


def head_and_body(answer: ConvertedResponse | Unfinished) -> tuple[int, dict[str, str], bytes]:
    assert isinstance(answer, ConvertedResponse)
    assert answer.message is not None
    assert answer.message["type"] == WHOLE_RESPONSE
    headers = {name.decode(): value.decode() for name, value in answer.message["headers"]}
    return answer.message["status"], headers, answer.message["body"]


# ---- whole results


def test_each_kind_of_result_has_its_content_type() -> None:
    for result, content_type, body in [
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
    ]:
        with case(result, content_type, body):
            status, headers, written = head_and_body(to_response(result))
            assert (status, headers["content-type"], written) == (200, content_type, body)
            assert "content-length" not in headers  # the server adds it


def test_a_result_that_cannot_be_written_is_named_by_its_type() -> None:
    for result in [Opaque(), {"deep": [Opaque()]}]:
        with case(result):
            with pytest.raises(UserCodeError, match=r"test_conversion\.Opaque cannot be written as JSON"):
                to_response(result)


def test_a_result_that_contains_itself_is_an_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UserCodeError, match=r"builtins\.list"):
        to_response(loop)


def test_the_result_of_a_call_is_pickled_or_named() -> None:
    assert dump_result("Method f", {"a": 1}).load() == {"a": 1}
    with pytest.raises(UserCodeError, match=r"Method f returned a _thread\.lock"):
        dump_result("Method f", threading.Lock())
    with pytest.raises(StreamOptionError, match=r"Method f is a generator; call it with .*stream=True"):
        dump_result("Method f", (n for n in range(3)))


# ---- Starlette's responses


def test_a_plain_response_is_passed_on_with_status_headers_and_cookies() -> None:
    response = Response("text", 201, headers={"x-key": "v"}, media_type="text/css")
    response.set_cookie("c", "1")
    status, headers, body = head_and_body(to_response(response))
    assert (status, headers["x-key"], body) == (201, "v", b"text")
    assert headers["content-type"] == "text/css; charset=utf-8"
    assert headers["set-cookie"].startswith("c=1")
    assert head_and_body(to_response(JSONResponse({"a": 1})))[2] == b'{"a":1}'


def test_responses_that_do_more_than_render_send_themselves() -> None:
    for response in (StreamingResponse(iter("ab")), Response("x", background=BackgroundTask(print))):
        answer = to_response(response)
        assert isinstance(answer, Unfinished)
        assert not answer.needs_thread


# ---- unfinished results


# ---- errors


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
