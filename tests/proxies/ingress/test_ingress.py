from __future__ import annotations

import asyncio
import json
import logging
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgpack
import pytest
from http_harness import poll_for, read_body, respond, run, tracebacks
from starlette.middleware import Middleware
from tables import each_case

from daskserve.common.types import (
    ALL_HTTP_METHODS,
    WHOLE_RESPONSE,
    Envelope,
    EnvelopeKind,
    Message,
    Receive,
    Send,
)
from daskserve.errors import ActorLostError, BackPressureError, BadRequestError
from daskserve.options.http import HTTPOptions
from daskserve.payload.packed_errors import is_logged
from daskserve.proxies.asgi import ASGIApp, Scope
from daskserve.proxies.exchange.request.body import RequestBody
from daskserve.proxies.ingress.app import IngressApp, build_app, is_plain
from daskserve.proxies.ingress.forwarded import ForwardedHeaders
from daskserve.proxies.ingress.request import parse_timeout
from daskserve.proxies.ingress.routes import RouteTable
from daskserve.testing import run_virtual

TABLE = RouteTable(
    {
        "/a": {"endpoint": "one", "methods": ["GET", "POST"]},
        "/a/b": {"endpoint": "two", "methods": ["GET"]},
    }
)


class Routers:
    """A dispatch function that records its arguments, and runs a function of the test."""

    def __init__(self, answer: Callable[[Receive, Send], Awaitable[None]] | None = None) -> None:
        self.calls: list[tuple[str, Envelope]] = []
        self._answer = answer

    async def __call__(self, endpoint: str, envelope: Envelope, receive: Receive, send: Send) -> None:
        self.calls.append((endpoint, envelope))
        if self._answer is None:
            await respond(send, endpoint.encode())
        else:
            await self._answer(receive, send)

    @property
    def head(self) -> Mapping[str, Any]:
        """The head of the only request."""
        ((_, envelope),) = self.calls
        assert envelope.kind is EnvelopeKind.HTTP
        assert envelope.payload is None
        return envelope.head


def make_ingress(
    routers: Routers,
    table: RouteTable | None = TABLE,
    *,
    is_direct: bool = False,
    unready: Sequence[str] | None = (),
    **options: Any,
) -> IngressApp:
    return IngressApp(
        options=HTTPOptions(**options),
        routes=table,
        dispatch=routers,
        rng=random.Random(1),
        is_direct=is_direct,
        unready=lambda: unready,
    )


def make_scope(path: str, method: str = "GET", *headers: tuple[bytes, bytes], **more: Any) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"q=1",
        "root_path": "",
        "headers": [(b"host", b"example:8000"), *headers],
        "client": ("127.0.0.1", 4),
        "server": ("127.0.0.1", 8000),
        **more,
    }


class Answer:
    """The messages that an application sent for one request."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        pairs = [(name.decode(), value.decode()) for name, value in self.messages[0]["headers"]]
        assert len(dict(pairs)) == len(pairs), pairs
        return dict(pairs)

    @property
    def text(self) -> str:
        return b"".join(message["body"] for message in self.messages[1:]).decode()


async def call(app: ASGIApp, scope: Scope) -> Answer:
    answer = Answer()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"data", "more_body": False}

    await app(scope, receive, answer.send)
    return answer


def ask(app: ASGIApp, path: str, method: str = "GET", *headers: tuple[bytes, bytes], **more: Any) -> Answer:
    """Send one request through the application on a separate event loop."""
    return asyncio.run(call(app, make_scope(path, method, *headers, **more)))


# ---- routes and scopes


@each_case(
    ("path", "endpoint", "route"),
    [("/a", "one", "/a"), ("/a/", "one", "/a"), ("/a/x", "one", "/a"), ("/a/b/x", "two", "/a/b")],
)
def test_a_request_reaches_the_endpoint_of_its_longest_route(path: str, endpoint: str, route: str) -> None:
    routers = Routers()
    answer = ask(make_ingress(routers), path)
    assert (answer.status, answer.text) == (200, endpoint)
    assert routers.calls[0][0] == endpoint
    head = routers.head
    assert (head["path"], head["root_path"], head["extensions"]["daskserve"]["route"]) == (path, route, route)


def test_the_root_route_leaves_root_path_empty() -> None:
    routers = Routers()
    ask(make_ingress(routers, RouteTable({"/": {"endpoint": "all", "methods": ["GET"]}})), "/x")
    assert (routers.head["path"], routers.head["root_path"]) == ("/x", "")


def test_the_head_is_the_scope_as_plain_values() -> None:
    routers = Routers()
    scope = make_scope("/a/x", "POST", (b"x-request-id", b"42"), (b"x-serve-shard-key", b"user 7"))
    extras = {
        "app": object(),
        "state": {"x": 1},
        "extensions": {},
        "auth": object(),
        "tenant": {"id": [1, 2.5, None]},
    }
    asyncio.run(call(make_ingress(routers), {**scope, **extras}))
    expected = {
        **scope,
        "root_path": "/a",
        "tenant": {"id": [1, 2.5, None]},
        "extensions": {"daskserve": {"request_id": "42", "shard_key": "user 7", "route": "/a"}},
    }
    assert routers.head == expected
    assert (
        msgpack.unpackb(msgpack.packb(routers.head), use_list=False)["extensions"]["daskserve"]["route"]
        == "/a"
    )


@each_case(
    ("headers", "has_body"),
    [
        ([], False),
        ([(b"content-length", b"0")], False),
        ([(b"content-length", b"1")], True),
        ([(b"transfer-encoding", b"chunked")], True),
    ],
)
def test_the_headers_show_whether_there_is_a_body(headers: list[tuple[bytes, bytes]], has_body: bool) -> None:
    routers = Routers()
    ingress = make_ingress(routers, request_timeout_s=5)
    ask(ingress, "/a", "POST", *headers)
    ask(make_ingress(routers), "/a", "POST", *headers)
    assert [envelope.has_body for _, envelope in routers.calls] == [has_body] * 2


def test_a_scope_without_optional_keys_is_enough() -> None:
    routers = Routers()
    scope = {"type": "http", "method": "GET", "path": "/a", "headers": []}
    answer = asyncio.run(call(make_ingress(routers), scope))
    assert answer.status == 200
    assert routers.head["extensions"]["daskserve"]["shard_key"] is None
    assert (
        "ping http://localhost/-/routes"
        in asyncio.run(call(make_ingress(routers), {**scope, "path": "/x"})).text.lower()
    )


@each_case("root_path", ["/api", "api/", "/api/"])
@each_case("path", ["/a/x", "/api/a/x"])
def test_a_path_gets_the_root_path_whether_or_not_a_reverse_proxy_took_it_off(
    root_path: str, path: str
) -> None:
    routers = Routers()
    ask(make_ingress(routers, root_path=root_path), path)
    head = routers.head
    assert (head["path"], head["raw_path"], head["root_path"]) == ("/api/a/x", b"/api/a/x", "/api/a")


def test_a_root_path_ends_at_a_slash() -> None:
    routers = Routers()
    table = RouteTable({"/apix": {"endpoint": "x", "methods": ["GET"]}})
    ask(make_ingress(routers, table, root_path="/api"), "/apix")
    assert (routers.head["path"], routers.head["root_path"]) == ("/api/apix", "/api/apix")


def test_system_routes_are_found_under_the_root_path_too() -> None:
    ingress = make_ingress(Routers(), root_path="/api")
    assert ask(ingress, "/api/-/healthz").text == "success"
    assert "Ping http://example:8000/api/-/routes" in ask(ingress, "/apix").text


def test_body_and_response_stream_through() -> None:
    async def answer(receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-a", b"1")]})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"!", "more_body": False})

    reply = ask(make_ingress(Routers(answer)), "/a")
    assert (reply.status, reply.text, reply.headers["x-a"]) == (201, "data!", "1")
    assert [message["type"] for message in reply.messages[1:]] == ["http.response.body"] * 2


def test_an_unknown_path_is_a_404_that_names_the_route_list() -> None:
    answer = ask(make_ingress(Routers()), "/x")
    assert answer.status == 404
    assert answer.text == "Path '/x' not found. Ping http://example:8000/-/routes for available routes."
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["content-length"] == str(len(answer.text))


def test_without_list_routes_clients_learn_no_routes() -> None:
    ingress = make_ingress(Routers(), list_routes=False)
    for path in ("/x", "/-/routes"):
        answer = ask(ingress, path)
        assert (answer.status, answer.text) == (404, f"Path '{path}' not found.")
    assert ask(ingress, "/-/healthz").status == 200


@each_case(
    ("path", "method"),
    [("/x", "GET"), ("/a", "PUT"), ("/a", "GET"), ("/-/routes", "GET"), ("/-/healthz", "GET")],
)
def test_browsers_do_not_guess_the_type_of_what_the_ingress_sends(path: str, method: str) -> None:
    answer = ask(make_ingress(failing(ActorLostError("lost"))), path, method)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_responses_of_user_code_get_no_further_headers() -> None:
    answer = ask(make_ingress(Routers()), "/a")
    assert set(answer.headers) == {"x-request-id"}


@each_case("method", ["PUT", "HEAD", "get"])
def test_a_wrong_method_is_a_405_that_lists_the_allowed_ones(method: str) -> None:
    routers = Routers()
    answer = ask(make_ingress(routers), "/a", method)
    assert answer.status == 405
    assert answer.text == f"Methods {method} not allowed. Available HTTP methods are ['GET', 'POST']."
    assert answer.headers["allow"] == "GET, POST"
    assert routers.calls == []


@each_case("method", ["QUERY", "PROPFIND"])
def test_a_route_with_all_usual_methods_takes_others(method: str) -> None:
    routers = Routers()
    table = RouteTable({"/a": {"endpoint": "one", "methods": ALL_HTTP_METHODS}})
    assert ask(make_ingress(routers, table), "/a", method).status == 200
    assert routers.head["method"] == method


# ---- system routes


@each_case("method", ["GET", "HEAD"])
def test_system_routes(method: str) -> None:
    ingress = make_ingress(Routers())
    assert ask(ingress, "/-/healthz", method).text == "success"
    assert ask(ingress, "/-/readyz", method).text == "success"
    routes = ask(ingress, "/-/routes", method)
    assert json.loads(routes.text) == {"/a": "one", "/a/b": "two"}
    assert routes.headers["content-type"] == "application/json"


def test_system_routes_accept_no_other_method() -> None:
    answer = ask(make_ingress(Routers()), "/-/healthz", "POST")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@each_case(
    ("unready", "lists_routes", "status", "text"),
    [
        (["model", "shop/back"], True, 503, "No replica runs of: model, shop/back."),
        (["model", "shop/back"], False, 503, "2 deployments have no running replica."),
        (None, True, 503, "Route table is not populated yet."),
        ([], True, 200, "success"),
    ],
)
def test_a_proxy_is_ready_once_all_that_should_run_has_a_replica(
    unready: Sequence[str] | None, lists_routes: bool, status: int, text: str
) -> None:
    ingress = make_ingress(Routers(), unready=unready, list_routes=lists_routes)
    answer = ask(ingress, "/-/readyz")
    assert (answer.status, answer.text) == (status, text)
    assert ask(ingress, "/-/healthz").status == 200
    assert ask(ingress, "/a").status == 200


@each_case("path", ["/-/healthz", "/-/readyz"])
@each_case("is_pending", [False, True])
def test_a_proxy_without_a_route_is_neither_healthy_nor_ready(path: str, is_pending: bool) -> None:
    route = {"endpoint": "new", "methods": ["GET"], "application": "new", "pending": True}
    answer = ask(make_ingress(Routers(), RouteTable({"/": route} if is_pending else {})), path)
    assert (answer.status, answer.text) == (503, "There is no route yet.")


@each_case("path", ["/-/healthz", "/-/readyz", "/-/routes", "/a"])
def test_before_there_are_routes_everything_is_unavailable(path: str) -> None:
    answer = ask(make_ingress(Routers(), None), path)
    assert (answer.status, answer.text) == (503, "Route table is not populated yet.")


def test_draining_fails_the_health_check_and_nothing_else() -> None:
    ingress = make_ingress(Routers())
    ingress.start_draining()
    for path in ("/-/healthz", "/-/readyz"):
        health = ask(ingress, path)
        assert (health.status, health.text) == (503, "This node is being drained.")
    assert ask(ingress, "/-/routes").status == 200
    assert ask(ingress, "/a").status == 200


def test_other_paths_below_the_dash_are_user_routes() -> None:
    routers = Routers()
    ask(make_ingress(routers, RouteTable({"/": {"endpoint": "all", "methods": ["GET"]}})), "/-/mine")
    assert routers.head["path"] == "/-/mine"


# ---- request ids


@each_case("path", ["/a", "/x", "/-/healthz"])
def test_a_request_id_comes_back_with_every_answer(path: str) -> None:
    answer = ask(make_ingress(Routers()), path, "GET", (b"x-request-id", b"mine"))
    assert answer.headers["x-request-id"] == "mine"


def test_a_request_without_an_id_gets_a_random_uuid() -> None:
    routers = Routers()
    ingress = make_ingress(routers)
    answers = [ask(ingress, "/a"), ask(ingress, "/a", "GET", (b"x-request-id", b""))]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 2
    assert [uuid.UUID(text).version for text in ids] == [4, 4]
    assert [envelope.head["extensions"]["daskserve"]["request_id"] for _, envelope in routers.calls] == ids


@each_case(
    "chosen",
    [b"1", b"x" * 128, b"Root=1-67891233-abcdef012345678912345678", b"a.b_c~d+e/f=:g@h", b"%d" % 10**30],
)
def test_an_id_of_a_client_is_kept(chosen: bytes) -> None:
    routers = Routers()
    answer = ask(make_ingress(routers), "/a", "GET", (b"x-request-id", chosen))
    assert answer.headers["x-request-id"].encode() == chosen
    assert routers.head["extensions"]["daskserve"]["request_id"].encode() == chosen


@each_case(
    "chosen",
    [
        b"x" * 129,
        b"a b",
        b"a\tb",
        b"a\n",
        b"a\0",
        b'a"b',
        b"<a>",
        b"a,b",
        b"a;b",
        b"a%0d",
        b"\xe9",
        b"\x1b[2J",
        b"${a}",
    ],
)
def test_an_id_that_is_too_long_or_has_other_characters_is_replaced(chosen: bytes) -> None:
    routers = Routers()
    ingress = make_ingress(routers)
    answer = ask(ingress, "/a", "GET", (b"x-request-id", chosen))
    assert uuid.UUID(answer.headers["x-request-id"]).version == 4
    assert ("http_limited_requests", ("i", "request_id"), 1) in ingress.metrics.samples("i")
    assert routers.head["extensions"]["daskserve"]["request_id"] == answer.headers["x-request-id"]


@each_case("name", [b"x-request-id", b"X-Request-ID"])
def test_an_id_that_the_application_sets_stays_the_only_one(name: bytes) -> None:
    async def answer(receive: Receive, send: Send) -> None:
        await respond(send, headers=((name, b"its own"),))

    reply = ask(make_ingress(Routers(answer)), "/a", "GET", (b"x-request-id", b"ours"))
    assert [(n.lower(), v) for n, v in reply.messages[0]["headers"]] == [(b"x-request-id", b"its own")]


def test_the_messages_of_the_application_are_not_changed() -> None:
    start = {"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"1")]}

    async def answer(receive: Receive, send: Send) -> None:
        await send(start)
        await send({"type": "http.response.body"})

    ask(make_ingress(Routers(answer)), "/a")
    assert start["headers"] == [(b"x-a", b"1")]


# ---- deadlines


async def hang(receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()


@each_case(("option", "header"), [(0.01, None), (None, b"0.01"), (60, b"0.01")])
def test_a_request_past_its_deadline_is_cancelled_and_answered_with_408(
    option: float | None, header: bytes | None
) -> None:
    cancelled = []

    async def answer(receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})  # not out yet: no body
        try:
            await hang(receive, send)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    ingress = make_ingress(Routers(answer), request_timeout_s=option)
    headers = [(b"x-request-id", b"42")]
    if header is not None:
        headers.append((b"x-request-timeout-seconds", header))
    reply = run_virtual(call, ingress, make_scope("/a", "GET", *headers))
    assert (reply.status, reply.text) == (408, "Request 42 timed out after 0.01s.")
    assert reply.headers["x-request-id"] == "42"
    assert cancelled == [True]
    assert ingress.timed_out == 1


@each_case("header", [b"0", b"-1", b"inf", b"-inf", b"nan", b"1e308", b"60.5", b"1e999", b"soon"])
def test_a_client_never_gets_more_time_than_the_operator_gives(header: bytes) -> None:
    reply = ask(
        make_ingress(Routers(hang), request_timeout_s=0.005),
        "/a",
        "GET",
        (b"x-request-id", b"42"),
        (b"x-request-timeout-seconds", header),
    )
    assert (reply.status, reply.text) == (408, "Request 42 timed out after 0.005s.")


@each_case(
    ("client", "header", "deadline"),
    [
        ("10.0.0.1", b"100", 100.0),
        ("10.0.0.1", b"0", None),
        ("10.0.0.1", b"7", 7.0),
        ("10.0.0.1", b"soon", 60.0),
        ("192.0.2.1", b"100", 60.0),
        ("192.0.2.1", b"0", 60.0),
    ],
)
@each_case("is_direct", [False, True])
def test_a_trusted_forwarder_may_ask_for_more_time(
    client: str, header: bytes, deadline: float | None, is_direct: bool
) -> None:
    routers = Routers()
    ingress = make_ingress(routers, request_timeout_s=60, is_direct=is_direct)
    app = ForwardedHeaders(ingress, ["10.0.0.0/8"])
    scope = make_scope("/a", "GET", (b"x-request-timeout-seconds", header), client=(client, 4))
    run_virtual(call, app, scope)
    assert routers.calls[0][1].deadline == deadline
    assert not [key for key in routers.head if key.startswith("daskserve")]


def test_a_websocket_of_a_trusted_forwarder_carries_no_mark() -> None:
    async def accept(receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})

    routers = Routers(accept)
    app = ForwardedHeaders(make_ingress(routers, is_direct=True), ["127.0.0.1"])
    scripted(app, make_socket_scope("/a", (b"x-request-timeout-seconds", b"5")))
    assert not [key for key in routers.head if key.startswith("daskserve")]


def test_a_deadline_within_a_response_cuts_it() -> None:
    async def answer(receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await hang(receive, send)

    ingress = make_ingress(Routers(answer), request_timeout_s=0.01)
    with pytest.raises(TimeoutError, match=r"timed out after 0\.01s"):
        ask(ingress, "/a")
    assert ingress.timed_out == 1


def test_a_deadline_after_the_whole_response_ends_the_request_quietly() -> None:
    async def answer(receive: Receive, send: Send) -> None:
        await respond(send, b"whole")
        await hang(receive, send)

    ingress = make_ingress(Routers(answer), request_timeout_s=1)
    assert run_virtual(call, ingress, make_scope("/a")).text == "whole"
    assert ingress.timed_out == 0


def test_a_timeout_of_user_code_is_not_our_deadline() -> None:
    async def answer(receive: Receive, send: Send) -> None:
        raise TimeoutError("the database")

    ingress = make_ingress(Routers(answer), request_timeout_s=60)
    assert ask(ingress, "/a").status == 500
    assert ingress.timed_out == 0


@each_case(
    ("value", "seconds", "of_a_forwarder", "without_a_limit"),
    [
        (b"2.5", 2.5, 2.5, 2.5),
        (b" 1e1 ", 10.0, 10.0, 10.0),
        (b"90", 60.0, 90.0, 90.0),
        (b"0", 60.0, None, None),
        (b"-3", 60.0, None, None),
        (b"inf", 60.0, None, None),
        (b"nan", 60.0, 60.0, None),
    ],
)
def test_the_timeout_header(
    value: bytes, seconds: float, of_a_forwarder: float | None, without_a_limit: float | None
) -> None:
    assert parse_timeout(value, limit_s=60.0) == seconds
    assert parse_timeout(value, limit_s=60.0, is_trusted=True) == of_a_forwarder
    assert parse_timeout(value, limit_s=None) == without_a_limit


@each_case("value", [b"nan", b"", b"soon", b"5s", b"\xff"])
def test_a_timeout_header_that_is_no_number_leaves_the_default(value: bytes) -> None:
    assert parse_timeout(value, limit_s=60.0) == 60.0
    routers = Routers()
    ingress = make_ingress(routers, request_timeout_s=60)
    run_virtual(call, ingress, make_scope("/a", "GET", (b"x-request-timeout-seconds", value)))
    assert routers.calls[0][1].deadline == 60.0


def test_the_deadline_goes_with_the_request_and_without_one_nothing_does() -> None:
    def deadline_of(*headers: tuple[bytes, bytes], timeout_s: float | None = None) -> float | None:
        routers = Routers()
        ingress = make_ingress(routers, request_timeout_s=timeout_s)
        run_virtual(call, ingress, make_scope("/a", "GET", *headers))
        return routers.calls[0][1].deadline

    assert deadline_of() is None
    assert deadline_of((b"x-request-timeout-seconds", b"0")) is None
    assert deadline_of(timeout_s=100) == 100
    assert deadline_of((b"x-request-timeout-seconds", b"7"), timeout_s=100) == 7


# ---- errors


def failing(error: Exception, *, started: bool = False) -> Routers:
    async def answer(receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        if started:
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise error

    return Routers(answer)


@each_case(
    ("error", "status", "text"),
    [
        (BackPressureError("full", retry_after_s=2.1), 503, "full"),
        (
            ActorLostError("b#1 at tcp://10.0.0.1:1"),
            502,
            "Request 42 failed: the replica that had it was lost.",
        ),
        (BadRequestError("no"), 400, "no"),
        (ValueError("secret"), 500, "Internal Server Error"),
    ],
)
def test_an_error_before_the_first_byte_is_answered(error: Exception, status: int, text: str) -> None:
    answer = ask(make_ingress(failing(error)), "/a", "GET", (b"x-request-id", b"42"))
    assert (answer.status, answer.text, answer.headers["x-request-id"]) == (status, text, "42")
    assert answer.headers.get("retry-after") == ("3" if status == 503 else None)


@pytest.mark.parametrize("debug", [False, True])
def test_the_log_has_what_a_client_does_not_learn(debug: bool, caplog: pytest.LogCaptureFixture) -> None:
    error = ActorLostError("Replica b#1 at tcp://10.0.0.1:1 was lost")
    answer = ask(make_ingress(failing(error), debug=debug), "/a", "GET", (b"x-request-id", b"42"))
    assert answer.status == 502
    assert (answer.text == str(error)) == debug
    assert ("b#1" in answer.text) == ("10.0.0.1" in answer.text) == debug
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"Request 42 was answered with 502: {error}"


def test_only_faults_are_logged_with_their_traceback(caplog: pytest.LogCaptureFixture) -> None:
    ask(make_ingress(failing(BackPressureError("full"))), "/a")
    ask(make_ingress(failing(ActorLostError("lost"))), "/a")
    assert tracebacks(caplog) == []
    ask(make_ingress(failing(ValueError("why"))), "/a", "GET", (b"x-request-id", b"42"))
    (record,) = tracebacks(caplog)
    assert record.getMessage() == "Request 42 failed"


def test_debug_answers_with_the_traceback() -> None:
    answer = ask(make_ingress(failing(ValueError("why")), debug=True), "/a")
    assert answer.status == 500
    assert "Traceback" in answer.text
    assert "ValueError: why" in answer.text


def test_an_error_after_the_first_byte_reaches_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="why") as raised:
        ask(make_ingress(failing(ValueError("why"), started=True)), "/a", "GET", (b"x-request-id", b"42"))
    assert "Request 42" in caplog.text
    assert is_logged(raised.value), "the server would log it again"


@each_case("is_hidden", [False, True])
async def test_a_request_whose_body_the_server_refuses_is_not_counted_as_cancelled(is_hidden: bool) -> None:
    class Hiding:
        def __init__(self, app: ASGIApp) -> None:
            self._app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            async def other() -> Message:
                return await receive()

            await self._app(scope, other, send)

    ingress = make_ingress(Routers(hang))
    app = build_app(ingress, [Middleware(Hiding)] if is_hidden else [])
    scope = make_scope("/a", "POST", (b"content-length", b"5"))
    body = RequestBody(is_ended=False)
    request = asyncio.ensure_future(app(scope, body, Answer().send))
    await poll_for(lambda: ingress.ongoing)
    body.is_refused = True
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert (ingress.ongoing, ingress.unanswered) == (0, 0)
    assert [each for each in ingress.metrics.samples("i") if each[0] == "http_requests"] == []


@each_case(
    "messages",
    [
        [{"type": "http.response.start", "status": "200"}],
        [{"type": "http.response.start"}],
        [{"type": "http.response.start", "status": 200}] * 2 + [{"type": "http.response.body"}],
    ],
)
def test_messages_that_are_not_asgi_end_in_an_error_and_one_answer(messages: list[Message]) -> None:
    async def answer(receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    assert ask(make_ingress(Routers(answer)), "/a").status == 500


async def test_cancellation_is_passed_on_and_counted() -> None:
    ingress = make_ingress(Routers(hang))
    answer = Answer()
    request = asyncio.create_task(
        ingress(make_scope("/a"), asyncio.Event().wait, answer.send)  # type: ignore[arg-type]
    )
    await poll_for(lambda: ingress.ongoing)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert answer.messages == []
    assert (ingress.ongoing, ingress.unanswered) == (0, 1)


async def test_a_disconnected_client_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def send(message: Message) -> None:
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        await make_ingress(Routers())(make_scope("/a"), asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert caplog.records == []


def test_statistics_count_what_was_answered() -> None:
    ingress = make_ingress(Routers())
    for path in ("/a", "/a/b", "/x"):
        ask(ingress, path)
    assert ingress.responses() == {"2xx": 2, "4xx": 1}
    assert (ingress.ongoing, ingress.unanswered, ingress.timed_out) == (0, 0, 0)
    assert "3 answered" in repr(ingress)


# ---- other scopes and middlewares


def scripted(app: ASGIApp, scope: Scope, *incoming: str) -> list[Message]:
    sent: list[Message] = []

    async def test() -> None:
        queue = [{"type": kind} for kind in incoming]

        async def receive() -> Message:
            return queue.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        await app(scope, receive, send)
        assert queue == []

    run(test)
    return sent


def make_socket_scope(path: str, *headers: tuple[bytes, bytes]) -> Scope:
    extensions = {"websocket.http.response": {}}
    scope = make_scope(path, "GET", *headers, type="websocket", subprotocols=["v1"], extensions=extensions)
    del scope["method"]
    return scope


def test_websockets_go_to_their_endpoint() -> None:
    async def answer(receive: Receive, send: Send) -> None:
        assert await receive() == {"type": "websocket.connect"}
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "hi"})

    routers = Routers(answer)
    # Deadlines are for requests; a WebSocket has none.
    ingress = make_ingress(routers, request_timeout_s=1e-9)
    sent = scripted(ingress, make_socket_scope("/a/b", (b"x-serve-shard-key", b"k")), "websocket.connect")
    assert sent == [{"type": "websocket.accept"}, {"type": "websocket.send", "text": "hi"}]
    head = routers.head
    assert (head["type"], head["path"], head["root_path"]) == ("websocket", "/a/b", "/a/b")
    assert head["subprotocols"] == ["v1"]
    assert head["extensions"]["websocket.http.response"] == {}
    assert head["extensions"]["daskserve"]["shard_key"] == "k"
    assert ingress.responses() == {"1xx": 1}


@each_case(
    ("path", "error", "status", "text"),
    [
        ("/x", None, 404, b"Path '/x' not found"),
        ("/a", BackPressureError("too many wait"), 503, b"too many wait"),
        ("/a", RuntimeError("secret"), 500, b"Internal Server Error"),
    ],
)
def test_websockets_are_refused_as_requests_are(
    path: str, error: Exception | None, status: int, text: bytes
) -> None:
    async def fail(receive: Receive, send: Send) -> None:
        if error is not None:
            raise error

    ingress = make_ingress(Routers(fail))
    start, body = scripted(ingress, make_socket_scope(path))
    assert (start["type"], start["status"]) == ("websocket.http.response.start", status)
    assert body["type"] == "websocket.http.response.body"
    assert text in body["body"]


def test_an_open_websocket_that_fails_is_closed_by_the_server() -> None:
    async def fail(receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        raise ActorLostError("the replica is gone", begun=True)

    with pytest.raises(ActorLostError):
        scripted(make_ingress(Routers(fail)), make_socket_scope("/a"))


async def test_an_application_that_sends_after_a_disconnect_still_receives_the_disconnect() -> None:
    received: list[Message] = []

    async def answer(receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "are you there?"})
        received.append(await receive())

    async def receive() -> Message:
        return {"type": "websocket.disconnect", "code": 1006}

    async def send(message: Message) -> None:
        if message["type"] == "websocket.send":
            raise ConnectionResetError("gone")

    await make_ingress(Routers(answer))(make_socket_scope("/a"), receive, send)
    assert received == [{"type": "websocket.disconnect", "code": 1006}]


def test_lifespan_is_completed() -> None:
    sent = scripted(make_ingress(Routers()), {"type": "lifespan"}, "lifespan.startup", "lifespan.shutdown")
    assert [message["type"] for message in sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]


def test_an_unknown_scope_is_an_error() -> None:
    with pytest.raises(ValueError, match="'quic'"):
        ask(make_ingress(Routers()), "/a", type="quic")


class Tagging:
    """A middleware that adds a value to the scope and to the response."""

    def __init__(self, app: ASGIApp, name: str, *, mark: str = "") -> None:
        self.app = app
        self.text = name + mark

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["seen"] = [*scope.get("seen", []), self.text]
        await self.app(scope, receive, send)


def test_the_first_middleware_is_outermost() -> None:
    routers = Routers()
    app = build_app(
        make_ingress(routers), [Middleware(Tagging, "first"), Middleware(Tagging, "second", mark="!")]
    )
    assert ask(app, "/a").status == 200
    assert routers.head["seen"] == ["first", "second!"]


def test_without_middlewares_the_ingress_is_the_application() -> None:
    ingress = make_ingress(Routers())
    assert build_app(ingress) is ingress


@each_case(
    ("value", "expected"),
    [
        ({"a": [1, (b"x", None, True, 1.5)]}, True),
        ({1: "a"}, False),
        ([object()], False),
        ({"a": {1, 2}}, False),
        (lambda: 1, False),
    ],
)
def test_is_plain(value: object, expected: bool) -> None:
    assert is_plain(value) == expected


# ---- whole responses


def whole(body: bytes = b"done", **changes: Any) -> Message:
    return {"type": WHOLE_RESPONSE, "status": 201, "headers": [(b"x-a", b"1")], "body": body, **changes}


def test_a_whole_response_becomes_two_messages_for_a_middleware() -> None:
    message = whole()

    async def answer(receive: Receive, send: Send) -> None:
        await send(message)

    ingress = make_ingress(Routers(answer))
    reply = ask(ingress, "/a", "GET", (b"x-request-id", b"mine"))
    headers = [(b"x-a", b"1"), (b"content-length", b"4"), (b"x-request-id", b"mine")]
    assert reply.messages == [
        {"type": "http.response.start", "status": 201, "headers": headers},
        {"type": "http.response.body", "body": b"done"},
    ]
    assert message == whole()
    assert ingress.responses() == {"2xx": 1}


@each_case("second", [whole(), {"type": "http.response.start", "status": 200}])
def test_nothing_follows_a_whole_response(second: Message) -> None:
    async def answer(receive: Receive, send: Send) -> None:
        await send(whole())
        await send(second)

    with pytest.raises(RuntimeError, match="a second time"):
        ask(make_ingress(Routers(answer)), "/a")


def test_a_whole_response_without_a_proper_status_is_a_failure() -> None:
    async def answer(receive: Receive, send: Send) -> None:
        await send(whole(status="200"))

    assert ask(make_ingress(Routers(answer)), "/a").status == 500
