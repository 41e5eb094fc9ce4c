"""A strict reading of a client's bytes by RFC 9112, with which the fuzz tests compare the servers.

It is slow and independent of all servers. It decides for each message in turn whether the message is
complete, incomplete or invalid. A message that the standard allows a server to refuse is invalid.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Z]+")
TARGET = re.compile(rb"[\x21-\x7e\x80-\xff]+")
VALUE = re.compile(rb"[\t \x21-\x7e\x80-\xff]*")
VERSION = re.compile(rb"HTTP/1\.[01]")
HOST = re.compile(rb"(?:\[[0-9A-Fa-fvV.:]+\]|(?:[A-Za-z0-9\-._~!$&'()*+;=]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
ABSOLUTE = re.compile(rb"https?://([^/?#]+)(.*)", re.DOTALL | re.IGNORECASE)
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]+)((?:[ \t]*;.*)?)", re.DOTALL)

#: The limits of heads, of the lines around chunks, and of trailers.
MAX_HEAD_BYTES, MAX_HEADERS = 64 * 1024, 100
MAX_LINE_BYTES, MAX_TRAILER_BYTES = 4096, 16 * 1024


class State(Enum):
    """Whether a message is complete."""

    WHOLE = "whole"
    UNFINISHED = "unfinished"
    INVALID = "invalid"


@dataclass
class Reading:
    """One message, as read strictly.

    Attributes
    ----------
    state : State
        Whether the message is complete, incomplete or invalid.
    has_head : bool
        Whether its head is valid, so that an application may see the message.
    is_handshake : bool
        Whether it requests a WebSocket, which may be refused for other reasons.
    is_last : bool
        Whether the connection ends with it, so that nothing after it is a message.
    """

    state: State = State.UNFINISHED
    has_head: bool = False
    is_handshake: bool = False
    is_last: bool = False
    method: bytes = b""
    target: bytes = b""
    version: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]

    def path_and_query(self) -> tuple[bytes, bytes]:
        """Return the target as an application gets it: only the path and the query of a URL."""
        target = self.target
        if absolute := ABSOLUTE.fullmatch(target):
            target = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
        path, _, query = target.partition(b"?")
        return path, query


class _Bad(Exception):
    """The message is invalid."""


class _More(Exception):
    """The message is incomplete."""


def read(data: bytes) -> list[Reading]:
    """Return the messages in order, up to the first that is not complete."""
    readings = []
    position = 0
    while data[position:] not in (b"", b"\r", b"\r\n"):  # an empty line is not a message
        reading = Reading()
        try:
            position = _read_message(reading, data, position)
            reading.state = State.WHOLE
        except _More:
            pass
        except _Bad:
            reading.state = State.INVALID
        readings.append(reading)
        if reading.state is not State.WHOLE or reading.is_last:
            return readings
    return readings


def _read_message(reading: Reading, data: bytes, start: int) -> int:
    # An empty line before a message is allowed.
    begin = start + 2 if data[start:].startswith(b"\r\n") else start
    try:
        position = _read_head(reading, data, begin)
    except _More:
        position = len(data)
        if position - start <= MAX_HEAD_BYTES:
            raise
    if position - start > MAX_HEAD_BYTES or len(reading.headers) > MAX_HEADERS:
        raise _Bad
    _check_head(reading)
    reading.has_head = True
    if reading.values(b"transfer-encoding"):
        return _read_chunks(reading, data, position)
    if lengths := reading.values(b"content-length"):
        end = position + int(lengths[0])
        reading.body = data[position:end]
        if end > len(data):
            raise _More
        return end
    return position


def _line(data: bytes, start: int) -> tuple[bytes, int]:
    """Return the line at a position, and where the next one starts."""
    end = data.find(b"\n", start)
    if end < 0:
        raise _More
    if not data[start:end].endswith(b"\r"):
        raise _Bad  # some servers accept a lone LF as the end of a line
    return data[start : end - 1], end + 1


def _read_head(reading: Reading, data: bytes, start: int) -> int:
    line, position = _line(data, start)
    # A server may refuse an incomplete head that can no longer become valid.
    parts = line.split(b" ")
    if len(parts) != 3:
        raise _Bad
    reading.method, reading.target, reading.version = parts
    if not (METHOD.fullmatch(parts[0]) and TARGET.fullmatch(parts[1]) and VERSION.fullmatch(parts[2])):
        raise _Bad
    return _read_fields(reading.headers, data, position)


def _read_fields(fields: list[tuple[bytes, bytes]], data: bytes, start: int) -> int:
    position = start
    while True:
        line, position = _line(data, position)
        if not line:
            return position
        name, colon, value = line.partition(b":")
        if not colon or not TOKEN.fullmatch(name) or not VALUE.fullmatch(value):
            raise _Bad
        fields.append((name.lower(), value.strip(b" \t")))


def _check_head(reading: Reading) -> None:
    hosts = reading.values(b"host")
    is_http10 = reading.version == b"HTTP/1.0"
    if len(hosts) > 1 or (not hosts and not is_http10) or not all(map(HOST.fullmatch, hosts)):
        raise _Bad
    _check_target(reading, hosts)
    _check_framing(reading, is_http10=is_http10)
    wishes = {wish.strip().lower() for value in reading.values(b"connection") for wish in value.split(b",")}
    reading.is_last = b"close" in wishes or (is_http10 and b"keep-alive" not in wishes)
    protocols = b",".join(reading.values(b"upgrade")).lower()
    if b"upgrade" in wishes and b"websocket" in protocols and reading.method == b"GET":
        reading.is_handshake = reading.is_last = True  # what follows is another protocol


def _check_target(reading: Reading, hosts: list[bytes]) -> None:
    target, method = reading.target, reading.method
    if method == b"CONNECT":
        raise _Bad  # application servers do not support it
    if target == b"*":
        if method != b"OPTIONS":
            raise _Bad
    elif not target.startswith(b"/"):
        absolute = ABSOLUTE.fullmatch(target)
        if absolute is None or not HOST.fullmatch(absolute[1]):
            raise _Bad
        named = {name.lower().removesuffix(b":80").removesuffix(b":") for name in (absolute[1], *hosts)}
        if len(named) > 1:
            raise _Bad


def _check_framing(reading: Reading, *, is_http10: bool) -> None:
    codings = reading.values(b"transfer-encoding")
    lengths = reading.values(b"content-length")
    # One reader might use the length, another the chunks, a third neither.
    if codings and (is_http10 or lengths or [coding.lower() for coding in codings] != [b"chunked"]):
        raise _Bad
    if lengths and (len(lengths) > 1 or not re.fullmatch(rb"[0-9]{1,18}", lengths[0])):
        raise _Bad


def _read_chunks(reading: Reading, data: bytes, start: int) -> int:
    position = start
    while True:
        line, position = _short_line(data, position)
        matched = CHUNK_LINE.fullmatch(line)
        if matched is None or not VALUE.fullmatch(matched[2]) or len(matched[1]) > 15:
            raise _Bad
        size = int(matched[1], 16)
        if not size:
            break
        reading.body += data[position : position + size]
        position += size
        if position > len(data):
            raise _More
        if data[position : position + 2] != b"\r\n":
            if b"\r\n".startswith(data[position : position + 2]):
                raise _More
            raise _Bad
        position += 2
    begin = position
    while line:
        line, position = _short_line(data, position)
        if line and (position - begin > MAX_TRAILER_BYTES or _read_fields([], line + b"\r\n\r\n", 0) < 0):
            raise _Bad
    return position


def _short_line(data: bytes, start: int) -> tuple[bytes, int]:
    end = data.find(b"\n", start, start + MAX_LINE_BYTES)
    if end < 0 and len(data) - start >= MAX_LINE_BYTES:
        raise _Bad
    return _line(data, start)
