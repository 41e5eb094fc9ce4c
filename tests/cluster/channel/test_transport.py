"""Frames over a pair of sockets."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import socket
import struct
import termios
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from daskserve.cluster.channel.wire import readiness, transport
from daskserve.cluster.channel.wire.frames import LARGE_BYTES, OutOfBand
from daskserve.cluster.channel.wire.transport import (
    BUFFER_BYTES,
    CALL_WORK,
    FRAME_WORK,
    HEAD,
    MAGIC,
    MAX_WORK,
    PIECE_BYTES,
    SIZE,
    TURN_BYTES,
    SocketTransport,
)
from daskserve.loops.event_loop import new_event_loop

DEADLINE_S = 10.0


class End:
    """One end: its transport, the received frames and the refused ones."""

    def __init__(self, sock: socket.socket) -> None:
        self.transport = SocketTransport(sock, "there")
        self.frames: list[Any] = []
        self.sizes: list[int] = []
        self.refused: list[Any] = []
        self.changed = asyncio.Event()
        self.failure: BaseException | None = None
        self.running = asyncio.create_task(self.transport.run(self.receive, self.refuse))

    def receive(self, frames: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.sizes.append(len(frames))
        self.frames += frames
        self.changed.set()

    def refuse(self, frame: Any, error: Exception) -> None:
        self.refused.append((frame, str(error)))

    async def until(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.frames) < count:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[End, End]]:
    """Yield two connected ends; check at the end that aborting one ends both."""
    here, there = map(End, socket.socketpair())
    try:
        yield here, there
    finally:
        here.transport.abort()
        here.transport.abort()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(here.running, there.running)


@pytest.fixture(params=["uvloop", "asyncio"], autouse=True)
def loop_factory(request: pytest.FixtureRequest) -> Any:
    return new_event_loop if request.param == "uvloop" else None


async def test_frames_round_trip() -> None:
    async with pair() as (here, there):
        frames = [
            (1, 2, {"type": "http", "headers": ((b"a", b"b"),), 3: None}),
            ("text", b"bytes", 1.5, -(2**40), True, [1, (2, 3)]),
        ]
        for frame in frames:
            here.transport.post(frame)
        await there.until(2)
        assert there.frames == [frames[0], ("text", b"bytes", 1.5, -(2**40), True, (1, (2, 3)))]
        assert there.sizes == [2], "frames of one loop iteration are sent together"
        there.transport.post("answer")
        await here.until(1)
        assert here.frames == ["answer"]


@pytest.mark.parametrize("work", [CALL_WORK, FRAME_WORK])
async def test_many_frames_of_one_iteration_leave_in_groups(work: int) -> None:
    async with pair() as (here, there):
        here.transport.post("first")
        await there.until(1)
        group = MAX_WORK // work
        turn = here.transport.turn
        for number in range(2 * group + 1):
            here.transport.post(number, work)
        assert here.transport.turn == turn + 2, "sent frames must not be changed"
        await there.until(2 * group + 2)
        assert there.frames == ["first", *range(2 * group + 1)]
        assert there.sizes == [1, group, group, 1]


async def test_bytes_stay_bytes_and_buffers_are_writable() -> None:
    for size in [0, 5, LARGE_BYTES - 1, LARGE_BYTES, PIECE_BYTES + 1, 3 * TURN_BYTES]:
        async with pair() as (here, there):
            data = bytes(range(256)) * (size // 256 + 1)
            data = data[:size]
            here.transport.post((OutOfBand(data), OutOfBand(memoryview(bytearray(data))), data))
            await there.until(1)
            ((first, second, third),) = there.frames
            assert bytes(first) == bytes(second) == third == data, size
            assert type(third) is bytes, size
            assert not isinstance(second, bytes), size
            if size:
                second[0] = 77
                assert second[0] == 77, size
            if size >= LARGE_BYTES:
                assert type(first) is bytes, size


async def test_a_frame_that_cannot_be_packed_fails_no_other_frame() -> None:
    async with pair() as (here, there):
        here.transport.post("before")
        here.transport.post(("bad", object()))
        here.transport.post(("too large", 2**70))
        here.transport.post("after")
        await there.until(2)
        assert there.frames == ["before", "after"]
        assert [frame[0] for frame, _ in here.refused] == ["bad", "too large"]
        assert "object" in here.refused[0][1]


async def test_a_message_above_the_maximum_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_MESSAGE_BYTES", 2 * TURN_BYTES)
    async with pair() as (here, there):
        half, whole = OutOfBand(bytes(TURN_BYTES)), OutOfBand(bytes(2 * TURN_BYTES))
        for frame in (("one", half), ("two", half), ("large", whole), "after"):
            here.transport.post(frame)
        await there.until(3)
        assert [frame[0] for frame in there.frames[:2]] == ["one", "two"]
        assert there.frames[2] == "after"
        ((refused, reason),) = here.refused
        assert (refused, reason) == (
            ("large", whole),
            "it exceeds 2 MiB; send it in parts, or send only its location",
        )


async def test_bytes_of_another_protocol_end_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    for garbage in [
        b"GET / HTTP/1.1\r\n\r\n",
        HEAD.pack(MAGIC, 1) + SIZE.pack(1) + b"\xc1",  # a byte that msgpack never uses
        HEAD.pack(MAGIC, 1) + SIZE.pack(2**62),  # more than there is memory
        HEAD.pack(MAGIC, 1) + SIZE.pack(2**64 - 1),
    ]:
        ours, theirs = socket.socketpair()
        with theirs:
            end = End(ours)
            theirs.setblocking(False)
            theirs.sendall(garbage)
            async with asyncio.timeout(DEADLINE_S):
                await end.running
                assert await asyncio.get_running_loop().sock_recv(theirs, 100) == b"", garbage
                assert end.transport.traffic.invalid == 1, garbage
        assert "invalid frame" in caplog.text, garbage


@pytest.mark.parametrize("failure", [ValueError("bad frame"), asyncio.CancelledError()])
async def test_an_error_in_the_receiver_ends_the_connection(failure: BaseException) -> None:
    async with pair() as (here, there):
        there.failure = failure
        here.transport.post("frame")
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(here.running, there.running)


async def test_a_slow_reader_blocks_the_writer_and_gets_everything() -> None:
    ours, theirs = socket.socketpair()
    end = End(ours)
    with theirs:
        theirs.setblocking(False)
        frame = OutOfBand(bytes(32 * TURN_BYTES))
        end.transport.post(frame)
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(1000):
                await asyncio.sleep(0)
            assert end.transport._is_full
            loop, received = asyncio.get_running_loop(), 0
            while received < 32 * TURN_BYTES:
                received += len(await loop.sock_recv(theirs, 1 << 20))
        end.transport.abort()
        await end.running


async def test_a_transport_aborted_before_it_ran_ends_at_once() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        transport = SocketTransport(ours, "there")
        transport.abort()
        async with asyncio.timeout(DEADLINE_S):
            await transport.run(lambda frames: None, lambda frame, error: None)
        assert theirs.recv(1) == b""


async def test_a_truncated_message_is_not_delivered() -> None:
    ours, theirs = socket.socketpair()
    end = End(ours)
    with theirs:
        theirs.sendall(HEAD.pack(MAGIC, 2) + SIZE.pack(3) + SIZE.pack(LARGE_BYTES) + b"abc" + b"half")
    async with asyncio.timeout(DEADLINE_S):
        await end.running
    assert end.frames == []


async def test_a_full_group_leaves_at_once() -> None:
    ours, theirs = socket.socketpair()
    end = End(ours)
    with theirs:
        theirs.setblocking(False)
        await asyncio.sleep(0)  # it runs now
        for number in range(MAX_WORK):
            end.transport.post(number, CALL_WORK)
        assert theirs.recv(1 << 16), "this loop iteration is not over"
        end.transport.post("half a group", CALL_WORK)
        with pytest.raises(BlockingIOError):
            theirs.recv(1 << 16)
        end.transport.flush()
        assert theirs.recv(1 << 16)
        end.transport.abort()
        await end.running


@pytest.mark.parametrize("is_waiting_for_room", [False, True])
async def test_a_connection_that_breaks_during_a_write_ends(is_waiting_for_room: bool) -> None:
    ours, theirs = socket.socketpair()
    end = End(ours)
    await asyncio.sleep(0)
    if is_waiting_for_room:
        end.transport.post(OutOfBand(bytes(8 * TURN_BYTES)))
        end.transport.flush()
        await asyncio.sleep(0)
    theirs.close()
    end.transport.post("frame")
    end.transport.flush()
    async with asyncio.timeout(DEADLINE_S):
        await end.running
    end.transport.post("after its end")
    end.transport.flush()
    assert end.transport.unsent == ["after its end"]


async def test_a_reset_ends_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    end = End(ours)
    await asyncio.sleep(0)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    async with asyncio.timeout(DEADLINE_S):
        await end.running
    assert end.frames == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at file descriptors by /proc")
async def test_all_file_descriptors_are_closed() -> None:
    def epolls() -> int:
        links = []
        for each in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                links.append(os.readlink(each))
        return links.count("anon_inode:[eventpoll]")

    before = epolls()
    sockets = []
    for _ in range(5):
        async with pair() as (here, there):
            sockets += [here.transport.sock, there.transport.sock]
            here.transport.post(OutOfBand(bytes(8 * TURN_BYTES)))
            here.transport.flush()
            await asyncio.sleep(0)
            assert epolls() >= before + 2
    assert [each.fileno() for each in sockets] == [-1] * 10
    async with asyncio.timeout(DEADLINE_S):
        while epolls() > before:  # noqa: ASYNC110 - other tests' threads may be ending yet
            await asyncio.sleep(0)


class EndlessSink:
    """A socket that accepts all bytes at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.taken_bytes: list[int] = [0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send(self, data: Any) -> int:
        self.taken_bytes[-1] += len(data)
        return len(data)


async def test_a_socket_that_accepts_everything_does_not_block_the_loop() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        end = End(ours)
        await asyncio.sleep(0)
        end.transport.sock = taking = EndlessSink(ours)  # type: ignore[assignment]
        end.transport.post(OutOfBand(bytes(8 * TURN_BYTES)))
        end.transport.flush()
        async with asyncio.timeout(DEADLINE_S):
            while sum(taking.taken_bytes) < 8 * TURN_BYTES:
                taking.taken_bytes.append(0)
                await asyncio.sleep(0)
        assert max(taking.taken_bytes) <= TURN_BYTES + PIECE_BYTES
        end.transport.abort()
        await end.running


async def test_without_epoll_the_loop_waits_for_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "sys", SimpleNamespace(platform="another"))
    async with pair() as (here, there):
        data = bytes(8 * TURN_BYTES)
        here.transport.post(OutOfBand(data))
        there.transport.post("frame")
        await there.until(1)
        await here.until(1)
        assert (there.frames, here.frames) == ([data], ["frame"])


@pytest.mark.parametrize("family", ["unix", "tcp"])
async def test_bytes_sent_before_the_end_are_read_after_sending_fails(family: str) -> None:
    def connect() -> tuple[socket.socket, socket.socket]:
        if family == "unix":
            return socket.socketpair()
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            there = socket.create_connection(server.getsockname())
            return server.accept()[0], there

    here, there = connect()
    there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    bodies = [msgpack.packb([(number, bytes(20_000))]) for number in range(16)]
    data = b"".join(HEAD.pack(MAGIC, 1) + SIZE.pack(len(body)) + body for body in bodies)
    end = End(here)

    def answer(frames: Any) -> None:
        end.receive(frames)
        end.transport.post("answer")
        end.transport.flush()

    await asyncio.sleep(0)
    end.transport._receive = answer
    with there:
        there.setblocking(False)
        there.send(data)
        # Fill this side's receive buffer, which holds more than one read.
        (arrived,) = struct.unpack("i", fcntl.ioctl(here, termios.FIONREAD, bytes(4)))
        assert arrived > BUFFER_BYTES
    async with asyncio.timeout(DEADLINE_S):
        await end.running
    assert [number for number, _ in end.frames] == list(range(arrived * len(bodies) // len(data)))


def test_a_loop_closed_under_a_channel_raises_no_warning(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = new_event_loop()

    async def begin() -> None:
        ours, theirs = socket.socketpair()
        kept.extend((End(ours), theirs))
        await asyncio.sleep(0)

    kept: list[Any] = []
    loop.run_until_complete(begin())
    loop.close()
    end, theirs = kept
    with theirs, warnings.catch_warnings():
        warnings.simplefilter("error")
        end.running._log_destroy_pending = False
        end.transport.abort()
        assert theirs.recv(1) == b""
        kept.clear()
        del end
        gc.collect()
    assert (caplog.records, capsys.readouterr().err) == ([], "")
