"""Segments: memory that one process writes and other processes of the machine map read-only (Linux).

Problem: 100 MiB that cross a socket are copied four times, and the kernel spends most of that time clearing
fresh pages. Shared memory with a name stays behind when processes are killed. Choice: anonymous files
(``memfd_create``), which others open through ``/proc/PID/fd`` and which the kernel frees with their last
user. The writer keeps a segment for a moment to reuse it, and the reader keeps its mapping. Reuse takes a
fifth of the time.

A segment can be written again once its content is no longer in use. For each received buffer, a reader
opens the segment once more and locks that file, shared, until the buffer's last user drops it. The kernel
drops the lock of a process that ends in any way, and a forked process holds it as well. To learn whether a
segment is in use, the writer tries to get an exclusive lock. A process that
reads its own segment, because it has copied a buffer there, locks it in the same way.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import mmap
import os
import resource
import secrets
import stat
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

from daskserve.internals.python import address_of
from daskserve.loops.at_fork import call_in_forks
from daskserve.payload import copies

#: A segment that is not used again within one to two periods is closed.
PERIOD_S = 0.5
#: Limits of the segments that are kept for reuse.
MAX_KEPT = 16
MAX_KEPT_BYTES = 512 * 1024 * 1024

#: Whether this system has segments.
HAS_SEGMENTS = sys.platform == "linux" and hasattr(os, "memfd_create")


class SegmentMemory(mmap.mmap):
    """The mapped memory of a segment, and where other processes find it."""

    key: int
    descriptor: int
    inode: int


class MemorySegment:
    """Memory that this process writes. It is closed with its last reference.

    Raises
    ------
    OSError
        There are too many open files.
    """

    def __init__(self, size_bytes: int, key: int) -> None:
        #: Identifies the segment uniquely; the kernel may reuse its inode number for a later segment.
        self.key = key
        self.size_bytes = size_bytes
        #: Whether it was kept for a whole period without being used.
        self.is_stale = False
        self._memory: SegmentMemory | None = None
        self.descriptor = os.memfd_create("daskserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, size_bytes)
        # Readers rely on the size: if a mapped file shrinks, reading the mapping crashes the process.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        self.inode = os.fstat(self.descriptor).st_ino

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def write(self, data: memoryview, at: int) -> None:
        """Write bytes at an offset.

        Raises
        ------
        OSError
            There is no memory left.
        """
        if self._memory is not None:
            self._memory[at : at + len(data)] = data
            return
        while data:
            # A mapping would take twice the time for fresh pages, and crash without memory.
            written_bytes = os.pwrite(self.descriptor, data, at)
            data, at = data[written_bytes:], at + written_bytes

    def is_used(self) -> bool:
        """Return whether a process that was sent the segment still uses its content."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        return False

    def fill(self, data: memoryview) -> None:
        """Write bytes at the start, without the interpreter lock.

        Raises
        ------
        OSError
            There is no memory left.
        """
        if self._memory is None:
            self.write(data, 0)
        else:
            ctypes.memmove(address_of(self._memory), address_of(data), data.nbytes)

    def reuse(self) -> None:
        """Prepare to write again: the pages exist, so a mapping is the fastest path to them."""
        self.is_stale = False
        self.mapped()

    def mapped(self) -> SegmentMemory:
        """Return the memory as a mapping."""
        if self._memory is None:
            memory = SegmentMemory(self.descriptor, self.size_bytes)
            memory.key, memory.descriptor, memory.inode = self.key, self.descriptor, self.inode
            self._memory = memory
        return self._memory


class Mapping(SegmentMemory):
    """A segment of another process, mapped read-only. It is closed with its last reference."""

    is_stale: bool

    @classmethod
    def open(cls, process: int, key: int, descriptor: int, inode: int) -> Mapping:
        """Map a segment that a process has open.

        Raises
        ------
        ConnectionResetError
            The process has ended, or has closed the segment.
        ValueError
            The file is not a segment.
        OSError
            It cannot be opened or mapped.
        """
        closed = f"process {process} has ended, or has closed a segment that it sent"
        # Non-blocking, because by now the descriptor number may belong to a pipe.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        try:
            own = os.open(f"/proc/{process}/fd/{descriptor}", flags)
        except FileNotFoundError:
            raise ConnectionResetError(closed) from None
        try:
            found = os.fstat(own)
            if not stat.S_ISREG(found.st_mode) or found.st_ino != inode or found.st_uid != os.geteuid():
                raise ConnectionResetError(closed)
            if not fcntl.fcntl(own, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError(f"file {descriptor} of process {process} may shrink")
            mapping = cls(own, found.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except BaseException:
            os.close(own)
            raise
        mapping.descriptor, mapping.key, mapping.inode, mapping.is_stale = own, key, inode, False
        return mapping

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def view(self, at: int, size_bytes: int, lock: int) -> memoryview:
        """Return a part of the mapping; the lock is closed when the last user drops the part."""
        part = _part(self, at, size_bytes)
        weakref.finalize(part, os.close, lock).atexit = False
        return memoryview(part).cast("B").toreadonly()


def lock(descriptor: int) -> int:
    """Return a file descriptor that keeps the content of an open segment until it is closed."""
    found = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        os.close(found)
        raise
    return found


def _part(memory: SegmentMemory, at: int, size_bytes: int) -> Any:
    # Python before 3.12 has no other object that exports memory and can be watched.
    part = (ctypes.c_ubyte * size_bytes).from_address(address_of(memory) + at)
    vars(part)["mapping"] = memory
    return part


def mapping_under(view: memoryview) -> tuple[SegmentMemory, int] | None:
    """Return the segment that holds the memory of a contiguous view, and the offset of the view in it."""
    for each in copies.holders(view):
        memory = vars(each).get("mapping") if isinstance(each, ctypes.Array) else each
        if isinstance(memory, SegmentMemory):
            at = address_of(view) - address_of(memory)
            return (memory, at) if 0 <= at <= len(memory) - view.nbytes else None
    return None


class Segments:
    """The segments of one process: its own, which it keeps to write them again, and those that it maps.

    Use it on one event loop; only `copy` may be called in any thread.
    """

    def __init__(self) -> None:
        #: Segments that no message of this process refers to; other processes may still read them.
        self._kept: list[MemorySegment] = []
        #: Guards the list above.
        self._lock = threading.Lock()
        #: Segments of dropped copies, which belong to the list. Without a lock, because a copy may be dropped
        #: at any moment, in any thread.
        self._dropped: deque[MemorySegment] = deque()
        #: The loop that closes unused segments; None as long as there are no copies.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_woken = False
        #: The mapped segments of other processes, by key, kept because their writers are likely to send them
        #: again.
        self._mapped: dict[int, Mapping] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: New descriptors get the lowest free number, so a number above this limit means that few are left.
        self._max_descriptor = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2

    def take(self, size_bytes: int) -> MemorySegment:
        """Return a free segment of at least this size, and at most twice this size.

        Raises
        ------
        OSError
            There are too many open files.
        """
        with self._lock:
            self._keep_dropped()
            for each in self._kept:
                if size_bytes <= each.size_bytes <= 2 * size_bytes and not each.is_used():
                    self._kept.remove(each)
                    each.reuse()
                    return each
        return MemorySegment(size_bytes, secrets.randbits(63))

    def keep(self, segment: MemorySegment) -> None:
        """Keep a segment for a while for reuse; every reader has opened it."""
        self._dropped.append(segment)
        with self._lock:
            self._keep_dropped()
        self._close_later()

    def offer_copies(self) -> None:
        """Copy the large buffers of this process's calls into segments, until `close`."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            copies.offer(self.copy)
            call_in_forks(self._end_copies)

    def copy(self, data: memoryview) -> memoryview | None:
        """Return a read-only copy of a buffer in a segment, or the buffer itself if it lies in one.

        None if there is no memory, or if this process is about to run out of file descriptors.
        """
        if mapping_under(data) is not None:
            return data
        try:
            segment = self.take(data.nbytes)
            held = lock(segment.descriptor)
        except OSError:
            return None
        try:
            if held > self._max_descriptor:
                raise OSError(f"descriptor {held} is close to the limit of open files")
            segment.fill(data)
            part = _part(segment.mapped(), 0, data.nbytes)
        except OSError:
            os.close(held)
            return None
        weakref.finalize(part, self._drop_copy, segment, held).atexit = False
        return memoryview(part).cast("B").toreadonly()

    def map(
        self, process: int, key: int, descriptor: int, inode: int, at: int, size_bytes: int
    ) -> memoryview:
        """Return a part of another process's segment; see `Mapping.open`.

        The part is copied if this process is about to run out of file descriptors.
        """
        mapping = self._mapped.get(key)
        if mapping is None:
            mapping = Mapping.open(process, key, descriptor, inode)
            self._mapped[key] = mapping
            self._close_later()
        if at + size_bytes > len(mapping):
            raise ValueError(f"a segment of process {process} is smaller than {at + size_bytes} bytes")
        mapping.is_stale = False
        held = lock(mapping.descriptor)
        if held > self._max_descriptor:
            self._mapped.pop(key)
            os.close(held)
            return memoryview(mapping[at : at + size_bytes])
        return mapping.view(at, size_bytes, held)

    def close(self) -> None:
        """Close the kept segments; a segment in use is closed by its last user."""
        self._end_copies()
        with self._lock:
            self._kept.clear()
            self._dropped.clear()
        self._mapped.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_copies(self) -> None:
        # In a forked process, too: it must not write to segments of its parent.
        copies.withdraw(self.copy)
        self._loop = None

    def _drop_copy(self, segment: MemorySegment, held: int) -> None:
        os.close(held)
        loop = self._loop
        if loop is None:
            return
        self._dropped.append(segment)
        if self._timer is None and not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._close_later)

    def _keep_dropped(self) -> None:
        kept = self._kept
        while self._dropped:
            kept.append(self._dropped.popleft())
        while len(kept) > MAX_KEPT or sum(each.size_bytes for each in kept) > MAX_KEPT_BYTES:
            kept.pop(0)

    def _close_later(self) -> None:
        self._is_woken = False
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._close_unused)

    def _close_unused(self) -> None:
        self._timer = None
        with self._lock:
            self._keep_dropped()
            self._kept = [each for each in self._kept if not each.is_stale]
            for segment in self._kept:
                segment.is_stale = True
        self._mapped = {key: each for key, each in self._mapped.items() if not each.is_stale}
        for mapping in self._mapped.values():
            mapping.is_stale = True
        if self._kept or self._mapped:
            self._close_later()
