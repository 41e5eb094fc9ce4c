"""A transport gives a WebSocket the same guarantees as Tornado's stream."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading

import pytest
from http_harness import poll_for

from daskserve.proxies.exchange import stream as stream_module
from daskserve.proxies.exchange.stream import Stream, open_stream


async def make_stream() -> tuple[Stream, socket.socket]:
    """Return a stream as a WebSocket reads it, and its client's socket."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, ours)
    stream = Stream(transport, set())
    stream.take_over()
    return stream, theirs


async def test_there_is_room_when_all_was_sent() -> None:
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


async def test_data_written_just_before_the_close_is_sent_as_far_as_it_fits() -> None:
    stream, client = await make_stream()
    with client:
        stream.write(b"goodbye")
        stream.close()
        assert await asyncio.get_running_loop().sock_recv(client, 100) == b"goodbye"
        with pytest.raises(ConnectionResetError):
            stream.write(b"more")


async def test_data_received_before_the_reader_starts_is_read_first() -> None:
    stream, client = await make_stream()
    received: list[bytes] = []
    with client:
        client.send(b"0123")
        await poll_for(lambda: stream._unread)
        stream.start_reading(received.append)
        client.send(b"4567")
        await poll_for(lambda: len(received) == 2)
        stream.pause_reading()
        client.send(b"89")
        await asyncio.sleep(0.01)
        assert received == [b"0123", b"4567"]
        stream.resume_reading()
        await poll_for(lambda: len(received) == 3)
        stream.close()


async def test_a_connection_stays_if_there_is_no_other_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(stream_module, "duplicate", fail)

    stream, client = await make_stream()
    other = asyncio.new_event_loop()
    with client:
        assert stream.leave_for(other) is None
        assert not stream.closed()
        stream.close()
    other.close()


async def test_a_connection_leaves_for_another_stream_with_what_was_received() -> None:
    stream, client = await make_stream()
    with client:
        client.send(b"early")
        await poll_for(lambda: stream._unread)
        assert stream.leave_for(asyncio.get_running_loop()) is None  # it is there
        other = asyncio.new_event_loop()
        left = stream.leave_for(other)
        other.close()
        assert left is not None
        sock, unread = left
        assert (unread, stream.closed()) == (b"early", True)
        await asyncio.sleep(0.01)  # the old descriptor is closed
        moved = await open_stream(sock)
        moved.write(b"hello")
        assert await asyncio.get_running_loop().sock_recv(client, 100) == b"hello"
        moved.close()


async def test_another_thread_can_end_a_connection() -> None:
    stream, client = await make_stream()
    with client:
        ended = asyncio.Event()
        stream.set_close_callback(ended.set)
        thread = threading.Thread(target=stream.cut, args=(b"goodbye",))
        thread.start()
        thread.join()
        loop = asyncio.get_running_loop()
        assert await loop.sock_recv(client, 100) == b"goodbye"
        assert await loop.sock_recv(client, 100) == b""
        await ended.wait()
        stream.cut(b"once more")
