"""Requests as user code sees them, and the path of their messages across the executor."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from runs import PipedRequest, respond_piped, respond_to, run, start_async, until
from starlette.requests import ClientDisconnect, Request
from tables import case, each_case

from daskserve.common.types import Envelope, EnvelopeKind, Message
from daskserve.context import RequestContext
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.execution.message_pipe import JOIN_BYTES, WINDOW, MessagePipe, open_pipe
from daskserve.data.replica.requests.calls import CallRequest
from daskserve.data.replica.requests.http import LocalHTTPRequest
from daskserve.data.replica.requests.states import DONE
from daskserve.data.replica.user_code.request_objects import (
    HTTPRequest,
    QueryParams,
    ServeRequest,
    legacy_argument,
    parse_json,
    read_body,
)
from daskserve.errors import PassedResponseError, ServeError, UnpicklableError
from daskserve.internals.request_pickling import is_unread, read_ahead
from daskserve.loops.pending_call import PendingCall
from daskserve.payload.pickling import dump

pytestmark = pytest.mark.smoke

DEADLINE_S = 10.0
SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "POST",
    "path": "/",
    "headers": [(b"content-type", b"application/json")],
    "query_string": b"n=1",
}


def part(body: bytes, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


class Client:
    """The worker's side of a connection: messages to receive, then silence. Sends wait for the test."""

    def __init__(self, *messages: Message | Exception) -> None:
        self.messages = list(messages)
        self.received = 0
        self.sent: list[Message] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.send_error: Exception | None = None

    async def receive(self) -> Message:
        if not self.messages:
            await asyncio.get_running_loop().create_future()
        self.received += 1
        message = self.messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    async def send(self, message: Message) -> None:
        await self.may_send.wait()
        if self.send_error is not None:
            raise self.send_error
        self.sent.append(message)


# ---- what user code sees


@each_case(
    "text",
    [
        b'{"a": [1, -0.0, 1e400, NaN, -Infinity], "a": 12345678901234567890123}',
        b'"\\ud800"',
        '\ufeff["\u00e4"]'.encode(),
        '["\u00e4"]'.encode("utf-16"),
        b"0.1000000000000000055511151231257827021181583404541015625",
        b"[1,]",
        b"",
        b'"\xff"',
        b"nan",
    ],
)
def test_a_body_is_parsed_as_the_json_module_does(text: bytes) -> None:
    def result(parse: Callable[[bytes], Any]) -> str:
        try:
            return repr(parse(text))
        except ValueError as error:
            return f"{type(error).__name__}: {error}"

    assert result(parse_json) == result(json.loads)


def test_a_preloaded_body_can_be_awaited_without_a_message() -> None:
    async def main() -> None:
        request = HTTPRequest(SCOPE, Client().receive)
        request.whole_body = b'{"a": 1}'
        assert await request.body() == b'{"a": 1}'
        assert await request.json() == {"a": 1}
        assert [chunk async for chunk in request.stream()] == [b'{"a": 1}', b""]

    asyncio.run(main())


def test_without_an_event_loop_the_methods_return_values() -> None:
    request = HTTPRequest(SCOPE, Client().receive)
    for read in (request.body, request.json, request.form):
        with pytest.raises(ServeError, match="has not been read yet"):
            read()
    request.whole_body = b"[1]"
    assert request.body() == b"[1]"
    assert request.json() == [1]
    assert list(request.stream()) == [b"[1]", b""]
    assert dict(request.form()) == {}
    assert request.is_disconnected() is False
    assert ServeRequest({"k": 1}).json() == ServeRequest({"k": 1}).form() == {"k": 1}
    assert ServeRequest("text").body() == "text"
    with pytest.raises(ServeError, match="needs a dict"):
        ServeRequest("text").json()


def test_a_plain_function_reads_the_files_of_a_form_however_large() -> None:
    mark, large = b"--x", bytes(2 << 20)
    head = b'Content-Disposition: form-data; name="file"; filename="a"'
    request = HTTPRequest(
        {**SCOPE, "headers": [(b"content-type", b"multipart/form-data; boundary=x")]}, Client().receive
    )
    request.whole_body = b"\r\n".join([mark, head, b"", large, mark + b"--", b""])
    file = request.form()["file"].file
    assert file.read() == large
    request.close()
    assert file.closed

    async def main() -> None:
        assert (await request.form())["file"].file is file

    asyncio.run(main())


def test_a_serve_request_offers_what_the_handle_was_given() -> None:
    async def main() -> None:
        request = ServeRequest({"k": 1}, {"a": 1, "b": [2, 3]}, headers={"X-Key": "v"}, method="POST")
        assert await request.body() == request.data == {"k": 1}
        assert await request.json() == {"k": 1}
        assert await request.form() == {"k": 1}
        assert request.query_params == {"a": 1, "b": [2, 3]}
        assert request.headers["x-key"] == "v"
        assert request.method == "POST"
        for data in (None, "text", [1]):
            request = ServeRequest(data)
            assert await request.body() is data
            for read in (request.json, request.form):
                with pytest.raises(ServeError, match=type(data).__name__):
                    await read()

    asyncio.run(main())


def test_getlist_takes_one_value_for_a_list_of_one() -> None:
    params = QueryParams(one=1, many=(1, 2))
    assert [params.getlist(key) for key in ("one", "many", "none")] == [[1], [1, 2], []]


def test_the_argument_of_a_classic_backend() -> None:
    request = legacy_argument({"http_headers": {"h": "v"}, "http_method": "PUT"}, ("data",), {"k": 1})
    assert (request.data, request.query_params, request.method) == ("data", {"k": 1}, "PUT")
    assert request.headers["h"] == "v"
    for name in ("data", "request_data"):
        named = legacy_argument({}, (), {name: [1], "k": 1})
        assert (named.data, named.query_params) == ([1], {name: [1], "k": 1})
        both = legacy_argument({}, (1,), {name: 2})
        assert (both.data, both.query_params) == (1, {name: 2})
    with pytest.raises(TypeError, match="takes one positional argument, the body, and got 2"):
        legacy_argument({}, (1, 2), {})
    assert legacy_argument({}, (), {}).data is None
    assert legacy_argument({}, (), {}).method == "GET"
    starlette = Request(SCOPE)
    assert legacy_argument({}, (starlette,), {}) is starlette
    assert legacy_argument({}, (request,), {}) is request


class OwnRequest(Request):
    """A user's class of requests."""


@pytest.mark.parametrize("kind", [HTTPRequest, Request, OwnRequest])
def test_a_request_that_was_read_can_be_passed_on(kind: type[Request]) -> None:
    async def main() -> None:
        lock, connection = threading.Lock(), iter([part(b'{"k"', True), part(b": 1}", False)])
        own = {"app": lock, "daskserve.object": lock, "odd": lock, "session": {"user": 3}}

        async def receive() -> Message:
            return next(connection)

        request = kind({**SCOPE, **own, "state": {"lock": lock, "name": "n"}}, receive)
        with pytest.raises(PassedResponseError, match="has not been read"):
            dump([request])
        assert await request.json() == {"k": 1}
        (copy,) = dump([request]).load()
        assert (copy.method, copy.query_params["n"], copy.state.name) == ("POST", "1", "n")
        assert copy.session == {"user": 3}
        assert set(copy.scope) == {*SCOPE, "session", "state"}
        assert await copy.json() == {"k": 1}
        assert not await copy.is_disconnected()
        assert await asyncio.to_thread(lambda: (copy.body(), copy.is_disconnected())) == (b'{"k": 1}', False)
        assert dump(copy).load().body_bytes == b'{"k": 1}'

    asyncio.run(main())


def test_a_form_that_was_read_can_be_passed_on() -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="field"\r\n\r\nvalue\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="f.txt"\r\n'
        b"Content-Type: text/plain\r\n\r\ncontent\r\n--x--\r\n"
    )
    headers = [(b"content-type", b"multipart/form-data; boundary=x")]

    async def receive() -> Message:
        return part(body, False)

    async def main() -> None:
        request = Request({**SCOPE, "headers": headers}, receive)
        form = await request.form()
        await form["file"].read(3)
        copy = dump(request).load()
        for found in (await copy.form(), await asyncio.to_thread(copy.form)):
            assert found["field"] == "value"
            file = found["file"]
            assert (file.filename, file.content_type) == ("f.txt", "text/plain")
        assert await file.read() == b"content"
        assert await form["file"].read() == b"tent"
        await request.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", [HTTPRequest, Request])
def test_a_body_that_was_read_in_parts_cannot_be_passed_on(kind: type[Request]) -> None:
    async def receive() -> Message:
        return part(b"all", False)

    async def main() -> None:
        request = kind(SCOPE, receive)
        assert [each async for each in request.stream()] == [b"all", b""]
        with pytest.raises(UnpicklableError, match=r"was read by stream\(\)"):
            dump(request)

    asyncio.run(main())


def test_a_request_that_was_made_without_a_connection_has_an_empty_body() -> None:
    request = Request(SCOPE)
    assert not is_unread(request)
    assert dump(request).load().body() == b""


@pytest.mark.parametrize("kind", [HTTPRequest, Request])
def test_code_that_reads_while_the_body_is_read_ahead_gets_the_same(kind: type[Request]) -> None:
    async def main() -> None:
        parts: asyncio.Queue[Message] = asyncio.Queue()
        request = kind(SCOPE, parts.get)
        assert is_unread(request)
        first = read_ahead(request)
        reading = asyncio.ensure_future(request.body())
        second = read_ahead(request)
        parts.put_nowait(part(b"a", True))
        await asyncio.sleep(0)
        parts.put_nowait(part(b"b", False))
        await asyncio.gather(first, second)
        assert await reading == b"ab"
        assert not is_unread(request)
        assert await dump(request).load().body() == b"ab"
        parts.put_nowait({"type": "http.disconnect"})
        assert await request.is_disconnected()

    asyncio.run(main())


def test_reading_ahead_fails_if_the_client_leaves() -> None:
    async def leave() -> Message:
        return {"type": "http.disconnect"}

    async def main() -> None:
        request = Request(SCOPE, leave)
        with pytest.raises(ClientDisconnect):
            await read_ahead(request)
        with pytest.raises(ClientDisconnect):
            await request.body()

    asyncio.run(main())


def test_the_request_context_comes_from_the_ingress_or_the_handle() -> None:
    call = Envelope(EnvelopeKind.CALL, {"request_id": "id"}, deadline=7.0)
    assert CallRequest.request_context(call) == RequestContext("id", deadline=7.0)
    assert CallRequest.request_context(Envelope(EnvelopeKind.CALL, {})) == RequestContext()


def test_reading_a_whole_body() -> None:
    async def main() -> None:
        assert await read_body(Client(part(b"a", False)).receive) == b"a"
        assert (
            await read_body(Client(part(b"b", True), part(b"c", False)).receive, part(b"a", True)) == b"abc"
        )
        assert await read_body(Client(part(b"a", True), {"type": "http.disconnect"}).receive) is None

    asyncio.run(main())


# ---- receiving across the executor


def test_a_whole_body_needs_no_crossing() -> None:
    no_executor: Any = None  # any use of it would fail
    client = Client()
    pipe = MessagePipe(no_executor, "http", client.receive, client.send, part(b"all", False))
    assert asyncio.run(pipe.receive()) == part(b"all", False)


def test_the_worker_reads_ahead_no_further_than_the_window() -> None:
    async def scenario(executor: UserExecutor) -> None:
        client = Client(*[part(b"x", True) for _ in range(10 * WINDOW)])
        pipe = MessagePipe(executor, "http", client.receive, client.send)
        release = threading.Event()

        async def app() -> None:
            await pipe.receive()
            await until(release.is_set)

        carrying = asyncio.create_task(respond_piped(executor, pipe, app))
        await until(lambda: client.received >= WINDOW)
        for _ in range(20):
            await asyncio.sleep(0)
        assert client.received <= WINDOW + 1
        release.set()
        await carrying

    run(scenario)


def test_a_receive_that_is_given_up_loses_no_message() -> None:
    async def scenario(executor: UserExecutor) -> None:
        client = Client()
        pipe = MessagePipe(executor, "websocket", client.receive, client.send)

        async def app() -> list[str]:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pipe.receive(), 0.01)
            client_has_sent.set()
            return [(await pipe.receive())["text"] for _ in range(2)]

        client_has_sent = threading.Event()
        released = asyncio.Event()
        waiting = client.receive

        async def receive() -> Message:
            await released.wait()
            return await waiting()

        pipe._receive = receive
        carrying = asyncio.create_task(respond_piped(executor, pipe, app))
        await until(client_has_sent.is_set)
        client.messages += [{"type": "websocket.receive", "text": text} for text in ("one", "two")]
        released.set()
        assert await carrying == ["one", "two"]

    run(scenario)


def test_an_error_while_receiving_is_raised_in_user_code() -> None:
    async def scenario(executor: UserExecutor) -> None:
        client = Client(ConnectionResetError("gone"))
        pipe = MessagePipe(executor, "http", client.receive, client.send)

        async def app() -> str:
            try:
                await pipe.receive()
            except ConnectionResetError as error:
                return str(error)
            return "nothing"

        assert await respond_piped(executor, pipe, app) == "gone"

    run(scenario)


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_after_the_end_user_code_receives_a_disconnect_and_sends_into_the_void(kind: str) -> None:
    async def scenario(executor: UserExecutor) -> None:
        client = Client()
        pipe = MessagePipe(executor, kind, client.receive, client.send)
        received: list[Message] = []

        async def background() -> None:
            received.append(await pipe.receive())
            for _ in range(2 * WINDOW):
                await pipe.send({"type": "late"})
            received.append(await pipe.receive())

        call = start_async(executor, background)
        await until(lambda: pipe._reading is not None)
        pipe.close()
        await call.wait()
        assert [message["type"] for message in received] == [f"{kind}.disconnect"] * 2
        assert client.sent == []

    run(scenario)


# ---- sending across the executor


def test_parts_of_a_body_that_are_ready_together_are_sent_as_one() -> None:
    no_executor: Any = None
    client = Client()
    pipe = MessagePipe(no_executor, "http", client.receive, client.send)
    start = {"type": "http.response.start", "status": 200}
    large = bytes(JOIN_BYTES)
    sent = [start, part(b"a", True), part(b"b", True), part(large, True), part(b"c", True), part(b"", False)]
    pipe.outbox.extend(each if each is start else {**each, "type": "http.response.body"} for each in sent)
    pipe._sent = len(sent)
    asyncio.run(pipe.flush())
    assert client.sent[0] == start
    assert [(each["body"], each["more_body"]) for each in client.sent[1:]] == [
        (b"ab", True),
        (large, True),
        (b"c", False),
    ]
    assert pipe._passed == len(sent)
    assert pipe.missing_bytes == 0


@pytest.mark.parametrize("side", ["loop", "thread"])
def test_a_slow_client_holds_up_user_code_after_a_window_of_messages(side: str) -> None:
    async def scenario(executor: UserExecutor) -> None:
        client = Client()
        client.may_send.clear()
        pipe = MessagePipe(executor, "http", client.receive, client.send)
        progress: list[int] = []

        async def app() -> None:
            for number in range(4 * WINDOW):
                progress.append(number)
                await pipe.send({"type": "m"})

        def function() -> None:
            for number in range(4 * WINDOW):
                progress.append(number)
                assert pipe.send_from_thread({"type": "m"})

        answer = PipedRequest(executor, pipe, side == "loop", app if side == "loop" else function)
        carrying = asyncio.create_task(respond_to(answer))
        await until(lambda: len(progress) == WINDOW)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(progress) == WINDOW
        client.may_send.set()
        await carrying
        assert len(client.sent) == 4 * WINDOW

    run(scenario)


def test_user_code_on_the_workers_loop_continues_without_its_client() -> None:
    async def scenario(executor: UserExecutor) -> None:
        client = Client()
        client.send_error = ConnectionResetError("gone")
        pipe = open_pipe(executor, "http", client.receive, client.send)

        async def app() -> str:
            for _ in range(2):
                await pipe.send({"type": "m"})
            return str((await pipe.receive())["type"])

        assert await respond_piped(executor, pipe, app) == "http.disconnect"

    run(scenario, event_loop="worker")


def test_user_code_on_the_workers_loop_sends_nothing_after_the_end() -> None:
    async def scenario(executor: UserExecutor) -> None:
        client = Client()
        pipe = open_pipe(executor, "http", client.receive, client.send)
        pipe.close()
        await pipe.send({"type": "late"})
        assert client.sent == []
        assert (await pipe.receive())["type"] == "http.disconnect"

    run(scenario, event_loop="worker")


def test_room_that_appeared_just_before_the_wait_is_not_missed() -> None:
    no_executor: Any = None
    client = Client()
    pipe = MessagePipe(no_executor, "http", client.receive, client.send)
    released: list[str] = []
    pipe._sent, pipe._passed = 2 * WINDOW, WINDOW
    pipe._block(lambda: released.append("no room yet"))
    assert released == []
    pipe._passed = 2 * WINDOW  # by the worker's side, after `send` had looked
    pipe._block(lambda: released.append("room"))
    assert released == ["room"]


def test_a_receive_that_began_just_before_the_end_is_answered() -> None:
    async def scenario(executor: UserExecutor) -> None:
        client = Client()
        pipe = MessagePipe(executor, "http", client.receive, client.send)
        pipe.close()

        async def late() -> None:
            reader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            pipe._readers.append(reader)  # as `receive` does, having seen the pipe open
            executor.to_worker.post(pipe._read_more)
            await reader

        await executor.run_async(late)

    run(scenario)


def test_cancelling_the_response_frees_a_thread_that_waits_for_a_slow_client() -> None:
    async def scenario(executor: UserExecutor) -> None:
        client = Client()
        client.may_send.clear()
        pipe = MessagePipe(executor, "http", client.receive, client.send)

        def function() -> None:
            while pipe.send_from_thread({"type": "m"}):
                pass

        answer = PipedRequest(executor, pipe, False, function)
        carrying = asyncio.create_task(respond_to(answer))
        await asyncio.sleep(0)  # it carries now
        await until(lambda: bool(pipe._blocked))
        carrying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await carrying
        await until(lambda: answer.state == DONE)
        assert executor.abandoned == 0

    run(scenario)


# ---- HTTPRequest beside Starlette's own


def test_a_body_is_read_once_by_whichever_method_comes_first() -> None:
    async def main() -> None:
        request = HTTPRequest(SCOPE, Client(part(b"[1", True), part(b"]", False)).receive)
        with pytest.raises(ServeError, match="in async code use"):
            request.body_bytes  # noqa: B018
        assert await request.body() == b"[1]"
        assert [chunk async for chunk in request.stream()] == [b"[1]", b""]
        assert await request.body() == request.body_bytes == b"[1]"
        assert await request.json() == request.body_json == [1]

        request = HTTPRequest(SCOPE, Client(part(b"[1", True), part(b"]", False)).receive)
        assert [chunk async for chunk in request.stream()] == [b"[1", b"]", b""]
        with pytest.raises(RuntimeError, match="Stream consumed"):
            await request.body()
        with pytest.raises(ServeError, match="has not been read yet"):
            request.body_bytes  # noqa: B018

    asyncio.run(main())


def test_a_form_is_parsed_from_a_preloaded_body() -> None:
    async def main() -> None:
        scope = {**SCOPE, "headers": [(b"content-type", b"application/x-www-form-urlencoded")]}
        request = HTTPRequest(scope, Client().receive)
        request.whole_body = b"a=1&b=2"
        assert dict(await request.form()) == {"a": "1", "b": "2"}

    asyncio.run(main())


def test_the_context_of_a_request_is_not_shared_with_others() -> None:
    def make(*messages: Message) -> HTTPRequest:
        left = list(messages)

        async def receive() -> Message:
            return left.pop(0)

        scope = {**SCOPE, "headers": [(b"content-type", b"application/x-www-form-urlencoded")]}
        return HTTPRequest(scope, receive)

    async def main() -> None:
        first, second = make(part(b"a=1", more=False)), make(part(b"a=2", more=False))
        first.state.seen = True
        assert dict(await first.form()) == {"a": "1"}
        assert not hasattr(second.state, "seen")
        assert dict(await second.form()) == {"a": "2"}
        third = make({"type": "http.disconnect"})
        assert await third.is_disconnected()
        assert make()._is_disconnected is False
        await first.close()
        assert await make(part(b"x", more=True), part(b"y", more=False)).body() == b"xy"
        # There is no server push, and the attribute must not be called with the request as its first
        # argument.
        pushing = make()
        pushing.scope["extensions"] = {"http.response.push": {}}
        with pytest.raises(RuntimeError, match="Send channel"):
            await pushing.send_push_promise("/")

    asyncio.run(main())


def test_the_context_of_a_request_says_what_the_ingress_knew() -> None:
    for head, request_id, route in [
        ({"extensions": {"daskserve": {"request_id": "id", "route": "/r", "shard_key": None}}}, "id", "/r"),
        # This request does not pass through the ingress.
        ({}, "", ""),
        ({"extensions": None}, "", ""),
        ({"extensions": {}}, "", ""),
        ({"extensions": {"daskserve": None}}, "", ""),
    ]:
        with case(head, request_id, route):
            context = LocalHTTPRequest.request_context(Envelope(EnvelopeKind.HTTP, head, deadline=3.0))
            assert (context.request_id, context.route, context.deadline) == (request_id, route, 3.0)


def test_the_calls_of_one_context_are_no_other_ones() -> None:
    first, second = RequestContext("1"), RequestContext("1")
    calls: list[PendingCall[Any]] = [PendingCall() for _ in range(3)]
    first.add_call(calls[0])
    second.add_call(calls[1])
    assert first == second
    first.cancel_calls()
    assert [call.cancelled() for call in calls] == [True, False, False]
    # Later calls are cancelled, too; calls that have ended are forgotten.
    first.add_call(calls[2])
    assert calls[2].cancelled()
    assert not first._calls
    assert list(second._calls) == [calls[1]]
    calls[1].set_result(1)
    assert not second._calls
    RequestContext().cancel_calls()
    assert RequestContext._calls == frozenset()
    assert not RequestContext._is_cancelled
