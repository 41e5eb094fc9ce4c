"""Segments within one process, which opens its own segments as another process would."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pickle
import resource
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from open_segments import open_segments

from daskserve.cluster.channel.wire import segments as module
from daskserve.cluster.channel.wire.segments import HAS_SEGMENTS, MemorySegment, Segments, mapping_under
from daskserve.common.types import SHARED_BYTES
from daskserve.payload.pickling import dump

np = pytest.importorskip("numpy")
pytestmark = [
    pytest.mark.skipif(not HAS_SEGMENTS, reason="this system has no anonymous files"),
    pytest.mark.usefixtures("closes_all_segments"),
]

SIZE = 64 * 1024
DEADLINE_S = 10.0


def filled(pool: Segments, data: bytes) -> MemorySegment:
    segment = pool.take(len(data))
    segment.write(memoryview(data), 0)
    return segment


def mapped(pool: Segments, segment: MemorySegment, at: int = 0, size_bytes: int = SIZE) -> memoryview:
    return pool.map(os.getpid(), segment.key, segment.descriptor, segment.inode, at, size_bytes)


@asynccontextmanager
async def pool() -> AsyncIterator[Segments]:
    pool = Segments()
    try:
        yield pool
    finally:
        pool.close()


writer = pytest.fixture(pool, name="writer")
reader = pytest.fixture(pool, name="reader")


async def test_a_segment_is_written_again_once_its_last_user_is_gone(
    writer: Segments, reader: Segments
) -> None:
    first = filled(writer, b"a" * SIZE)
    view = mapped(reader, first)
    array = np.frombuffer(view, np.uint8)[10:]
    writer.keep(first)
    del view
    other = filled(writer, b"b" * SIZE)
    assert other is not first
    assert array.tobytes() == b"a" * (SIZE - 10)
    del array
    assert filled(writer, b"c" * SIZE) is first
    assert bytes(mapped(reader, first)) == b"c" * SIZE


async def test_a_forked_process_keeps_what_it_inherits(writer: Segments, reader: Segments) -> None:
    segment = filled(writer, bytes(SIZE))
    view = mapped(reader, segment)
    until, end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs no other thread's code
        child = os.fork()
    if not child:
        os.close(end)
        os.read(until, 1)
        os._exit(0)
    os.close(until)
    del view
    assert segment.is_used()
    os.close(end)
    os.waitpid(child, 0)
    assert not segment.is_used()


async def test_a_segment_fits_buffers_of_half_its_size_to_its_size(
    writer: Segments, reader: Segments
) -> None:
    segment = filled(writer, bytes(SIZE))
    for size in (SIZE + 1, SIZE // 2 - 1):
        writer.keep(segment)
        assert writer.take(size) is not segment
        assert writer.take(SIZE // 2) is segment


async def test_a_view_is_read_only_and_starts_at_its_offset(writer: Segments, reader: Segments) -> None:
    data = bytes(range(256)) * (SIZE // 256)
    view = mapped(reader, filled(writer, data), at=5, size_bytes=100)
    assert bytes(view) == data[5:105]
    with pytest.raises(TypeError):
        view[0] = 1
    assert not np.frombuffer(view, np.uint8).flags.writeable


async def test_unused_segments_are_closed(
    monkeypatch: pytest.MonkeyPatch, writer: Segments, reader: Segments
) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.01)
    segment = filled(writer, bytes(SIZE))
    view = mapped(reader, segment)
    writer.keep(segment)
    del segment
    reader._close_unused()  # after the first period
    assert reader._mapped
    async with asyncio.timeout(DEADLINE_S):
        while writer._kept or reader._mapped:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
    assert bytes(view) == bytes(SIZE)  # its user keeps it
    del view
    assert open_segments() == 0


async def test_kept_segments_are_bounded(
    monkeypatch: pytest.MonkeyPatch, writer: Segments, reader: Segments
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 3 * SIZE)
    for each in [writer.take(SIZE) for _ in range(5)]:
        writer.keep(each)
    assert len(writer._kept) == 3
    for each in [writer.take(1) for _ in range(2 * module.MAX_KEPT)]:
        writer.keep(each)
    assert len(writer._kept) == module.MAX_KEPT


async def test_near_the_limit_of_open_files_a_buffer_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    async with pool() as writer, pool() as reader:
        segment = filled(writer, b"a" * SIZE)
        view = mapped(reader, segment)
        writer.keep(segment)
        assert filled(writer, b"b" * SIZE) is segment
        assert view.readonly
        assert bytes(view) == b"a" * SIZE


async def test_only_the_expected_segment_is_mapped(
    tmp_path: Path, writer: Segments, reader: Segments
) -> None:
    segment = filled(writer, bytes(SIZE))
    own = os.getpid()
    with pytest.raises(ConnectionResetError, match="closed a segment"):
        reader.map(own, 1, segment.descriptor, segment.inode + 1, 0, 1)
    with pytest.raises(ConnectionResetError, match="closed a segment"):
        reader.map(own, 1, 1_000_000, segment.inode, 0, 1)
    with pytest.raises(ValueError, match="smaller than"):
        reader.map(own, 1, segment.descriptor, segment.inode, SIZE, 1)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises((OSError, ValueError)):
            reader.map(own, 2, file, os.fstat(file).st_ino, 0, 1)
    finally:
        os.close(file)


async def test_the_mapping_under_arrays_and_views_is_found(writer: Segments, reader: Segments) -> None:
    segment = filled(writer, bytes(SIZE))
    array = np.frombuffer(mapped(reader, segment, at=8, size_bytes=SIZE - 8), np.uint8)
    square = array[:100].reshape(10, 10)

    def under(value: Any) -> tuple[int, int] | None:
        found = mapping_under(pickle.PickleBuffer(value).raw())
        return None if found is None else (found[0].inode, found[1])

    assert under(array) == (segment.inode, 8)
    assert under(array[100:]) == (segment.inode, 108)
    assert under(square[2:].T) == (segment.inode, 28)
    assert under(array.copy()) is None
    assert under(bytearray(SIZE)) is None


# ---- copies


def copied(pool: Segments, data: bytes) -> memoryview:
    found = pool.copy(memoryview(data))
    assert found is not None
    return found


async def test_a_copy_lies_in_a_segment_that_is_written_again_once_it_is_dropped(writer: Segments) -> None:
    writer.offer_copies()
    original = bytearray(b"a" * SIZE)
    copy = writer.copy(memoryview(original))
    assert copy is not None
    original[:] = b"b" * SIZE
    assert copy.readonly
    assert bytes(copy) == b"a" * SIZE
    assert writer.copy(copy[10:]).obj is copy.obj  # type: ignore[union-attr]
    first, at = mapping_under(copy) or (None, -1)
    assert (at, mapping_under(copied(writer, b"c" * SIZE)[:1])[0] is first) == (0, False)  # type: ignore[index]
    array = np.frombuffer(copy, np.uint8)
    del copy
    assert array[-1] == ord("a")
    del array
    segment = first.descriptor  # type: ignore[union-attr]
    assert segment in [mapping_under(copied(writer, b"d" * SIZE))[0].descriptor for _ in range(3)]  # type: ignore[index]


async def test_a_copy_is_not_overwritten_while_another_process_reads_it(
    writer: Segments, reader: Segments
) -> None:
    writer.offer_copies()
    copy = copied(writer, b"a" * SIZE)
    found = mapping_under(copy)
    assert found is not None
    memory = found[0]
    view = reader.map(os.getpid(), memory.key, memory.descriptor, memory.inode, 0, SIZE)
    del copy
    copied(writer, b"b" * SIZE)
    assert bytes(view) == b"a" * SIZE
    del view
    assert mapping_under(copied(writer, b"c" * SIZE)) is not None


async def test_threads_copy_at_the_same_time(writer: Segments) -> None:
    writer.offer_copies()

    def copy(fill: int) -> bool:
        kept = []
        for number in range(30):
            data = bytes([fill]) * (SIZE + number)
            kept.append((copied(writer, data), data))
            del kept[:-3]
            if any(bytes(view) != data for view, data in kept):
                return False
        return True

    assert all(await asyncio.gather(*[asyncio.to_thread(copy, fill) for fill in range(8)]))


async def test_dropped_copies_are_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch, writer: Segments
) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.01)
    writer.offer_copies()
    copies = [await asyncio.to_thread(copied, writer, bytes(SIZE)) for _ in range(3)]
    await asyncio.to_thread(copies.clear)
    async with asyncio.timeout(DEADLINE_S):
        while open_segments():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


async def test_there_is_no_copy_near_the_limit_of_open_files_or_without_memory(
    monkeypatch: pytest.MonkeyPatch, writer: Segments
) -> None:
    def refuse(*given: Any) -> Any:
        raise OSError(errno.ENOSPC, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(MemorySegment, "fill", refuse)
        assert writer.copy(memoryview(bytes(SIZE))) is None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    async with pool() as limited:
        assert limited.copy(memoryview(bytes(SIZE))) is None


async def test_a_forked_process_does_not_write_to_segments_of_its_parent(writer: Segments) -> None:
    writer.offer_copies()
    array = np.zeros(SHARED_BYTES, np.uint8)
    kept = dump(array)
    dump(array)  # its segment is free
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs no other thread's code
        child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            (made,) = dump(array).buffers
            os._exit(0 if mapping_under(made) is None else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mapping_under(kept.buffers[0]) is not None
