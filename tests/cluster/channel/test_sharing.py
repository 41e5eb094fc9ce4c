"""Large buffers between two transports that share memory."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from open_segments import open_segments

from daskserve.cluster.channel.wire import sharing
from daskserve.cluster.channel.wire.frames import MEMORY, OutOfBand
from daskserve.cluster.channel.wire.segments import (
    HAS_SEGMENTS,
    Mapping,
    MemorySegment,
    Segments,
    mapping_under,
)
from daskserve.cluster.channel.wire.transport import SocketTransport
from daskserve.common.types import SHARED_BYTES
from daskserve.loops.event_loop import new_event_loop
from daskserve.payload.pickling import dump

np = pytest.importorskip("numpy")

pytestmark = [
    pytest.mark.skipif(not HAS_SEGMENTS, reason="this system has no anonymous files"),
    pytest.mark.usefixtures("closes_all_segments"),
]

DEADLINE_S = 10.0


class SharingEnd:
    """One end: its transport, and the frames that it received, without the notes."""

    def __init__(self, sock: socket.socket, *, begins: bool, segments: Segments | None) -> None:
        self.transport = SocketTransport(sock, "there")
        self.segments = segments
        if segments is not None:
            self.transport.share(segments, begins=begins)
        self.frames: list[Any] = []
        self.refused: list[Any] = []
        self.changed = asyncio.Event()
        self.running = asyncio.create_task(self.transport.run(self.receive, self.refuse))

    def receive(self, frames: Any) -> None:
        for frame in frames:
            if type(frame) is tuple and frame[0] == MEMORY:
                self.transport.take_note(frame[2])
            else:
                self.frames.append(frame)
        self.changed.set()

    def refuse(self, frame: Any, error: Exception) -> None:
        self.refused.append(frame)

    async def take(self, count: int = 1) -> list[Any]:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.frames) < count:
                self.changed.clear()
                await self.changed.wait()
        frames, self.frames = self.frames, []
        return frames


@asynccontextmanager
async def sharing_pair(*, is_shared_there: bool = True) -> AsyncIterator[tuple[SharingEnd, SharingEnd]]:
    ours, theirs = socket.socketpair()
    here = SharingEnd(ours, begins=True, segments=Segments())
    there = SharingEnd(theirs, begins=False, segments=Segments() if is_shared_there else None)
    try:
        yield here, there
    finally:
        here.transport.abort()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(here.running, there.running)
        for each in (here, there):
            if each.segments is not None:
                each.segments.close()


@pytest.fixture(params=["uvloop", "asyncio"])
def loop_factory(request: pytest.FixtureRequest) -> Any:
    return new_event_loop if request.param == "uvloop" else None


def buffer(size_bytes: int, fill: int = 7) -> Any:
    return OutOfBand(memoryview(bytearray([fill]) * size_bytes))


@pytest.mark.parametrize("size", [SHARED_BYTES, 3 * sharing.STEP_BYTES + 1])
async def test_a_large_buffer_goes_through_memory_in_both_directions(loop_factory: Any, size: int) -> None:
    async with sharing_pair() as (here, there):
        there.transport.post("not before the other side")
        for sender, receiver in ((here, there), (there, here)):
            await receiver.take(0)
            sender.transport.post(("first", buffer(size), buffer(100)))
            sender.transport.post("second")
            found = await receiver.take(2)
            while found[0] == "not before the other side":
                found = found[1:] + await receiver.take(1)
            (_, large, small), second = found
            assert second == "second"
            assert (bytes(large), bytes(small)) == (b"\7" * size, b"\7" * 100)
            assert large.readonly
            assert mapping_under(large) is not None
            assert sender.transport.traffic.sent_bytes >= size
            assert receiver.transport.traffic.received_bytes >= size


async def test_bytes_stay_bytes_and_smaller_buffers_stay_writable() -> None:
    async with sharing_pair() as (here, there):
        here.transport.post((OutOfBand(b"x" * SHARED_BYTES), buffer(SHARED_BYTES - 1)))
        ((large, small),) = await there.take()
        assert large == b"x" * SHARED_BYTES
        assert not small.readonly


async def test_the_memory_is_written_again_once_the_reader_drops_it() -> None:
    async with sharing_pair() as (here, there):
        inodes = []
        held = []
        for number in range(6):
            here.transport.post(buffer(SHARED_BYTES, number))
            (large,) = await there.take()
            assert bytes(large) == bytes([number]) * SHARED_BYTES
            found = mapping_under(large)
            assert found is not None
            inodes.append(found[0].inode)
            if number == 2:
                held.append(large)
            del large, found
            # The answer also notes that the segment was opened.
            there.transport.post("answer")
            await here.take()
        assert len(set(inodes)) == 2, "one more, while the reader holds the first"
        assert bytes(held[0]) == b"\2" * SHARED_BYTES


async def test_a_received_buffer_is_sent_on_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    writes = []
    write = MemorySegment.write
    monkeypatch.setattr(
        MemorySegment, "write", lambda *given: (writes.append(len(given[1])), write(*given))[1]
    )
    async with sharing_pair() as (here, there):
        here.transport.post(buffer(SHARED_BYTES + 100))
        (large,) = await there.take()
        writes.clear()
        there.transport.post((OutOfBand(large), OutOfBand(large[50:-50])))
        ((whole, part),) = await here.take()
        assert writes == []
        assert bytes(whole) == b"\7" * (SHARED_BYTES + 100)
        assert bytes(part) == b"\7" * SHARED_BYTES


async def test_a_pickled_buffer_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    writes = []
    write, fill = MemorySegment.write, MemorySegment.fill
    monkeypatch.setattr(
        MemorySegment, "write", lambda *given: (writes.append(len(given[1])), write(*given))[1]
    )
    monkeypatch.setattr(MemorySegment, "fill", lambda *given: (writes.append(len(given[1])), fill(*given))[1])
    async with sharing_pair() as (here, there):
        here.transport.post("settled")
        await there.take()
        data = bytearray(b"\7" * SHARED_BYTES)
        for number in range(5):
            writes.clear()
            # From a bytearray that a NumPy array covers: pickle keeps that out of band.
            payload = dump(np.frombuffer(data, np.uint8))
            data[0] = number
            here.transport.post(OutOfBand(payload.buffers[0]))
            (large,) = await there.take()
            assert large[0] == (7 if number == 0 else number - 1)
            assert mapping_under(large) is not None
            del large, payload
            if number > 2:
                assert writes == [SHARED_BYTES]


async def test_an_end_that_shares_nothing_gets_buffers_over_the_connection() -> None:
    async with sharing_pair(is_shared_there=False) as (here, there):
        here.transport.post(buffer(SHARED_BYTES))
        (large,) = await there.take()
        assert mapping_under(large) is None
        there.transport.post(buffer(SHARED_BYTES))
        (large,) = await here.take()
        assert mapping_under(large) is None


@pytest.mark.parametrize("reason", ["another token", "no such process", "no memory files"])
async def test_another_machine_gets_buffers_over_the_connection(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    def refuse(*given: Any) -> Any:
        raise ConnectionResetError("no such process")

    if reason == "another token":
        monkeypatch.setattr(MemorySegment, "write", lambda *given: None)  # the file then holds zeros
    elif reason == "no such process":
        monkeypatch.setattr(Mapping, "open", refuse)
    else:
        monkeypatch.setattr(sharing, "HAS_SEGMENTS", False)
    async with sharing_pair() as (here, there):
        here.transport.post(buffer(SHARED_BYTES))
        (large,) = await there.take()
        assert (bytes(large), mapping_under(large)) == (b"\7" * SHARED_BYTES, None)
        assert not large.readonly


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE])
async def test_without_memory_or_files_buffers_go_over_the_connection(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*given: Any) -> Any:
        raise OSError(code, os.strerror(code))

    async with sharing_pair() as (here, there):
        here.transport.post("settled")
        await there.take()
        monkeypatch.setattr(
            *((MemorySegment, "write") if code == errno.ENOSPC else (Segments, "take")), refuse
        )
        here.transport.post((buffer(SHARED_BYTES), "one"))
        here.transport.post("two")
        (large, one), two = await there.take(2)
        assert (one, two) == ("one", "two")
        assert (bytes(large), mapping_under(large)) == (b"\7" * SHARED_BYTES, None)
        monkeypatch.undo()
        here.transport.post(buffer(SHARED_BYTES))
        (large,) = await there.take()
        assert mapping_under(large) is not None


async def test_a_frame_that_cannot_be_packed_fails_no_large_buffer() -> None:
    async with sharing_pair() as (here, there):
        here.transport.post(buffer(SHARED_BYTES))
        here.transport.post(("bad", buffer(SHARED_BYTES), object()))
        here.transport.post((buffer(SHARED_BYTES), "caf\udce9.csv", buffer(SHARED_BYTES, 8)))
        large, (first, name, second) = await there.take(2)
        assert bytes(large) == bytes(first) == b"\7" * SHARED_BYTES
        assert (name, bytes(second)) == ("caf\udce9.csv", b"\x08" * SHARED_BYTES)
        assert [frame[0] for frame in here.refused] == ["bad"]


async def test_the_loop_runs_between_the_steps_of_a_copy() -> None:
    steps = 20
    async with sharing_pair() as (here, there):
        here.transport.post("settled")
        await there.take()
        here.transport.post(buffer(steps * sharing.STEP_BYTES))
        turns = 0
        while not there.frames:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= steps


async def test_a_connection_that_ends_leaves_no_memory(loop_factory: Any) -> None:
    before = open_segments()
    async with sharing_pair() as (here, there):
        here.transport.post("settled")
        await there.take()
        here.transport.post(buffer(SHARED_BYTES))
        here.transport.post(buffer(10 * sharing.STEP_BYTES))
        here.transport.flush()
        assert open_segments() > before
    gc.collect()
    assert open_segments() == before


async def test_a_segment_that_its_sender_has_closed_ends_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with sharing_pair() as (here, there):
        here.transport.post("settled")
        await there.take()
        here.transport.post(buffer(SHARED_BYTES))
        here.transport.flush()
        # The message is written; its sender dies before the other end opens the segment.
        here.transport._sharing._lent.clear()
        async with asyncio.timeout(DEADLINE_S):
            await there.running
        assert there.frames == []
    assert "Lost there" in caplog.text
    assert "invalid frame" not in caplog.text
