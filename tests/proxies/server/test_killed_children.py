"""Connections of a process that is killed, or whose last response is not sent yet."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from http_harness import (
    Client,
    connected,
    on_each_loop,
    on_each_transport,
    poll_for,
    request,
)
from memory_transport import MemoryTransport, serving_in_memory
from moving_servers import LOST, body, named, proxy_of

from daskserve.loops.connection_table import (
    ConnectionState,
    ConnectionTable,
    MovedConnection,
    map_table,
)
from daskserve.loops.tcp_counts import transferred
from daskserve.proxies.exchange.http_connection import HTTPConnection
from daskserve.proxies.exchange.taken_connection import TakenConnection


@on_each_loop
@pytest.mark.parametrize("moment", ["read", "passed on", "answered"])
async def test_a_request_or_a_response_survives_a_process_that_is_killed_before_it_records_it(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        proxy_of(named("proxy")) as proxy,
        proxy.child(named("child")) as (child, given),
        connected(proxy.server) as client,
    ):
        assert await body(client) == "child 0"
        (each,) = given._given.values()
        before = transferred(each.sock)
        assert before is not None
        with monkeypatch.context() as patched:  # from now on, the child does no more
            if moment == "answered":
                patched.setattr(TakenConnection, "finish", lambda *_: None)
            else:
                patched.setattr(HTTPConnection, "data_received", lambda *_: None)
            if moment == "read":
                patched.setattr(TakenConnection, "note_received", lambda *_, **__: None)
            await client.send(request("/first"))
            if moment == "answered":
                assert (await client.response()).body == b"child 0"
            else:
                await poll_for(lambda: (now := transferred(each.sock)) is not None and now.read > before.read)
            for connection in list(child.state.connections):
                child.state.idle_watch.unwatch(connection)
                connection.stream.pause_reading()
            proxy.port.drop(given, LOST)
            assert given not in proxy.port._all
        if moment == "answered":
            assert await body(client) == "proxy 0"
        else:
            assert (await client.response()).body == b"proxy 0"
        assert await body(client) == "proxy 0"


@on_each_transport
async def test_a_request_that_had_begun_at_a_lost_process_says_so_once() -> None:
    async with proxy_of(named("proxy")) as proxy:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        moved = MovedConnection(ours, request("/") + b"GET /2 HTTP/1.1\r\n", LOST)
        proxy.server.serve(moved)
        reader, writer = await asyncio.open_connection(sock=theirs)
        client = Client(reader, writer)
        await client.send(b"Host: x\r\n\r\n")
        assert [(await client.response()).body for _ in range(2)] == [b"proxy 0 lost", b"proxy 0"]
        writer.close()


class Buffering(MemoryTransport):
    """Keeps what is written, as asyncio's transports keep up to 64 KiB without pausing the writer."""

    unsent_bytes = 0

    def write(self, data: Any) -> None:
        self.received += data
        self.unsent_bytes += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes


async def test_a_connection_cannot_move_before_its_response_is_sent() -> None:
    async with serving_in_memory(named("child")) as server:
        table = ConnectionTable(1)
        ours, theirs = socket.socketpair()
        taken = TakenConnection(map_table(table.fileno()), 0, ours, lambda message: None)
        client = Buffering(HTTPConnection(server.state, lambda: None, MovedConnection(ours), taken))
        client.send(request("/"))
        await poll_for(lambda: b"child 0" in client.received and not server.state.tasks)
        assert table.state(0) == ConnectionState.ANSWERED
        client.send(b"GET / HT")
        assert table.state(0) == ConnectionState.ANSWERED
        client.unsent_bytes = 0
        client.send(b"TP")
        assert table.read(0) == (ConnectionState.IDLE, b"GET / HTTP")
        client.close()
        for each in (ours, theirs, table):
            each.close()


async def test_a_drain_waits_until_the_last_response_is_sent() -> None:
    async with serving_in_memory(named("server")) as server:
        client = Buffering(HTTPConnection(server.state, lambda: None))
        client.send(request("/"))
        await poll_for(lambda: b"server 0" in client.received and not server.state.tasks)
        draining = asyncio.create_task(server.drain(60))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(draining), 0.3)
        client.unsent_bytes = 0
        await asyncio.wait_for(draining, 10)
        client.close()
