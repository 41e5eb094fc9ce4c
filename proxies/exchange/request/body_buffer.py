"""Joins the parts of a body, whose size may be announced."""

from __future__ import annotations

import io

#: The size of the first allocation, and the factor by which it grows. A client that announces a large body
#: but sends little takes up at most this factor times what it has sent.
FIRST_BYTES = 1 << 20
GROWTH = 4


class BodyBuffer:
    """A growing buffer that becomes `bytes` without a second copy.

    `io.BytesIO` alone grows by an eighth at a time, and so copies a large body several times.

    Parameters
    ----------
    length_bytes : int
        The size that the sender has announced; 0 if it has not. It may be wrong.
    """

    __slots__ = ("_joined", "_length_bytes", "_room_bytes", "size_bytes")

    def __init__(self, length_bytes: int = 0) -> None:
        self._joined = io.BytesIO()
        self._length_bytes = length_bytes
        self._room_bytes = 0
        #: The size of what was written.
        self.size_bytes = 0

    def write(self, part: bytes | memoryview) -> None:
        """Append a part."""
        size_bytes = self.size_bytes + len(part)
        if self._room_bytes < size_bytes <= self._length_bytes:
            self._grow(size_bytes)
        self._joined.write(part)
        self.size_bytes = size_bytes

    def room(self) -> memoryview | None:
        """Return memory for the next bytes, to be reported by `filled`; None beyond the announced size.

        Release the view before you call a method other than `filled`.
        """
        if self.size_bytes >= self._length_bytes:
            return None
        if self.size_bytes >= self._room_bytes:
            self._grow(self.size_bytes + 1)
        return self._joined.getbuffer()[self.size_bytes : self._room_bytes]

    def filled(self, size_bytes: int) -> None:
        """Record that ``size_bytes`` bytes were written to the room."""
        self.size_bytes += size_bytes
        self._joined.seek(self.size_bytes)

    def _grow(self, least_bytes: int) -> None:
        room_bytes = max(FIRST_BYTES, GROWTH * self._room_bytes, least_bytes)
        self._room_bytes = min(room_bytes, self._length_bytes)
        self._joined.seek(self._room_bytes - 1)
        self._joined.write(b"\0")
        self._joined.seek(self.size_bytes)

    def take(self) -> bytes:
        """Return all that was written, and empty the buffer."""
        self._joined.truncate(self.size_bytes)
        joined, self._joined = self._joined, io.BytesIO()
        self.size_bytes = self._room_bytes = 0
        return joined.getvalue()
