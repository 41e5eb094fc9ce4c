"""Joins the parts of a body whose size may have been declared."""

from __future__ import annotations

import io

#: The size of the first allocation, and the factor of growth. A client that declares a large body but sends
#: little uses at most this factor times the size that it has sent.
FIRST_BYTES = 1 << 20
GROWTH = 4


class BodyBuffer:
    """A growing buffer that becomes `bytes` without a second copy.

    `io.BytesIO` alone grows by an eighth at a time, and so copies a large body several times.

    Parameters
    ----------
    length_bytes : int
        The declared size; 0 without one. The actual size may be different.
    """

    __slots__ = ("_joined", "_length_bytes", "_room_bytes", "size_bytes")

    def __init__(self, length_bytes: int = 0) -> None:
        self._joined = io.BytesIO()
        self._length_bytes = length_bytes
        self._room_bytes = 0
        #: The number of written bytes.
        self.size_bytes = 0

    def write(self, part: bytes | memoryview) -> None:
        """Append a part."""
        size_bytes = self.size_bytes + len(part)
        if self._room_bytes < size_bytes <= self._length_bytes:
            self._grow(size_bytes)
        self._joined.write(part)
        self.size_bytes = size_bytes

    def room(self) -> memoryview | None:
        """Return memory for the next bytes, which `filled` then adds; None beyond the declared size.

        Release the view before you call a method other than `filled`.
        """
        if self.size_bytes >= self._length_bytes:
            return None
        if self.size_bytes >= self._room_bytes:
            self._grow(self.size_bytes + 1)
        return self._joined.getbuffer()[self.size_bytes : self._room_bytes]

    def filled(self, size_bytes: int) -> None:
        """Add ``size_bytes`` bytes that were written to the memory that `room` has returned."""
        self.size_bytes += size_bytes
        self._joined.seek(self.size_bytes)

    def _grow(self, least_bytes: int) -> None:
        room_bytes = max(FIRST_BYTES, GROWTH * self._room_bytes, least_bytes)
        self._room_bytes = min(room_bytes, self._length_bytes)
        self._joined.seek(self._room_bytes - 1)
        self._joined.write(b"\0")
        self._joined.seek(self.size_bytes)

    def take(self) -> bytes:
        """Return all written bytes, and empty the buffer."""
        self._joined.truncate(self.size_bytes)
        joined, self._joined = self._joined, io.BytesIO()
        self.size_bytes = self._room_bytes = 0
        return joined.getvalue()
