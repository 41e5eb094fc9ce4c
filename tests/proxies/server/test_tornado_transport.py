"""A Tornado stream as a transport: its calls, counts, pauses and end."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import pytest
from http_harness import poll_for
from tornado.ioloop import IOLoop

from daskserve.proxies.server.tornado_stream import PlainStream
from daskserve.proxies.server.tornado_transport import TornadoTransport


class Recorder(asyncio.Protocol):
    """A protocol that records the transport's calls; its client ends its data first, or never."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.stays_open = False

    def data_received(self, data: bytes) -> None:
        self.calls.append(data)

    def eof_received(self) -> bool:
        self.calls.append("eof")
        return self.stays_open

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.calls.append("lost")


Peers: TypeAlias = tuple[TornadoTransport, Recorder, socket.socket]


@pytest.fixture
def peers() -> AbstractAsyncContextManager[Peers]:
    """Return a transport with its protocol, and the socket of its client."""

    @asynccontextmanager
    async def connected() -> AsyncIterator[Peers]:
        listening = socket.create_server(("127.0.0.1", 0))
        with listening, socket.create_connection(listening.getsockname()) as client:
            client.setblocking(False)
            protocol = Recorder()
            transport = TornadoTransport(PlainStream(listening.accept()[0]), protocol)
            yield transport, protocol, client
            transport.abort()
            await poll_for(lambda: protocol.calls[-1:] == ["lost"])
        assert protocol.calls.count("lost") == 1

    return connected()


async def test_a_client_that_resets_at_once_is_lost() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    with listening:
        client = socket.create_connection(listening.getsockname())
        accepted = listening.accept()[0]
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        protocol = Recorder()
        transport = TornadoTransport(PlainStream(accepted), protocol)
        assert transport.is_closing()
        await poll_for(lambda: protocol.calls == ["lost"])


async def receive(client: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(client, 1 << 20)


async def test_nothing_is_passed_on_while_reading_is_paused(peers: Peers) -> None:
    transport, protocol, client = peers
    client.sendall(b"one")
    await poll_for(lambda: protocol.calls == [b"one"])
    transport.pause_reading()
    client.sendall(b"two")
    for _ in range(20):
        await asyncio.sleep(0)
    assert protocol.calls == [b"one"]
    transport.resume_reading()
    assert protocol.calls == [b"one"]  # not within the call
    await poll_for(lambda: protocol.calls == [b"one", b"two"])


async def test_data_received_while_reading_is_paused_can_be_taken(peers: Peers) -> None:
    transport, _, client = peers
    transport.pause_reading()
    client.sendall(b"unread")
    for _ in range(20):
        await asyncio.sleep(0)
    assert transport.take_unread() == b"unread"


async def test_the_protocol_pauses_until_all_is_sent(peers: Peers) -> None:
    transport, protocol, client = peers
    transport.write(b"small")
    assert protocol.calls == []
    transport.write(bytes(10_000_000))
    assert protocol.calls == ["pause"]
    transport.write(b"more")
    assert protocol.calls == ["pause"]
    assert 0 < transport.get_write_buffer_size() < 10_000_000
    left = 10_000_009
    while left:
        assert protocol.calls == ["pause"] or not transport.get_write_buffer_size()
        left -= len(await receive(client))
    await poll_for(lambda: protocol.calls == ["pause", "resume"])
    assert transport.get_write_buffer_size() == 0


@pytest.mark.parametrize("ends", [TornadoTransport.close, TornadoTransport.write_eof])
async def test_written_data_is_sent_before_the_end(
    peers: Peers, ends: Callable[[TornadoTransport], None]
) -> None:
    transport, _, client = peers
    transport.write(bytes(10_000_000))
    ends(transport)
    received = 0
    while data := await receive(client):
        received += len(data)
    assert received == 10_000_000
    assert transport.is_closing() == (ends is TornadoTransport.close)


@pytest.mark.parametrize("stays_open", [False, True])
async def test_the_protocol_decides_whether_the_end_of_data_closes(peers: Peers, stays_open: bool) -> None:
    transport, protocol, client = peers
    protocol.stays_open = stays_open
    client.sendall(b"last")
    client.shutdown(socket.SHUT_WR)
    await poll_for(lambda: "eof" in protocol.calls)
    for _ in range(20):
        await asyncio.sleep(0)
    if stays_open:
        assert protocol.calls == [b"last", "eof"]
        transport.write(b"answer")
        assert await receive(client) == b"answer"
    else:
        assert protocol.calls == [b"last", "eof", "lost"]


async def test_small_writes_are_not_delayed(peers: Peers) -> None:
    transport, *_ = peers
    sock = transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_reading_and_writing_leave_the_event_loops_list_of_sockets_alone(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[Any] = []

    transport, protocol, client = peers
    loop: Any = IOLoop.current()
    original = loop.update_handler

    def update(fd: int, events: int) -> None:
        changes.append(events)
        original(fd, events)

    monkeypatch.setattr(loop, "update_handler", update)
    for number in range(5):
        client.sendall(b"ask")
        await poll_for(lambda count=number + 1: protocol.calls == [b"ask"] * count)
        transport.write(b"answer")
        assert await receive(client) == b"answer"
    assert changes == []
