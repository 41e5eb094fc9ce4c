"""What a transport promises a WebSocket: the same as Tornado's stream."""

from __future__ import annotations

import asyncio
import socket

import pytest
from http_harness import run
from tornado.iostream import StreamClosedError

from daskserve.proxies.exchange.stream import TransportStream

SERVER = "uvicorn"
pytestmark = pytest.mark.usefixtures("carrier")


async def make_stream() -> tuple[TransportStream, socket.socket]:
    """Return a stream that a WebSocket reads, and its client's end."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, ours)
    stream = TransportStream(transport, set())
    stream.take_over()
    return stream, theirs


def test_there_is_room_when_all_was_sent() -> None:
    async def test() -> None:
        stream, client = await make_stream()
        loop = asyncio.get_running_loop()
        with client:
            room = stream.write(bytes(50_000))
            await asyncio.sleep(0.01)
            assert not room.done()
            assert 0 < stream.sent_bytes < 50_000
            received = 0
            while received < 50_000:
                received += len(await loop.sock_recv(client, 50_000))
            await room
            assert not stream.writing()
            assert stream.sent_bytes == 50_000
            stream.close()
            assert await loop.sock_recv(client, 1) == b""

    run(test)


def test_data_written_just_before_the_close_is_sent_as_far_as_it_fits() -> None:
    async def test() -> None:
        stream, client = await make_stream()
        with client:
            stream.write(b"goodbye")
            stream.close()
            assert await asyncio.get_running_loop().sock_recv(client, 100) == b"goodbye"
            with pytest.raises(StreamClosedError):
                stream.write(b"more")

    run(test)


def test_received_data_can_be_read_after_the_client_disconnected() -> None:
    async def test() -> None:
        stream, client = await make_stream()
        ended = asyncio.Event()
        stream.set_close_callback(ended.set)
        client.send(b"0123456789")
        client.close()
        await ended.wait()
        assert await stream.read_bytes(4, partial=True) == b"0123"
        assert await stream.read_bytes(100, partial=True) == b"456789"
        with pytest.raises(StreamClosedError):
            await stream.read_bytes(1, partial=True)

    run(test)


def test_a_waiting_reader_is_notified_of_the_end() -> None:
    async def test() -> None:
        stream, client = await make_stream()
        reading = stream.read_bytes(4, partial=True)
        client.close()
        with pytest.raises(StreamClosedError):
            await reading

    run(test)
