"""Responses of ASGI applications are sent as one message where possible."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from tables import case

from daskserve.common.types import MATCHED_ROUTE, WHOLE_RESPONSE, Message
from daskserve.data.replica.user_code.joined_response import MAX_ROUTE, JoinedResponse, ResponseSink

TYPE = (b"content-type", b"text/plain")


def start(*headers: Any, status: int = 200, **more: Any) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [TYPE, *headers], **more}


def body(text: bytes = b"abc", **more: Any) -> Message:
    return {"type": "http.response.body", "body": text, **more}


class Sink(ResponseSink):
    """Records messages; a message from a callback is recorded one loop iteration later."""

    def __init__(self, found: list[Message]) -> None:
        self.found = found
        self.is_started = False

    async def send(self, message: Message) -> None:
        self.is_started = True
        self.found.append(message)

    def send_nowait(self, *messages: Message) -> asyncio.Task[None]:
        self.is_started = True

        async def send_all() -> None:
            for message in messages:
                await self.send(message)

        return asyncio.get_running_loop().create_task(send_all())


def passed_on(*messages: Message) -> list[Message]:
    """Return the messages that are sent for the messages of an application."""
    found: list[Message] = []

    async def main() -> None:
        response = JoinedResponse(Sink(found))
        for message in messages:
            await response.send(message)

    asyncio.run(main())
    return found


def test_the_first_message_has_the_route_that_the_application_has_matched() -> None:
    def first(scope: dict[str, Any], *messages: Message) -> Message:
        found: list[Message] = []

        async def main() -> None:
            response = JoinedResponse(Sink(found), scope)
            for message in messages:
                await response.send(message)

        asyncio.run(main())
        return found[0]

    scope = {"route": SimpleNamespace(path="/items/{id}")}
    given = start()
    assert first(scope, given, body()) == {
        "type": WHOLE_RESPONSE,
        "status": 200,
        "headers": (TYPE,),
        "body": b"abc",
        MATCHED_ROUTE: "/items/{id}",
    }
    assert MATCHED_ROUTE not in given
    assert first(scope, given, body(more_body=True))[MATCHED_ROUTE] == "/items/{id}"
    assert len(first({"route": SimpleNamespace(path="/" * 999)}, given, body())[MATCHED_ROUTE]) == MAX_ROUTE
    for other in ({}, {"route": "/items"}, {"route": SimpleNamespace(path=7)}):
        assert MATCHED_ROUTE not in first(other, given, body())


def test_a_start_and_its_only_body_become_one_message() -> None:
    for headers in [(), ((b"Content-Length", b"3"),), ([b"content-length", b"3"],)]:
        for end in [{}, {"more_body": False}]:
            with case(headers, end):
                expected = {"type": WHOLE_RESPONSE, "status": 201, "headers": (TYPE,), "body": b"abc"}
                assert passed_on(start(*headers, status=201), body(**end)) == [expected]


def test_all_other_messages_are_passed_on_as_they_are() -> None:
    for messages in [
        (start(), body(more_body=True), body(b"", more_body=False)),
        (start((b"content-length", b"4")), body()),  # the server refuses it
        (start((b"content-length", b"12")), body(b"")),  # a response to HEAD
        (start(status=204), body(b"")),
        (start(trailers=True), body()),
        (start(), start()),
        (body(),),
        (start(), body(memoryview(b"abc"))),
        (start(), body(more_body=True), start()),
    ]:
        with case(messages):
            assert passed_on(*messages) == list(messages)


def test_a_start_that_stays_alone_is_passed_on_after_an_iteration_unless_it_has_a_length() -> None:
    async def send_slowly(head: Message) -> list[Message]:
        found: list[Message] = []
        response = JoinedResponse(Sink(found))
        await response.send(head)
        assert found == []
        await asyncio.sleep(0)
        await response.send(body())
        return found

    empty = body(b"", more_body=True)
    assert asyncio.run(send_slowly(start())) == [start(), empty, body()]
    with_length = start((b"Content-Length", b"3"))
    (whole,) = asyncio.run(send_slowly(with_length))
    assert whole["type"] == WHOLE_RESPONSE


def test_starlettes_answer_to_an_error_waits_until_the_application_has_ended() -> None:
    text = b"Internal Server Error"
    answer = (start(status=500), body(text))
    whole = {"type": WHOLE_RESPONSE, "status": 500, "headers": (TYPE,), "body": text}

    async def ended_by(end: Callable[[JoinedResponse], Awaitable[None] | None]) -> list[Message]:
        found: list[Message] = []
        response = JoinedResponse(Sink(found))
        for message in answer:
            await response.send(message)
        assert found == []
        ending = end(response)
        if ending is not None:
            await ending
        for _ in range(3):
            await asyncio.sleep(0)
        return found

    assert asyncio.run(ended_by(JoinedResponse.end)) == [whole]
    assert asyncio.run(ended_by(JoinedResponse.drop)) == []
    # An application that continues after its answer delays its client by at most this time.
    assert asyncio.run(ended_by(lambda _: None)) == [whole]


def test_headers_may_be_any_iterable_as_asgi_allows() -> None:
    [whole] = passed_on({**start(), "headers": (each for each in [TYPE])}, body())
    assert whole["headers"] == (TYPE,)
    first, _ = passed_on({**start(), "headers": iter([TYPE])}, body(more_body=True))
    assert list(first["headers"]) == list(first["headers"]) == [TYPE]
