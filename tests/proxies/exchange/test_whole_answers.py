"""The results of user code as the client's bytes: through the ingress, on each server."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Mapping
from typing import Any

from http_harness import connected, request, serving
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse, Response
from tables import each_case

from daskserve.common.types import Envelope, Receive, Send
from daskserve.data.replica.user_code.responses import ConvertedResponse, to_response
from daskserve.options.http import HTTPOptions
from daskserve.proxies.asgi import ASGIApp, Scope
from daskserve.proxies.ingress.app import IngressApp, build_app
from daskserve.proxies.ingress.routes import RouteTable

METHODS = ["GET", "HEAD", "POST", "PUT"]
TABLE = RouteTable(
    {"/a": {"endpoint": "a", "methods": METHODS}, "/": {"endpoint": "root", "methods": METHODS}}
)


class Backend:
    """Answers each request with a result of user code, and keeps the request's head."""

    def __init__(self, result: Any = "text") -> None:
        self.result = result
        self.heads: list[Mapping[str, Any]] = []

    async def __call__(self, endpoint: str, envelope: Envelope, receive: Receive, send: Send) -> None:
        self.heads.append(dict(envelope.head))
        answer = to_response(self.result() if inspect.isfunction(self.result) else self.result)
        assert isinstance(answer, ConvertedResponse)
        assert answer.message is not None
        await send(answer.message)

    def ingress(self, *, is_direct: bool = True, **options: Any) -> IngressApp:
        return IngressApp(
            options=HTTPOptions(**options),
            routes=TABLE,
            dispatch=self,
            rng=random.Random(1),
            is_direct=is_direct,
        )

    def app(self, *, is_direct: bool) -> ASGIApp:
        """Return the ingress, or a middleware around it."""
        ingress = self.ingress(is_direct=is_direct)

        async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
            await ingress(scope, receive, lambda message: send(message))

        return ingress if is_direct else middleware


def with_lists() -> Response:
    response = Response("ok", headers={"x-a": "1"})
    response.raw_headers = [list(pair) for pair in response.raw_headers]  # type: ignore[misc]
    return response


def with_cookies() -> Response:
    response = JSONResponse({"a": 1})
    response.set_cookie("a", "1")
    return response


RESULTS: list[tuple[Any, int, dict[str, str], bytes]] = [
    ("text", 200, {"content-length": "4"}, b"text"),
    ("", 200, {"content-length": "0"}, b""),
    (None, 200, {"content-length": "0"}, b""),
    (b"x" * 1000, 200, {"content-length": "1000"}, b"x" * 1000),
    ({"a": 1}, 200, {"content-length": "7"}, b'{"a":1}'),
    (Response("ok", 201), 201, {"content-length": "2"}, b"ok"),
    (Response("ok", headers={"Content-Length": "2"}), 200, {"content-length": "2"}, b"ok"),
    (Response(status_code=204), 204, {}, b""),
    (Response(status_code=304, headers={"etag": "e"}), 304, {"etag": "e"}, b""),
    (Response(status_code=304, headers={"content-length": "9"}), 304, {"content-length": "9"}, b""),
    (Response("ok", headers={"x-request-id": "own"}), 200, {"x-request-id": "own"}, b"ok"),
    (Response("ok", headers={"date": "today"}), 200, {"date": "today"}, b"ok"),
    (with_lists, 200, {"content-length": "2", "x-a": "1"}, b"ok"),
    (with_cookies, 200, {"set-cookie": "a=1; Path=/; SameSite=lax"}, b'{"a":1}'),
]


@each_case("is_direct", [True, False])
async def test_each_result_is_one_response(is_direct: bool) -> None:
    backend = Backend()
    async with serving(backend.app(is_direct=is_direct)) as server:
        for result, status, headers, body in RESULTS:
            backend.result = result
            async with connected(server) as client:
                # Twice, because leftovers of the first request may affect the second.
                for method in ("GET", "GET", "HEAD", "POST", "GET"):
                    await client.send(request("/a", "X-Request-ID: an-id", method=method))
                    found = await client.response(has_body=method != "HEAD")
                    assert found.status == status
                    expected = {"x-request-id": "an-id", **headers}
                    assert {name: found.headers.get(name) for name in expected} == expected
                    assert ("content-length" in found.headers) is (
                        status not in (204, 304) or "content-length" in headers
                    )
                    assert "date" in found.headers
                    assert found.body == (b"" if method == "HEAD" else body)


async def test_a_wrong_content_length_of_the_application_is_an_error() -> None:
    backend = Backend(Response("ok", headers={"content-length": "3"}))
    async with serving(backend.ingress()) as server, connected(server) as client:
        found = await client.get("/a", "X-Request-ID: an-id")
        assert (found.status, found.headers["x-request-id"]) == (500, "an-id")
        # The response to HEAD has the headers of a GET.
        found = await client.get("/a", method="HEAD")
        assert (found.status, found.headers["content-length"]) == (200, "3")


@each_case("is_direct", [True, False])
async def test_ids_that_would_break_a_header_are_not_taken_over(is_direct: bool) -> None:
    backend = Backend()
    ingress = backend.app(is_direct=is_direct)

    async def with_ids(scope: Scope, receive: Receive, send: Send) -> None:
        # As from a server that accepts everything.
        ids = [(b"x-request-id", each) for each in (b"a\r\nx-b: 1", b"a\n", b"\0", b"good", b"late")]
        await ingress({**scope, "headers": [*scope["headers"], *ids]}, receive, send)

    async with serving(with_ids) as server, connected(server) as client:
        found = await client.get("/a")
        assert found.headers["x-request-id"] == "good"
        assert "x-b" not in found.headers
        assert backend.heads[0]["extensions"]["daskserve"]["request_id"] == "good"

    async def with_bad_ones(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [*scope["headers"], (b"x-request-id", b"a\r\n\r\nHTTP/1.1 200 OK")]
        await ingress({**scope, "headers": headers}, receive, send)

    async with serving(with_bad_ones) as server, connected(server) as client:
        found = await client.get("/a")
        assert len(found.headers["x-request-id"]) == 36


@each_case("is_direct", [True, False])
async def test_requests_of_one_connection_do_not_see_each_others_paths(is_direct: bool) -> None:
    backend = Backend()
    ingress = backend.ingress(is_direct=is_direct, root_path="/root")
    async with serving(ingress) as server, connected(server) as client:
        for path in ("/a/x%20y?q=1", "/root/a/x", "/other", "/root", "/a"):
            assert (await client.get(path)).status == 200
    found = [(head["path"], head["raw_path"], head["root_path"]) for head in backend.heads]
    assert found == [
        ("/root/a/x y", b"/root/a/x%20y", "/root/a"),
        ("/root/a/x", b"/root/a/x", "/root/a"),
        ("/root/other", b"/root/other", "/root"),
        ("/root", b"/root", "/root"),
        ("/root/a", b"/root/a", "/root/a"),
    ]
    assert [head["query_string"] for head in backend.heads] == [b"q=1", b"", b"", b"", b""]
    assert (ingress.ongoing, ingress.responses(), ingress.unanswered) == (0, {"2xx": 5}, 0)


async def test_middlewares_see_two_messages_with_the_length() -> None:
    async def note(request: Any, call_next: Any) -> Any:
        response = await call_next(request)
        lengths.append(response.headers.get("content-length"))
        return response

    lengths: list[str | None] = []

    backend = Backend("x" * 2000)
    app = build_app(
        backend.ingress(is_direct=False),
        [Middleware(GZipMiddleware, minimum_size=500), Middleware(BaseHTTPMiddleware, dispatch=note)],
    )
    async with serving(app) as server, connected(server) as client:
        for _ in range(2):
            found = await client.get("/a", "Accept-Encoding: gzip", "X-Request-ID: an-id")
            assert found.headers["content-encoding"] == "gzip"
            assert int(found.headers.get("content-length", len(found.body))) == len(found.body) < 500
            assert found.headers["x-request-id"] == "an-id"
    assert lengths == ["2000", "2000"]


async def test_pipelined_requests_get_their_own_answers_in_order() -> None:
    backend = Backend("text")
    ingress = backend.ingress()
    async with serving(ingress) as server, connected(server) as client:
        await client.send(
            b"".join(request("/a", f"X-Request-ID: {number}") for number in range(20))
            + request("/a", "X-Request-ID: last", "Connection: close")
        )
        for expected in (*map(str, range(20)), "last"):
            found = await client.response()
            assert (found.headers["x-request-id"], found.body) == (expected, b"text")
            assert ("connection" in found.headers) is (expected == "last")
        assert await client.rest() == b""
        await asyncio.sleep(0)
    assert ingress.responses() == {"2xx": 21}
