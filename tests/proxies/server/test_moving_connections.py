"""Connections that move between a proxy and a child while they are open, over sockets.

Both servers run in one process, so a "child" here is another server with its own copies of the sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from distributed import Security
from http_harness import (
    HANDSHAKE,
    Client,
    connected,
    on_each_loop,
    on_each_transport,
    poll_for,
    request,
    serving,
)
from moving_servers import body, named, proxy_of

from daskserve.common.clock import LoopClock
from daskserve.common.types import Receive, Send
from daskserve.loops.connection_table import (
    GIVE_BACK,
    SLOT_NUMBER,
    ConnectionTable,
    MovedConnection,
)
from daskserve.proxies.asgi import Scope
from daskserve.proxies.server.acceptor import is_readable
from daskserve.proxies.server.receiver import ConnectionReceiver
from daskserve.proxies.server.tls import server_context


@on_each_loop
async def test_children_serve_equal_shares_of_the_connections() -> None:
    async with (
        proxy_of(named("proxy")) as proxy,
        proxy.child(named("one")) as (one, _),
        proxy.child(named("other")) as (other, _),
        contextlib.AsyncExitStack() as opened,
    ):
        clients = [await opened.enter_async_context(connected(proxy.server)) for _ in range(20)]
        for _ in range(2):
            assert sorted([await body(each) for each in clients]) == ["one 0"] * 10 + ["other 0"] * 10
        assert len(one.state.connections) == len(other.state.connections) == 10
        assert not proxy.server.state.connections


@on_each_loop
async def test_a_request_for_another_process_goes_back_whole_and_its_connection_stays() -> None:
    async with (
        proxy_of(named("proxy")) as proxy,
        proxy.child(named("child")) as (child, given),
        connected(proxy.server) as client,
    ):
        assert await body(client) == "child 0"
        await client.send(b"POST /elsewhere HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nabc")
        await poll_for(lambda: not child.state.connections and proxy.server.state.connections)
        await client.send(b"def" + request("/") + request("/elsewhere"))
        assert [(await client.response()).body for _ in range(3)] == [b"proxy 6", b"proxy 0", b"proxy 0"]
        assert await body(client) == "proxy 0"
        assert len(given) == 0


@on_each_transport
async def test_a_large_request_for_another_process_is_answered_where_it_has_arrived() -> None:
    async with (
        proxy_of(named("proxy")) as proxy,
        proxy.child(named("child")) as (child, _),
        connected(proxy.server) as client,
    ):
        assert await body(client) == "child 0"
        filler = "y" * 20_000
        answer = await client.get("/elsewhere", f"x-filler: {filler}")
        assert answer.body == b"child 0"  # whose application passes it on
        assert len(child.state.connections) == 1


@on_each_transport
async def test_connections_of_the_proxy_move_to_a_child_after_their_next_request() -> None:
    async with proxy_of(named("proxy")) as proxy, connected(proxy.server) as client:
        assert await body(client) == "proxy 0"
        async with proxy.child(named("child")) as (child, given):
            assert await body(client) == "proxy 0"
            assert await body(client) == "child 0"
            async with connected(proxy.server) as other:
                await other.send(request("/") + request("/"))
                assert [(await other.response()).body for _ in range(2)] == [b"child 0"] * 2
            await poll_for(lambda: len(given) == 1)
            assert len(child.state.connections) == 1


@on_each_loop
async def test_a_connection_that_no_child_takes_continues_at_the_proxy() -> None:
    refused = []

    def refuse(moved: MovedConnection) -> bool:
        refused.append(moved)
        return False

    async with serving(named("proxy")) as server, connected(server) as client:
        server.give_to(lambda path: refuse)
        server.set_giving(True)
        for _ in range(3):
            assert await body(client) == "proxy 0"
        await client.send(b"".join([request("/")] * 5))
        assert [(await client.response()).body for _ in range(5)] == [b"proxy 0"] * 5
    assert len(refused) >= 4
    assert all(each.sock.fileno() == -1 for each in refused)


@on_each_loop
async def test_a_child_that_stops_gives_its_connections_back_open() -> None:
    gate = asyncio.Event()
    async with (
        proxy_of(named("proxy")) as proxy,
        proxy.child(named("child", gate)) as (child, given),
        connected(proxy.server) as unused,
        connected(proxy.server) as half,
        connected(proxy.server) as idle,
        connected(proxy.server) as busy,
    ):
        await poll_for(lambda: len(child.state.connections) == 4)
        assert await body(idle) == "child 0"
        await busy.send(request("/held") + request("/"))
        await half.send(b"GET / HT")
        await poll_for(lambda: child.state.tasks)
        proxy.port.withdraw(given)
        draining = asyncio.create_task(child.drain(10, gives_back=True))
        await poll_for(lambda: len(proxy.server.state.connections) == 3)
        await half.send(b"TP/1.1\r\nHost: x\r\n\r\n")
        assert (await half.response()).body == b"proxy 0"
        assert [await body(unused), await body(idle)] == ["proxy 0", "proxy 0"]
        gate.set()
        await draining
        assert [(await busy.response()).body for _ in range(2)] == [b"child 0", b"proxy 0"]
        assert len(proxy.server.state.connections) == 4


@on_each_loop
@pytest.mark.parametrize("grace_s", [0, 10])
async def test_a_child_gives_connections_back_that_are_always_in_use(grace_s: float) -> None:
    async with (
        proxy_of(named("proxy")) as proxy,
        proxy.child(named("child")) as (child, given),
        contextlib.AsyncExitStack() as opened,
    ):
        clients = [await opened.enter_async_context(connected(proxy.server)) for _ in range(150)]
        await poll_for(lambda: len(child.state.connections) == 150)
        used, idle = clients[:3], clients[3:]
        assert [await body(each) for each in used] == ["child 0"] * 3
        is_over = False

        async def use(client: Client) -> None:
            while not is_over:
                await body(client)

        using = [asyncio.create_task(use(each)) for each in used] if grace_s else []
        proxy.port.withdraw(given)
        await child.drain(grace_s, gives_back=True)
        await poll_for(lambda: not child.state.connections)
        is_over = True
        await asyncio.gather(*using)
        await poll_for(lambda: len(proxy.server.state.connections) == 150)
        assert [await body(each) for each in (*used, *idle[:3])] == ["proxy 0"] * 6


@on_each_loop
@pytest.mark.parametrize("ends", ["client", "server", "http10", "reset"])
async def test_the_end_of_a_connection_reaches_both_sides(ends: str) -> None:
    async with (
        proxy_of(named("proxy")) as proxy,
        proxy.child(named("child")) as (child, given),
        connected(proxy.server) as client,
    ):
        if ends == "client":
            client.writer.close()
        elif ends == "reset":
            await client.get()
            client.reset()
        elif ends == "server":
            assert (await client.get("/", "Connection: close")).body == b"child 0"
            assert await client.rest() == b""
        else:
            await client.send(b"GET / HTTP/1.0\r\n\r\n")
            assert (await client.rest()).endswith(b"child 0")
        await poll_for(lambda: len(given) == 0)
        assert not child.state.connections


@on_each_loop
async def test_a_connection_ends_although_the_proxy_with_its_copy_is_blocked() -> None:
    async with (
        proxy_of(named("proxy")) as proxy,
        proxy.child(named("child")) as (_, given),
        connected(proxy.server) as client,
    ):
        asyncio.get_running_loop().remove_reader(given._ours)
        assert (await client.get("/", "Connection: close")).body == b"child 0"
        assert await client.rest() == b""
        assert len(given) == 1


@on_each_transport
async def test_a_connection_that_its_response_closes_does_not_move() -> None:
    gate = asyncio.Event()
    async with proxy_of(named("proxy")) as proxy, connected(proxy.server) as early:
        assert await body(early) == "proxy 0"
        async with proxy.child(named("child", gate)) as (child, given), connected(proxy.server) as held:
            assert (await early.get("/", "Connection: close")).body == b"proxy 0"
            assert await early.rest() == b""
            await held.send(request("/held", "Connection: close"))
            await poll_for(lambda: child.state.tasks)
            proxy.port.withdraw(given)
            draining = asyncio.create_task(child.drain(10, gives_back=True))
            gate.set()
            assert (await held.response()).headers["connection"] == "close"
            assert await held.rest() == b""
            await draining


@on_each_transport
async def test_a_websocket_ends_with_its_child_and_counts_until_then() -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()

    async with (
        proxy_of(named("proxy")) as proxy,
        proxy.child(echo) as (child, given),
        connected(proxy.server) as client,
    ):
        await client.send(request("/", *HANDSHAKE))
        assert (await client.head())[0] == 101
        assert len(given) == 1
        proxy.port.withdraw(given)
        await child.drain(5, gives_back=True)
        assert (await client.rest())[:4] == b"\x88\x0c\x03\xe9"  # 1001
        await poll_for(lambda: len(given) == 0)
        assert not proxy.server.state.connections


@on_each_transport
async def test_at_the_limit_a_child_closes_an_idle_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskserve.proxies.server.acceptor.IDLE_S", 0.0)
    async with (
        proxy_of(named("proxy"), max_connections=2) as proxy,
        proxy.child(named("child")),
        connected(proxy.server) as first,
        connected(proxy.server) as second,
    ):
        assert [await body(first), await body(second)] == ["child 0", "child 0"]
        async with connected(proxy.server) as third:
            assert await body(third) == "child 0"
            assert await first.rest() == b""
            assert await body(second) == "child 0"


@on_each_transport
async def test_a_connection_with_tls_is_given_once_and_does_not_move(tmp_path: Path) -> None:
    certificate = Security.temporary()
    for name in ("cert", "key"):
        (tmp_path / name).write_text(getattr(certificate, f"tls_scheduler_{name}"))
    tls = server_context(str(tmp_path / "cert"), str(tmp_path / "key"))
    trusting = ssl.create_default_context(cafile=str(tmp_path / "cert"))
    trusting.check_hostname = False
    async with (
        proxy_of(named("proxy"), tls=tls) as proxy,
        proxy.child(named("child"), tls=tls) as (child, given),
    ):
        opened = Client(*await asyncio.open_connection("127.0.0.1", proxy.server.port, ssl=trusting))
        assert await body(opened) == "child 0"
        assert await body(opened, "/elsewhere") == "child 0"
        proxy.port.withdraw(given)
        await child.drain(5, gives_back=True)
        await child.stop()
        assert await opened.rest() == b""
        opened.writer.close()


@on_each_transport
async def test_a_forked_process_does_not_hold_the_connections_of_a_child_open() -> None:
    async with (
        proxy_of(named("proxy")) as proxy,
        proxy.child(named("child")) as (child, given),
        connected(proxy.server) as client,
    ):
        assert await body(client) == "child 0"
        (taken,) = child.state.connections
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            kind = os.readlink(f"/proc/self/fd/{taken.stream.socket.fileno()}")
            os.write(writing, kind.encode())
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reading, 100) == b"/dev/null"
        for each in (reading, writing):
            os.close(each)
        assert await body(client) == "child 0"
        assert len(given) == 1


@on_each_loop
async def test_a_moved_request_that_is_refused_leaves_no_connection() -> None:
    async with serving(named("proxy")) as server:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        server.serve(MovedConnection(ours, b"BAD REQUEST" + b"\r\n\r\n"))
        client = Client(*await asyncio.open_connection(sock=theirs))
        assert (await client.response()).status == 400
        client.writer.close()
        await poll_for(lambda: not server.state.connections and not server.state.streams)


@on_each_loop
async def test_a_moved_connection_stops_reading_while_its_next_request_waits() -> None:
    gate = asyncio.Event()
    async with serving(named("proxy", gate)) as server:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        server.serve(MovedConnection(ours, request("/held") + request("/")))
        reader, writer = await asyncio.open_connection(sock=theirs)
        client = Client(reader, writer)
        await poll_for(lambda: server.state.tasks)
        writer.write(request("/") * 100_000)  # more than the kernel takes
        for _ in range(100):
            await asyncio.sleep(0)
        assert writer.transport.get_write_buffer_size() > 0
        gate.set()
        assert [(await client.response()).body for _ in range(2)] == [b"proxy 0"] * 2
        client.reset()


@on_each_transport
async def test_a_proxy_that_drains_answers_what_comes_back() -> None:
    gate = asyncio.Event()
    async with serving(named("proxy", gate)) as server, connected(server) as held:
        await held.send(request("/held"))
        await poll_for(lambda: server.state.tasks)
        draining = asyncio.create_task(server.drain(10))
        await poll_for(lambda: server.state.is_draining)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        server.serve(MovedConnection(ours, request("/")))
        client = Client(*await asyncio.open_connection(sock=theirs))
        answer = await client.response()
        assert (answer.body, answer.headers["connection"]) == (b"proxy 0", "close")
        client.writer.close()
        gate.set()
        await draining


async def test_the_proxy_gets_all_messages_of_a_child_that_stops_while_it_is_slow() -> None:
    ours, theirs = socket.socketpair()
    table = ConnectionTable(1000)
    served: Any = pytest.fail
    receiver = ConnectionReceiver([theirs.fileno(), table.fileno()], served, served, LoopClock())
    receiver.start()
    messages = 0
    while messages < 1000:  # more than the pair holds; without a connection, each one is returned
        batch = min(100, 1000 - messages)
        for slot in range(messages, messages + batch):
            ours.send(SLOT_NUMBER.pack(slot))
        messages += batch
        await poll_for(lambda: not is_readable([theirs]))
    closing = asyncio.create_task(receiver.close())
    ours.setblocking(False)
    received: list[int] = []

    def has_all() -> bool:
        with contextlib.suppress(BlockingIOError):
            received.extend(number for (number,) in SLOT_NUMBER.iter_unpack(ours.recv(4096)))
        return len(received) == 1000

    async with asyncio.timeout(10):
        await poll_for(has_all)
    assert received == [slot | GIVE_BACK for slot in range(1000)]
    await closing
    for each in (ours, theirs, table):
        each.close()
