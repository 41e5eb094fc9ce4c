"""Responses of ASGI applications cross as one message where they can."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from daskserve.data.replica.joined_response import JoinedResponse
from daskserve.types import WHOLE_RESPONSE, Message

TYPE = (b"content-type", b"text/plain")


def start(*headers: Any, status: int = 200, **more: Any) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [TYPE, *headers], **more}


def body(text: bytes = b"abc", **more: Any) -> Message:
    return {"type": "http.response.body", "body": text, **more}


def passed_on(*messages: Message) -> list[Message]:
    """Return the messages that are passed on for those of an application."""
    found: list[Message] = []

    async def send(message: Message) -> None:
        found.append(message)

    async def main() -> None:
        response = JoinedResponse(send)
        for message in messages:
            await response.send(message)

    asyncio.run(main())
    return found


@pytest.mark.parametrize("headers", [(), ((b"Content-Length", b"3"),), ([b"content-length", b"3"],)])
@pytest.mark.parametrize("end", [{}, {"more_body": False}])
def test_a_start_and_its_only_body_become_one_message(headers: Any, end: dict[str, Any]) -> None:
    expected = {"type": WHOLE_RESPONSE, "status": 201, "headers": (TYPE,), "body": b"abc"}
    assert passed_on(start(*headers, status=201), body(**end)) == [expected]


@pytest.mark.parametrize(
    "messages",
    [
        (start(), body(more_body=True), body(b"", more_body=False)),
        (start((b"content-length", b"4")), body()),  # the server refuses it
        (start((b"content-length", b"12")), body(b"")),  # a response to HEAD
        (start(status=204), body(b"")),
        (start(trailers=True), body()),
        (start(), start()),
        (body(),),
        (start(), body(memoryview(b"abc"))),
        (start(), body(more_body=True), start()),
    ],
)
def test_all_other_messages_are_passed_on_as_they_are(messages: tuple[Message, ...]) -> None:
    assert passed_on(*messages) == list(messages)


def test_a_start_without_a_body_is_held_back() -> None:
    assert passed_on(start()) == []
