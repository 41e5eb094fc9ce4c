"""Request bodies for each kind of backend, under both servers, and the effects of slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

import daskserve as serve
from daskserve.proxies.ingress.bodies import CancellableReceive
from daskserve.testing import local_instance

KIB = 1024
#: Smaller than the limit, and larger than a connection's buffers.
LARGE = 900 * KIB
DEADLINE_S = 10.0


def plain(request: Any) -> str:
    return str(len(request.body_bytes))


def without_argument() -> str:
    return "called"


async def coroutine(request: Any) -> str:
    return str(len(await request.body()))


@serve.accept_batch
def batched(requests: list[Any]) -> list[str]:
    return [str(len(each.body_bytes)) for each in requests]


async def application(scope: Any, receive: Any, send: Any) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(str(len(body)))(scope, receive, send)


ONE_SLOT = {"max_concurrent_queries": 1}
BACKENDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (plain, ONE_SLOT),
    "none": (without_argument, ONE_SLOT),
    "batched": (batched, {**ONE_SLOT, "max_batch_size": 1}),
    "app": (application, {}),
    "async": (coroutine, {}),
    "small": (plain, {"max_body_bytes": 10}),
    "small-app": (application, {"max_body_bytes": 10}),
    "huge": (plain, {"max_body_bytes": 4096 * KIB}),
}


class Site:
    """An instance with all backends, and plain clients of it."""

    def __init__(self, client: serve.Client) -> None:
        self.client = client
        self.url = urlsplit(client.http_urls()[0])
        self.open: list[socket.socket] = []

    def connect(self, data: bytes) -> socket.socket:
        connection = socket.create_connection((self.url.hostname or "", self.url.port or 0), DEADLINE_S)
        self.open.append(connection)
        connection.sendall(data)
        return connection

    def post(self, path: str, body: bytes, *headers: str) -> tuple[int, bytes, bytes]:
        """Return the status, the head and the body of a response."""
        connection = self.connect(head_of(path, len(body), "Connection: close", *headers))
        with contextlib.suppress(OSError):  # refused before all is sent
            connection.sendall(body)
        return answer_on(connection)

    def close(self) -> None:
        """Close all clients."""
        for connection in self.open:
            connection.close()
        self.open.clear()


def head_of(path: str, length: int, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {length}", *headers, "", ""]
    return "\r\n".join(lines).encode()


def answer_on(connection: socket.socket) -> tuple[int, bytes, bytes]:
    """Return the status, the head and the body of the next response."""
    with connection.makefile("rb") as lines:
        head = b"".join(iter(lambda: lines.readline().lower(), b"\r\n"))
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return int(head.split(b" ")[1]), head, lines.read(int(length))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    http = {
        "port": 0,
        "max_body_bytes": 1024 * KIB,
        "max_buffered_bytes": 6 * 1024 * KIB,
    }
    with local_instance(http_options=http) as client:
        for name, (definition, config) in BACKENDS.items():
            client.deploy(name, definition, config=config)
        site = Site(client)
        yield site
        site.close()


@pytest.fixture
def held(site: Site) -> Iterator[Callable[[str, int, int], None]]:
    """Return a function that lets clients send only a part of a body; they disconnect after the test."""

    def hold(path: str, clients: int, sent_bytes: int = 1) -> None:
        for _ in range(clients):
            site.connect(head_of(path, 1000 * KIB) + bytes(sent_bytes))

    site.close()
    yield hold
    site.close()


@pytest.mark.parametrize("path", ["/plain", "/none", "/batched"])
def test_stalled_bodies_hold_no_slot_of_a_plain_backend(site: Site, held: Any, path: str) -> None:
    held(path, 9)
    began = time.monotonic()
    status, _, body = site.post(path, b"12345")
    assert (status, body) == (200, b"called" if path == "/none" else b"5")
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("path", ["/plain", "/batched", "/app", "/async"])
def test_large_bodies_arrive_whole(site: Site, path: str) -> None:
    assert site.post(path, bytes(LARGE))[::2] == (200, b"%d" % LARGE)


def test_a_callable_without_argument_is_called_after_the_body(site: Site) -> None:
    assert site.post("/none", bytes(LARGE))[::2] == (200, b"called")


@pytest.mark.parametrize("path", ["/small", "/small-app"])
def test_a_backend_may_limit_its_bodies_further(site: Site, path: str) -> None:
    assert site.post(path, bytes(10))[::2] == (200, b"10")
    status, _, body = site.post(path, bytes(11))
    assert status == 413
    assert b"10 bytes" in body
    chunked = "POST {} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    connection = site.connect(chunked.format(path).encode() + b"5\r\n12345\r\n")
    connection.sendall(b"6\r\n123456\r\n0\r\n\r\n")
    assert answer_on(connection)[0] == 413


def test_a_backend_may_allow_larger_bodies_than_others(site: Site) -> None:
    assert site.post("/huge", bytes(4096 * KIB))[::2] == (200, b"4194304")
    assert site.post("/huge", bytes(4096 * KIB + 1))[0] == 413
    assert site.post("/plain", bytes(1024 * KIB + 1))[0] == 413


def test_bodies_beyond_the_budget_get_503_and_all_is_free_once_their_clients_leave(
    site: Site, held: Any
) -> None:
    held("/plain", 7, 990 * KIB)
    refused, _, _ = select.select(site.open, [], [], DEADLINE_S)  # the last one, or one that it replaced
    status, head, body = answer_on(refused[0])
    assert status == 503
    assert b"retry-after: 1" in head
    assert b"max_buffered_bytes" in body
    assert site.post("/plain", bytes(100))[::2] == (200, b"100")
    site.close()
    deadline = time.monotonic() + DEADLINE_S
    while site.post("/plain", bytes(LARGE))[0] != 200:
        assert time.monotonic() < deadline


async def test_a_message_that_a_middleware_has_read_is_not_lost_with_the_call_that_waited() -> None:
    arrived, passed_on = asyncio.Event(), asyncio.Event()
    ends = []

    async def receive() -> dict[str, Any]:
        ends.append("cancelled")
        await arrived.wait()
        await passed_on.wait()  # the message is read, and lost if the call is cancelled now
        ends[-1] = "read"
        return {"type": "http.request", "body": b"a", "more_body": False}

    cancellable = CancellableReceive(receive)
    arrived.set()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await cancellable()
    passed_on.set()
    assert (await cancellable())["body"] == b"a"
    assert ends == ["read"]
