"""Segments: memory that one process writes and other processes of the machine map read-only (Linux).

Problem: 100 MiB that cross a socket are copied four times, and the kernel spends most of that time clearing
fresh pages. Shared memory with a name stays behind when processes are killed. Choice: anonymous files
(``memfd_create``), which others open through ``/proc/PID/fd`` and which the kernel frees with their last
user. The writer keeps a segment for a moment to reuse it, and the reader keeps its mapping. Reuse takes a
fifth of the time.

A segment can be written again once its content is no longer in use. For each received buffer, a reader
opens the segment once more and locks that file, shared, until the buffer's last user drops it. The kernel
drops the lock of a process that ends in any way, and a forked process holds it as well. To learn whether a
segment is in use, the writer tries to get an exclusive lock.
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
import weakref
from collections.abc import Iterator
from typing import Any

from daskserve.internals.python import address_of

#: A segment that is not used again within one to two periods is closed.
PERIOD_S = 0.5
#: Limits of the segments that are kept for reuse.
MAX_KEPT = 16
MAX_KEPT_BYTES = 512 * 1024 * 1024

#: Whether this system has segments.
HAS_SEGMENTS = sys.platform == "linux" and hasattr(os, "memfd_create")


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
        self._memory: mmap.mmap | None = None
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

    def reuse(self) -> None:
        """Prepare to write again: the pages exist, so a mapping is the fastest path to them."""
        self.is_stale = False
        if self._memory is None:
            self._memory = mmap.mmap(self.descriptor, self.size_bytes)


class Mapping(mmap.mmap):
    """A segment of another process, mapped read-only. It is closed with its last reference."""

    key: int
    descriptor: int
    inode: int
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

    def lock(self) -> int:
        """Return a file descriptor that keeps the segment's content until it is closed."""
        lock = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def view(self, at: int, size_bytes: int, lock: int) -> memoryview:
        """Return a part of the mapping; the lock is closed when the last user drops the part."""
        # Python before 3.12 has no other object that exports memory and can be watched.
        part = (ctypes.c_ubyte * size_bytes).from_address(address_of(self) + at)
        vars(part)["mapping"] = self
        weakref.finalize(part, os.close, lock).atexit = False
        return memoryview(part).cast("B").toreadonly()


def mapping_under(view: memoryview) -> tuple[Mapping, int] | None:
    """Return the mapping that holds the memory of a contiguous view, and the offset of the view in it."""
    for each in _holders(view):
        mapping = vars(each).get("mapping") if isinstance(each, ctypes.Array) else each
        if isinstance(mapping, Mapping):
            at = address_of(view) - address_of(mapping)
            return (mapping, at) if 0 <= at <= len(mapping) - view.nbytes else None
    return None


def _holders(view: memoryview) -> Iterator[Any]:
    """Yield the chain of objects that a view keeps alive: views and NumPy arrays."""
    held: Any = view.obj
    while held is not None:
        yield held
        held = held.obj if isinstance(held, memoryview) else getattr(held, "base", None)


class Segments:
    """The segments of one process: its own, which it keeps to write them again, and those that it maps.

    Use it on one event loop.
    """

    def __init__(self) -> None:
        #: Segments that no message of this process refers to; other processes may still read them.
        self._kept: list[MemorySegment] = []
        #: The mapped segments of other processes, by key, kept because their writers are likely to send them
        #: again.
        self._mapped: dict[int, Mapping] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: New descriptors get the lowest free number; a number above this limit means that few are left.
        self._max_descriptor = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2

    def take(self, size_bytes: int) -> MemorySegment:
        """Return a free segment of at least this size, and at most twice this size.

        Raises
        ------
        OSError
            There are too many open files.
        """
        for each in self._kept:
            if size_bytes <= each.size_bytes <= 2 * size_bytes and not each.is_used():
                self._kept.remove(each)
                each.reuse()
                return each
        return MemorySegment(size_bytes, secrets.randbits(63))

    def keep(self, segment: MemorySegment) -> None:
        """Keep a segment for a while for reuse; every reader has opened it."""
        self._kept.append(segment)
        while len(self._kept) > MAX_KEPT or sum(each.size_bytes for each in self._kept) > MAX_KEPT_BYTES:
            self._kept.pop(0)
        self._close_later()

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
        lock = mapping.lock()
        if lock > self._max_descriptor:
            self._mapped.pop(key)
            os.close(lock)
            return memoryview(mapping[at : at + size_bytes])
        return mapping.view(at, size_bytes, lock)

    def close(self) -> None:
        """Close the kept segments; a segment in use is closed by its last user."""
        self._kept.clear()
        self._mapped.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._close_unused)

    def _close_unused(self) -> None:
        self._timer = None
        self._kept = [each for each in self._kept if not each.is_stale]
        self._mapped = {key: each for key, each in self._mapped.items() if not each.is_stale}
        for segment in self._kept:
            segment.is_stale = True
        for mapping in self._mapped.values():
            mapping.is_stale = True
        if self._kept or self._mapped:
            self._close_later()
