"""Code that answers before it reads, and when a client is asked for its body (``Expect: 100-continue``)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from daskserve.data.replica.requests.http import FIRST_PART_S
from daskserve.testing import local_instance

HEAD = "POST {} HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\nConnection: close\r\n\r\n"


async def reject(request: Request) -> PlainTextResponse:
    return PlainTextResponse("no", 403)


async def read(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await request.body())


application = Starlette(
    routes=[Route("/reject", reject, methods=["POST"]), Route("/read", read, methods=["POST"])]
)


async def ask_by_query(request: Request) -> bytes:
    return await request.body() if "read" in request.query_params else b"no"


def plain(request: Request) -> bytes:
    return request.body_bytes


BACKENDS = {
    "app": (application, {}),
    "app-loop": (application, {"event_loop": "worker"}),
    "app-far": (application, {"isolation": "process"}),
    "async": (ask_by_query, {}),
    "async-loop": (ask_by_query, {"event_loop": "worker"}),
    "plain": (plain, {}),
}


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with local_instance(http_options={"port": 0}) as client:
        for name, (definition, config) in BACKENDS.items():
            client.deploy(name, definition, config=config)
        (url,) = client.http_urls()
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        yield parts.hostname, parts.port


def exchange(address: tuple[str, int], path: str) -> bytes:
    """Return all bytes that answer a request whose body is only sent after ``100 Continue``."""
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(HEAD.format(path).encode())
        data = client.recv(65536)
        if data == b"HTTP/1.1 100 Continue\r\n\r\n":
            client.sendall(b"hi")
        while more := client.recv(65536):
            data += more
        return data


@pytest.mark.parametrize(
    "path", ["/app/reject", "/app-loop/reject", "/app-far/reject", "/async", "/async-loop"]
)
def test_user_code_that_does_not_read_does_not_ask_for_the_body(address: tuple[str, int], path: str) -> None:
    assert exchange(address, path).startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 200 "))


@pytest.mark.parametrize(
    "path", ["/app/read", "/app-loop/read", "/app-far/read", "/async?read=1", "/async-loop?read=1", "/plain"]
)
def test_user_code_that_reads_asks_for_the_body(address: tuple[str, int], path: str) -> None:
    answer = exchange(address, path)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
    assert answer.endswith(b"hi")


@pytest.mark.parametrize(
    "path", ["/app/reject", "/app-loop/reject", "/app-far/reject", "/async", "/async-loop"]
)
def test_user_code_may_answer_before_the_body_comes(address: tuple[str, int], path: str) -> None:
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(HEAD.format(path).replace("Expect: 100-continue\r\n", "").encode())
        assert client.recv(65536).startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 200 "))


@pytest.mark.parametrize("path", ["/app/read", "/app-loop/read", "/app-far/read", "/async?read=1"])
def test_user_code_reads_a_body_that_comes_late(address: tuple[str, int], path: str) -> None:
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(HEAD.format(path).replace("Expect: 100-continue\r\n", "").encode())
        client.settimeout(2 * FIRST_PART_S)
        with pytest.raises(TimeoutError):
            client.recv(65536)
        client.settimeout(10)
        client.sendall(b"hi")
        assert client.recv(65536).endswith(b"hi")
