"""Serializes ASGI responses to HTTP/1.

Tornado's writer checks each header with a regular expression, and closes the connection after the last byte.
This one takes a third of the time, and leaves closing the connection to the exchange.
"""

from __future__ import annotations

import email.utils
import http
from collections.abc import Mapping
from typing import Any

from daskserve.common.clock import Clock
from daskserve.common.types import Message
from daskserve.proxies.asgi import NOSNIFF, TEXT, Headers

BodyPart = bytes | memoryview

_STATUS_LINES: Mapping[int, bytes] = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode("ascii") for status in http.HTTPStatus
}
_HEAD_END = b"\r\n"
#: Headers that describe the connection, or that differ between responses.
_NOT_CACHED = frozenset((b"connection", b"content-length", b"date", b"transfer-encoding", b"x-request-id"))
#: Maximum number of cached heads, of headers in each, and of bytes in a name or value.
_MAX_HEADS, _MAX_CACHED_HEADERS, _MAX_CACHED_BYTES = 256, 8, 128
_UNTIL_CLOSE, _NOTHING, _LENGTH, _CHUNKS = range(4)


class DateHeader:
    """The ``date`` header, formatted once a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._line = b""
        self._until = 0.0

    def line(self) -> bytes:
        """Return the header for the current second."""
        now = self._clock.now()
        if now >= self._until:
            wall = self._clock.wall()
            self._line = b"date: " + email.utils.formatdate(wall, usegmt=True).encode("ascii")
            self._until = now + 1.0 - wall % 1.0
        return self._line


class ResponseWriter:
    """Serializes one response.

    Parameters
    ----------
    start : Message
        The start message.
    method : str
        The request's method; the response to HEAD has no body.
    is_http11 : bool
        Whether the client supports chunks, and keeps connections open by default.
    closes : bool
        Whether the connection must be closed after this response.

    Attributes
    ----------
    closes : bool
        Whether the connection must be closed after the last byte. Valid once `first` has returned.
    """

    __slots__ = ("_framing", "_is_http11", "_left", "_method", "_start", "closes")

    def __init__(self, start: Message, *, method: str, is_http11: bool, closes: bool) -> None:
        self._start = start
        self._method = method
        self._is_http11 = is_http11
        self.closes = closes
        self._framing = _NOTHING
        self._left = 0

    def first(self, body: BodyPart, more_body: bool, date: bytes) -> list[BodyPart]:
        """Return the head and the first part of the body.

        Raises
        ------
        TypeError, ValueError
            The start message is not valid; nothing was serialized.
        """
        status = self._start["status"]
        if not 200 <= status <= 999:
            raise ValueError(f"the status of a response must be from 200 to 999, not {status}")
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status]
        try:
            length = self._read_headers(lines, date)
        except TypeError:
            _check_headers(self._start["headers"])
            raise
        if status == 204 or status == 304 or self._method == "HEAD":
            if length is None and not more_body and body and status != 204:
                length = len(body)
        elif length is not None or not more_body:
            if length is None:
                length = len(body)
            self._framing = _LENGTH
            self._left = length
        elif self._is_http11:
            self._framing = _CHUNKS
            lines.append(b"transfer-encoding: chunked")
        else:
            self._framing = _UNTIL_CLOSE
            self.closes = True
        if length is not None and status != 204:
            lines.append(b"content-length: %d" % length)
        if self.closes:
            lines.append(b"connection: close")
        elif not self._is_http11:
            lines.append(b"connection: keep-alive")
        lines.append(_HEAD_END)
        head = b"\r\n".join(lines)
        if has_stray_control(head, len(lines)):
            raise ValueError("a response header contains a line break or a null byte")
        return [head, *self.next(body, more_body)]

    @property
    def is_chunked(self) -> bool:
        """Whether the body consists of chunks."""
        return self._framing == _CHUNKS

    @property
    def is_filled(self) -> bool:
        """Whether as many bytes were written as ``content-length`` says."""
        return self._framing == _LENGTH and not self._left

    def next(self, body: BodyPart, more_body: bool) -> list[BodyPart]:
        """Return the bytes of the next part of the body.

        Raises
        ------
        ValueError
            The body is longer or shorter than its ``content-length``.
        """
        framing = self._framing
        if framing == _LENGTH:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more_body):
                raise ValueError("the body is longer or shorter than its content-length")
            return [body] if body else []
        if framing == _CHUNKS:
            parts: list[BodyPart] = [b"%x\r\n" % len(body), body, b"\r\n"] if body else []
            if not more_body:
                parts.append(b"0\r\n\r\n")
            return parts
        return [body] if body and framing == _UNTIL_CLOSE else []

    def _read_headers(self, lines: list[bytes], date: bytes) -> int | None:
        # Copies the application's headers except for those that describe the connection; returns the length.
        length: int | None = None
        has_date = False
        for name, value in self._start.get("headers", ()):
            key = name.lower()
            if key == b"content-length":
                if not value.isdigit() or (length is not None and length != int(value)):
                    raise ValueError(f"content-length must be one number; a response has {value!r}")
                length = int(value)
            elif key == b"connection":
                self.closes = self.closes or b"close" in value.lower()
            elif key != b"transfer-encoding":
                has_date = has_date or key == b"date"
                lines.append(b"%b: %b" % (key, value))
        if not has_date:
            lines.append(date)
        return length


class HeadCache:
    """A cache of the heads of whole responses, by status and headers. It is valid until the date changes.

    Even if all requests differ, applications send few different sets of headers: responses differ in body,
    length and request id, which are not part of the key. Measured with two headers, and a new body and id
    each time: 0.3 µs for a cached head, 1.7 µs for a new one, 3.0 µs with `ResponseWriter`. In
    ``bench_path.py``, a request to a replica takes 8% more CPU time if each head is built, and 27% more with
    `ResponseWriter`.
    """

    def __init__(self, date: DateHeader) -> None:
        self.date = date
        self._line = b""
        self._heads: dict[tuple[int, Headers], bytes] = {}

    def write(self, message: Message, request_id: bytes) -> bytes | None:
        """Return the bytes of a `WHOLE_RESPONSE`; None if `ResponseWriter` has to serialize it.

        Call this only for HTTP/1.1 requests that are not HEAD and keep their connection open, with a valid
        request id.
        """
        line = self.date.line()
        if line is not self._line:
            self._line = line
            self._heads.clear()
        headers = message["headers"]
        if not request_id or type(headers) is not tuple:
            return None
        key = (message["status"], headers)
        try:
            head = self._heads.get(key)
        except TypeError:
            return None  # not hashable: for example, a header is a list
        if head is None:
            try:
                head = self._make(*key)
            except TypeError:
                _check_headers(headers)
                raise
        if not head:
            return None
        body = message["body"]
        length = len(body)
        return b"".join((head, request_id, _LENGTHS[length] if length < 1000 else _length_line(length), body))

    def _make(self, status: int, headers: Headers) -> bytes:
        if len(self._heads) >= _MAX_HEADS or len(headers) > _MAX_CACHED_HEADERS:
            return b""
        is_plain = status in _STATUS_LINES and status >= 200 and status not in (204, 304)
        lines = [_STATUS_LINES.get(status, b"")]
        for name, value in headers:
            if len(name) > _MAX_CACHED_BYTES or len(value) > _MAX_CACHED_BYTES:
                return b""  # too large for a key
            key = name.lower()
            is_plain = is_plain and key not in _NOT_CACHED
            lines.append(b"%b: %b" % (key, value))
        head = b"\r\n".join([*lines, self._line, b"x-request-id: "])
        if not is_plain or has_stray_control(head, len(lines) + 1):
            head = b""
        self._heads[status, headers] = head
        return head


def _check_headers(headers: Any) -> None:
    """Raise a `TypeError` that names the first header whose name or value is not bytes, if there is one."""
    for name, value in headers:
        if not isinstance(name, bytes) or not isinstance(value, bytes):
            raise TypeError(
                f"the name and the value of a response header must be bytes, not {name!r}: {value!r}"
            )


def _length_line(length: int) -> bytes:
    return b"\r\ncontent-length: %d\r\n\r\n" % length


#: The ends of heads, cached by the length of a small body.
_LENGTHS = tuple(map(_length_line, range(1000)))


def has_stray_control(head: bytes, ends: int) -> bool:
    """Return whether a head contains a null byte, or line breaks other than its ``ends`` of lines."""
    return head.count(b"\n") != ends or head.count(b"\r") != ends or b"\0" in head


def as_buffer(body: Any) -> BodyPart:
    """Return a part of a body as bytes or a flat view, without a copy if possible."""
    if isinstance(body, bytes):
        return body
    if isinstance(body, memoryview):
        if not body.c_contiguous:
            return body.tobytes()
        return body if body.format == "B" and body.ndim == 1 else body.cast("B")
    if isinstance(body, bytearray):
        return bytes(body)  # the application may change it later
    raise TypeError(f"a response body must be bytes, not {type(body).__name__}")


def plain_text(status: int, text: str) -> tuple[dict[str, Any], bytes]:
    """Return the start message and the body of a response that the server generates."""
    headers = [(b"content-type", TEXT), NOSNIFF]
    return {"type": "http.response.start", "status": status, "headers": headers}, text.encode()
