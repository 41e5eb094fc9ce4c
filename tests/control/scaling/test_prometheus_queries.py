"""Values from a Prometheus server: parsing, ages, and a server over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application, RequestHandler

from daskserve.common.clock import LoopClock
from daskserve.control.scaling.fetching import HTTPFetcher
from daskserve.control.scaling.prometheus import PrometheusQueries, value_of
from daskserve.testing import run_virtual


def answer(kind: str, result: Any) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": result}}).encode()


def vector(*values: str) -> bytes:
    return answer("vector", [{"metric": {}, "value": [1.5, value]} for value in values])


def test_a_vector_of_one_and_a_scalar_have_a_value() -> None:
    assert value_of(vector("12.5")) == 12.5
    assert value_of(answer("scalar", [1.5, "3"])) == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (vector(), "gives no series; check its names and labels"),
        (vector("1", "2"), "gives 2 series, not one"),
        (vector("NaN"), "a finite value"),
        (vector("x"), "could not convert"),
        (answer("matrix", []), "the query gives a matrix"),
        (answer("vector", [{}]), "not that of Prometheus"),
        (b'{"status": "error", "error": "parse error"}', "refused the query: parse error"),
        (b"[]", "refused the query: no reason given"),
        (b"<html>", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (answer("scalar", [0, 10**400]), "too large"),
        (b"\xff", "not JSON"),
    ],
)
def test_any_other_answer_is_an_error_with_a_remedy(body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        value_of(body)


class ScriptedServer:
    """A server with scripted answers."""

    def __init__(self) -> None:
        self.now: Any = vector("1")
        self.urls: list[str] = []

    async def __call__(self, url: str) -> bytes:
        self.urls.append(url)
        if isinstance(self.now, BaseException):
            raise self.now
        if self.now is None:
            await asyncio.Event().wait()
        body: bytes = self.now
        return body


def queries(server: Any, address: str = "http://p:9090/base/") -> PrometheusQueries:
    return PrometheusQueries(address, {"lag": "sum(lag) > 0"}, fetch=server, clock=LoopClock())


def test_a_value_is_polled_at_every_interval_and_becomes_stale() -> None:
    server = ScriptedServer()

    async def scenario() -> None:
        asked = queries(server)
        task = asyncio.ensure_future(asked.run())
        await asyncio.sleep(11)
        assert len(server.urls) == 3
        assert asked.values() == {"lag": 1}
        server.now = OSError("refused")
        await asyncio.sleep(10)
        assert asked.values() == {"lag": 1}
        assert asked.errors() == {"lag": "refused"}
        await asyncio.sleep(6)
        assert asked.values() == {}
        server.now = vector("7")
        await asyncio.sleep(5)
        assert (asked.values(), asked.errors()) == ({"lag": 7}, {})
        server.now = None
        await asyncio.sleep(30)
        assert asked.values() == {}
        assert asked.errors() == {"lag": "TimeoutError"}
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(scenario)
    url = urlsplit(server.urls[0])
    assert url.path == "/base/api/v1/query"
    assert parse_qs(url.query) == {"query": ["sum(lag) > 0"]}


class QueryHandler(RequestHandler):
    def get(self) -> None:
        query = self.get_query_argument("query")
        if query == "html":
            self.set_status(502)
            self.finish("<html>")
        elif query == "bad":
            self.set_status(400)
            self.set_header("Content-Type", "application/json")
            self.finish('{"status": "error", "error": "parse error"}')
        else:
            self.finish(vector("42"))


def test_values_and_errors_arrive_over_a_real_socket() -> None:
    async def scenario() -> None:
        socket, port = bind_unused_port()
        server = HTTPServer(Application([("/api/v1/query", QueryHandler)]))
        server.add_socket(socket)
        fetch = HTTPFetcher(timeout_s=5)
        asked = PrometheusQueries(
            f"http://127.0.0.1:{port}",
            {"good": "up", "bad": "bad", "html": "html"},
            fetch=fetch,
            clock=LoopClock(),
        )
        await asked.refresh()
        assert asked.values() == {"good": 42}
        assert asked.errors() == {
            "bad": "Prometheus refused the query: parse error",
            "html": "HTTP 502: Bad Gateway",
        }
        server.stop()
        await server.close_all_connections()
        await asked.refresh()
        assert "refused" in asked.errors()["good"]
        fetch.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer_bytes", "closes"),
    [
        (b"", False),  # silence
        (b"", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{", True),  # closed in the middle
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{", False),  # never closed
        (b"SSH-2.0-whatever\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n", False),  # larger than accepted
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull", True),
    ],
)
def test_a_slow_dying_or_garbled_server_gives_no_value(answer_bytes: bytes, closes: bool) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer_bytes)
        await writer.drain()
        if not closes:
            await reader.read()  # until the client disconnects
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            fetch = HTTPFetcher(timeout_s=0.3)
            asked = PrometheusQueries(f"http://127.0.0.1:{port}", {"q": "up"}, fetch=fetch, clock=LoopClock())
            async with asyncio.timeout(5):
                await asked.refresh()
            assert asked.values() == {}
            assert list(asked.errors()) == ["q"]
            fetch.close()

    asyncio.run(main())
