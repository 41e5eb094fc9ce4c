"""Messages of several parts, put together from what a socket gives; pure.

Large parts are read into memory of their own, so that they are never copied and never kept alive by each
other; all else goes through one small buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

Buffer = bytes | bytearray | memoryview

HEAD = struct.Struct("<4sI")
SIZE = struct.Struct("<Q")
#: Parts from this size on are read into memory of their own.
LARGE_BYTES = 32 * 1024
#: The sizes of so many parts, and any part that is not large, fit into half of the buffer.
MAX_PARTS = 16 * 1024 - 1
BUFFER_BYTES = 256 * 1024


class PartReader:
    """Cuts a stream of bytes into messages: magic, number of parts, their sizes, the parts.

    Write into `room`, then tell `filled` how much.

    Parameters
    ----------
    magic : bytes
        The first four bytes of each message.
    receive : callable
        Gets the parts of each message; the part of one that has only one is good until it returns.
    """

    def __init__(self, magic: bytes, receive: Callable[[Sequence[Buffer]], None]) -> None:
        self._magic = magic
        self._receive = receive
        self._view = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self._sizes: Sequence[int] = ()
        self._parts: list[Buffer] = []
        # A large part under way, and how much of it is there.
        self._large: memoryview | None = None
        self._large_filled = 0

    def room(self) -> memoryview:
        """Return where the next bytes are to be put; never empty."""
        if self._large is not None:
            return self._large[self._large_filled :]
        return self._view[self._end :]

    def filled(self, size_bytes: int) -> None:
        """Take note that so many bytes were put into `room`.

        Raises
        ------
        ValueError
            This is no message.
        Exception
            What the receiver raised.
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
        """Take one thing out of the buffer; False if it is not there yet."""
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
            large = memoryview(bytearray(size))
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
        self._sizes = struct.unpack_from(f"<{count}Q", self._view, start)
        self._start = start + SIZE.size * count
        return True
