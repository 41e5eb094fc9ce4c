"""Servers that accept from the same sockets, like those of a proxy and of its worker's replicas."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from http_harness import connected, make_server, on_each_transport, poll_for, respond, serving

from daskserve.actors import ProxyActor
from daskserve.common.clock import LoopClock
from daskserve.common.types import BodyUse, Envelope, Receive, Send
from daskserve.errors import BadRequestError, ServeError
from daskserve.options.http import HTTPOptions
from daskserve.options.start_messages import ProxyStart
from daskserve.proxies.asgi import ASGIApp, Scope
from daskserve.proxies.listener import HTTPListener, Requests
from daskserve.proxies.replica_listener import ReplicaListeners
from daskserve.proxies.server import acceptor
from daskserve.proxies.server.server import HTTPServer
from daskserve.telemetry.logs.process import ProcessLogs


def named(name: bytes) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, name)

    return app


@contextlib.asynccontextmanager
async def guest_of(host: HTTPServer) -> AsyncIterator[HTTPServer]:
    """Run a server that accepts from the sockets of another server, which leaves connections to it."""
    guest = make_server(named(b"guest"))
    guest.adopt([socket.socket(fileno=os.dup(each)) for each in host.share()])
    guest.start()
    host.leave_to_others(True)
    try:
        yield guest
    finally:
        await guest.stop()


async def answer(server: HTTPServer) -> bytes:
    async with connected(server) as client:
        return (await client.get("/", "Connection: close")).body


@on_each_transport
async def test_the_guest_accepts_and_the_host_goes_on_when_it_is_gone() -> None:
    async with serving(named(b"host")) as host:
        assert await answer(host) == b"host"
        async with guest_of(host) as guest:
            assert guest.port == host.port
            assert [await answer(host) for _ in range(20)] == [b"guest"] * 20
        assert await answer(host) == b"host"  # although nobody has told it that the guest is gone
        host.leave_to_others(False)
        assert await answer(host) == b"host"


@on_each_transport
async def test_a_guest_that_drains_leaves_what_waits_to_its_host() -> None:
    async with serving(named(b"host")) as host, guest_of(host) as guest:
        async with connected(host) as client:
            assert (await client.get()).body == b"guest"
            draining = asyncio.create_task(guest.drain(10))
            await asyncio.sleep(0)
            last = await client.get()
            assert (last.body, last.headers["connection"]) == (b"guest", "close")
            await draining
        assert await answer(host) == b"host"


@on_each_transport
async def test_nothing_listens_when_the_host_has_stopped_whoever_has_its_sockets() -> None:
    async with serving(named(b"host")) as host:
        forgotten = [os.dup(each) for each in host.share()]
        async with guest_of(host) as guest:
            port = host.port
            await host.drain(1)
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0
            await poll_for(lambda: not guest._acceptor._sockets)
        for each in forgotten:
            os.close(each)


@on_each_transport
async def test_guests_get_equal_shares_of_the_connections() -> None:
    async with serving(named(b"host")) as host, guest_of(host) as one, guest_of(host) as other:
        async with contextlib.AsyncExitStack() as opened:
            for _ in range(20):
                client = await opened.enter_async_context(connected(host))
                assert (await client.get()).body == b"guest"
            shares = [len(each.state.connections) for each in (one, other)]
    assert sum(shares) == 20
    assert min(shares) >= 7


@on_each_transport
async def test_the_host_accepts_once_the_others_have_taken_nothing_for_some_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, looks = iter([9, 8, 7, 7, 6, 6, 5]), []  # how many connections wait at each look, then always 4

    def backlog_of(listening: socket.socket) -> int:
        looks.append(next(taken, 4))
        return looks[-1]

    monkeypatch.setattr(acceptor, "_backlog_of", backlog_of)
    monkeypatch.setattr(acceptor, "CHECK_S", 0.001)
    monkeypatch.setattr(acceptor, "CHECKS", 3)
    async with serving(named(b"host")) as host:
        host.leave_to_others(True)
        assert await answer(host) == b"host"
    assert looks == [9, 8, 7, 7, 6, 6, 5, 4, 4, 4, 4]


async def test_sockets_that_a_replica_could_not_listen_on_are_closed_with_their_port() -> None:
    def fail(config: Mapping[str, Any]) -> None:
        raise RuntimeError("no traces")

    taken = [socket.create_server(("127.0.0.1", 0))]
    context = SimpleNamespace(spec=SimpleNamespace(instance="i"), clock=LoopClock(), rng=None, logs=None)
    unused: Any = None
    listeners = ReplicaListeners(
        unused, unused, context, to_worker=unused, take_sockets=lambda key: taken, trace=fail
    )
    start = ProxyStart(HTTPOptions(), None, False, True, False, "127.0.0.1", {}, None).encode()
    wanted = {"own": [], "rules": {}, "routes": {}, "listeners": {"p#1": start}}
    with pytest.raises(RuntimeError, match="no traces"):
        await listeners.listen(wanted)
    assert await listeners.stop("p#1", 0) == {}
    assert taken[0].fileno() == -1


class Answers(Requests):
    """Requests that the test answers; at first their endpoints are unknown."""

    def __init__(self) -> None:
        self.heads: list[Mapping[str, Any]] = []
        self.prepared: list[str] = []
        self.rules: tuple[BodyUse, int] | None = None
        self.asked_for: list[str] = []
        self.is_known = asyncio.Event()

    @property
    def largest_body_bytes(self) -> float:
        return 10.0

    @property
    def send(self) -> Any:
        async def call(endpoint: str, envelope: Envelope, receive: Receive, send: Send) -> None:
            self.heads.append(envelope.head)
            await respond(send, endpoint.encode())

        return call

    def prepare(self, endpoint: str) -> None:
        self.prepared.append(endpoint)

    def body_rules(self, endpoint: str, default_max_bytes: int) -> tuple[BodyUse, int] | None:
        self.asked_for.append(endpoint)
        return self.rules

    async def wait_until_published(self, endpoint: str) -> None:
        await self.is_known.wait()

    def check_queue(self, endpoint: str) -> None: ...

    def is_crowded(self, endpoint: str) -> bool:
        return False


def start_of(**options: Any) -> ProxyStart:
    made = HTTPOptions(host="127.0.0.1", port=0, **options)
    return ProxyStart(made, None, False, True, False, "127.0.0.1", {}, None)


@contextlib.asynccontextmanager
async def listening(
    requests: Answers, logs: ProcessLogs | None = None, **options: Any
) -> AsyncIterator[HTTPListener]:
    rng, clock = random.Random(1), LoopClock()
    listener = HTTPListener(
        start_of(**options), requests, name="p", instance="i", clock=clock, rng=rng, logs=logs
    )
    assert listener.samples() == []
    listener.configure_logs({"enable_access_log": True})
    await listener.bind(None)
    listener.update_routes({"/a": {"endpoint": "e", "methods": ["GET", "POST"]}})
    listener.start()
    try:
        yield listener
    finally:
        await listener.stop(0)


@pytest.mark.parametrize("has_logs", [True, False])
async def test_a_listener_logs_requests_where_the_process_has_logs(has_logs: bool) -> None:
    lines: list[str] = []
    out: Any = SimpleNamespace(write=lines.extend, close=lambda: None, lost=0)
    logs, requests = ProcessLogs(out), Answers()
    logs.wake = lambda *gone: None
    async with listening(requests, logs if has_logs else None) as listener:
        assert listener.server is not None
        async with connected(listener.server) as client:
            assert (await client.get("/a")).body == b"e"
        async with connected(listener.server) as client:
            assert (await client.get("a", method="G(T")).status == 400
        counts = {name: value for name, labels, value in listener.samples() if labels == ("i",)}
        assert (counts["http_ongoing_requests"], requests.prepared) == (0, ["e"])
        logs.drain()
    logs.close()
    assert [line.split('"')[2].split()[0] for line in lines] == (["200", "400"] if has_logs else [])


@pytest.mark.parametrize(
    ("trusted", "client"), [([], "127.0.0.1"), (["10.0.0.0/8"], "127.0.0.1"), (["127.0.0.0/8"], "1.2.3.4")]
)
async def test_only_forwarders_that_are_trusted_name_the_client(trusted: list[str], client: str) -> None:
    requests = Answers()
    async with listening(requests, trusted_forwarders=trusted) as listener:
        assert listener.server is not None
        async with connected(listener.server) as connection:
            assert (await connection.get("/a", "X-Forwarded-For: 1.2.3.4")).status == 200
    assert requests.heads[0]["client"][0] == client


async def test_a_body_waits_until_it_is_known_how_large_it_may_be() -> None:
    requests = Answers()
    async with listening(requests) as listener:
        assert listener.server is not None
        async with connected(listener.server) as connection:
            for size, status in ((10, 200), (11, 413)):
                requests.rules = None
                requests.asked_for.clear()
                await connection.send(b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size)
                await poll_for(lambda: requests.asked_for)
                requests.rules = ("gather", 10)
                requests.is_known.set()
                await connection.send(b"x" * size)
                assert (await connection.response()).status == status
                requests.is_known.clear()


def test_a_proxy_that_does_not_listen_yet_says_so() -> None:
    context: Any = SimpleNamespace(cluster=None, spec=SimpleNamespace(payload=start_of().encode(), name="p"))
    proxy = ProxyActor(context)
    assert (proxy.health(), proxy.metrics(), proxy.samples()) == ({}, {"ended": 0}, [])
    with pytest.raises(ServeError, match="The proxy is still starting"):
        asyncio.run(proxy.statistics())
    with pytest.raises(BadRequestError, match="takes its requests over HTTP"):
        proxy.handle(None)  # type: ignore[arg-type]
    asyncio.run(proxy.stop(1.0))
