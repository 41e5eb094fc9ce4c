"""Assembly of multi-part messages from the bytes of a socket; pure.

Each large part is read into its own memory, so that it is never copied and does not keep other parts alive.
Everything else goes through one small buffer.

A part of 32 MiB or more is read into an anonymous mapping. The kernel adds its pages as the bytes arrive, so
a size that is only claimed takes no memory. Below that size, memory that the process used before is faster.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Any

Buffer = bytes | bytearray | memoryview

HEAD = struct.Struct("<4sI")
SIZE = struct.Struct("<Q")
#: Parts of at least this size are read into memory of their own.
LARGE_BYTES = 32 * 1024
#: Maximum number of parts. The list of their sizes, and any part that is not large, fits into half of the
#: buffer.
MAX_PARTS = 16 * 1024 - 1
BUFFER_BYTES = 256 * 1024
#: Parts of at least this size are mapped, and take memory only as their bytes arrive. Below this size, glibc
#: reuses freed memory; above it, glibc returns the memory to the kernel.
MAPPED_BYTES = 32 * 1024 * 1024
#: Maximum size of a message, all parts together.
MAX_MESSAGE_BYTES = 16 * 1024**3


class OutOfBand:
    """Marks bytes or a buffer in a frame that travels beside the frame, without a copy."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data


def _memory(size_bytes: int) -> memoryview:
    """Return writable memory for a large part."""
    if size_bytes < MAPPED_BYTES:
        return memoryview(bytearray(size_bytes))
    # Private, so that a forked process does not share later writes.
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class PartReader:
    """Splits a byte stream into messages: magic, number of parts, their sizes, the parts.

    Write into `room`, then call `filled` with the number of bytes.

    Parameters
    ----------
    magic : bytes
        The first four bytes of each message.
    receive : callable
        Called with the parts of each message. The part of a single-part message is valid until it returns.
    """

    def __init__(self, magic: bytes, receive: Callable[[Sequence[Buffer]], None]) -> None:
        self._magic = magic
        self._receive = receive
        self._view = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self._sizes: Sequence[int] = ()
        self._parts: list[Buffer] = []
        # The large part being read, and how much of it has arrived.
        self._large: memoryview | None = None
        self._large_filled = 0

    def room(self) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        if self._large is not None:
            return self._large[self._large_filled :]
        return self._view[self._end :]

    def filled(self, size_bytes: int) -> None:
        """Process bytes that were written into `room`.

        Raises
        ------
        ValueError
            The bytes are not a message.
        Exception
            An error that the receiver raised.
        """
        if self._large is None:
            self._end += size_bytes
        else:
            self._large_filled += size_bytes
            if self._large_filled < len(self._large):
                return
            self._parts.append(self._large)
            self._large = None
        while self._large is None and self._advance():
            pass
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end > BUFFER_BYTES // 2 and self._start:
            left = bytes(self._view[self._start : self._end])
            self._view[: len(left)] = left
            self._start, self._end = 0, len(left)

    def _advance(self) -> bool:
        """Consume one head, part or message; return False if more bytes are needed."""
        if not self._sizes:
            return self._read_head()
        done = len(self._parts)
        if done == len(self._sizes):
            parts, self._parts, self._sizes = self._parts, [], ()
            self._receive(parts)
            return True
        size = self._sizes[done]
        there = min(size, self._end - self._start)
        if there < size < LARGE_BYTES:
            return False
        part = self._view[self._start : self._start + there]
        self._start += there
        if there == size and len(self._sizes) == 1:
            self._parts.append(part)
        elif size < LARGE_BYTES:
            self._parts.append(bytes(part))
        else:
            large = _memory(size)
            large[:there] = part
            if there == size:
                self._parts.append(large)
            else:
                self._large, self._large_filled = large, there
        return True

    def _read_head(self) -> bool:
        if self._end - self._start < HEAD.size:
            return False
        magic, count = HEAD.unpack_from(self._view, self._start)
        if magic != self._magic or not 0 < count <= MAX_PARTS:
            found = bytes(self._view[self._start : self._start + HEAD.size])
            raise ValueError(f"no message begins with {found!r}")
        start = self._start + HEAD.size
        if self._end - start < SIZE.size * count:
            return False
        sizes = self._sizes = struct.unpack_from(f"<{count}Q", self._view, start)
        if (count > 1 or sizes[0] >= LARGE_BYTES) and sum(sizes) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {sum(sizes)} bytes exceeds the maximum of {MAX_MESSAGE_BYTES}")
        self._start = start + SIZE.size * count
        return True
