"""Reads chunked bodies.

Libraries and their versions differ in how strictly they parse the lines around chunks. If one of two servers
accepts a CR and any character at the end of a chunk, an attacker can hide a request behind another one. So
the lines are checked strictly.
"""

from __future__ import annotations

import re

from daskserve.proxies.exchange.request.head import HEADER_LINE, RefusedRequestError

#: Maximum length of the line with the size and extensions of a chunk, and of a trailer.
_MAX_LINE_BYTES = 4096
#: Maximum total size of the trailers.
_MAX_TRAILER_BYTES = 16 * 1024
#: Maximum number of chunks that are read at once, because a client may send very small ones.
_MAX_CHUNKS = 256

_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t \x21-\x7e\x80-\xff]*)?\r\n")


class ChunkReader:
    """Reads one chunked body.

    Attributes
    ----------
    is_ended : bool
        Whether the last chunk and the trailers were read.
    """

    is_ended = False

    def __init__(self) -> None:
        self._left = 0  # remaining bytes of data in the current chunk
        self._is_in_data = False  # the CR LF at the end of the current chunk has not been read
        self._is_in_trailers = False
        self._trailer_bytes = 0
        self._kept = b""  # an incomplete line

    def read(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the part of the body in the data, and the rest of the data.

        If the body `is_ended`, the rest is the next request; otherwise pass the rest again.

        Raises
        ------
        RefusedRequestError
            The chunks are malformed.
        """
        if self._kept:
            data, self._kept = self._kept + data, b""
        parts: list[bytes] = []
        position = chunks = 0
        while position < len(data) and not self.is_ended:
            if self._left:
                part = data[position : position + self._left]
                parts.append(part)
                position += len(part)
                self._left -= len(part)
            elif self._is_in_data:
                ending = data[position : position + 2]
                if ending != b"\r\n":
                    if ending != b"\r":
                        raise RefusedRequestError("A chunk is longer than its size says.")
                    break
                position += 2
                self._is_in_data = False
                chunks += 1
                if chunks == _MAX_CHUNKS:
                    return b"".join(parts), data[position:]
            else:
                end = self._read_line(data, position)
                if end is None:
                    break
                position = end
        if self.is_ended:
            return b"".join(parts), data[position:]
        self._kept = data[position:]
        return b"".join(parts), b""

    def _read_line(self, data: bytes, start: int) -> int | None:
        """Read the line before a chunk, or a trailer; return its end, or None if it is incomplete."""
        end = data.find(b"\n", start, start + _MAX_LINE_BYTES) + 1
        if not end:
            if len(data) - start >= _MAX_LINE_BYTES:
                raise RefusedRequestError("The extensions of a chunk, or the trailers, are too long.")
            return None
        if self._is_in_trailers:
            self._read_trailer(data[start:end])
            return end
        matched = _CHUNK_LINE.fullmatch(data, start, end)
        if matched is None:
            raise RefusedRequestError("A chunk must begin with its size in hexadecimal digits, and CR LF.")
        self._left = int(matched[1], 16)
        self._is_in_data = self._left > 0
        self._is_in_trailers = not self._is_in_data
        return end

    def _read_trailer(self, line: bytes) -> None:
        if line == b"\r\n":
            self.is_ended = True
            return
        self._trailer_bytes += len(line)
        if self._trailer_bytes > _MAX_TRAILER_BYTES:
            raise RefusedRequestError("The extensions of a chunk, or the trailers, are too long.")
        if HEADER_LINE.fullmatch(line) is None:
            raise RefusedRequestError("A trailer must be a name, a colon, a value and CR LF.")
