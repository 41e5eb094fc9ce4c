"""Servers that accept from the same sockets, as those of a proxy and of its worker's replicas do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from http_harness import connected, make_server, on_each_transport, poll_for, respond, serving

from daskserve.common.clock import LoopClock
from daskserve.common.types import Receive, Send
from daskserve.options.http import HTTPOptions
from daskserve.options.start_messages import ProxyStart
from daskserve.proxies.asgi import ASGIApp, Scope
from daskserve.proxies.replica_listener import ReplicaListeners
from daskserve.proxies.server import accepting
from daskserve.proxies.server.life import HTTPServer


def named(name: bytes) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, name)

    return app


@contextlib.asynccontextmanager
async def guest_of(host: HTTPServer) -> AsyncIterator[HTTPServer]:
    """Run a server that accepts from the sockets of another one, which leaves connections to it."""
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

    monkeypatch.setattr(accepting, "_backlog_of", backlog_of)
    monkeypatch.setattr(accepting, "LOOK_S", 0.001)
    monkeypatch.setattr(accepting, "LOOKS", 3)
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
