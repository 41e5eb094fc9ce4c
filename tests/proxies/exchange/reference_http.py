"""What a strict reader of RFC 9112 makes of the bytes that a client sent: the judge of the fuzz tests.

It is slow, knows no server, and decides for each message in turn whether it is whole, unfinished or invalid.
Where the standard leaves a server the choice to refuse, a message is marked `is_optional`: it may be refused,
but a reader that accepts it must read it this way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
TARGET = re.compile(rb"[\x21-\x7e\x80-\xff]+")
VALUE = re.compile(rb"[\t \x21-\x7e\x80-\xff]*")
VERSION = re.compile(rb"HTTP/1\.[0-9]")
HOST = re.compile(rb"(?:\[[0-9A-Fa-fvV.:]+\]|(?:[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.\-]*://[^/?#]+([/?].*)?", re.DOTALL)
AUTHORITY = re.compile(rb"[^/?#@]+:[0-9]+")
TARGET_OF_URIS = re.compile(rb"[A-Za-z0-9\-._~:/?\[\]@!$&'()*+,;=%]*")
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]+)((?:[ \t]*;.*)?)", re.DOTALL)

#: Methods that no server may call unknown.
METHODS = frozenset(b"GET HEAD POST PUT DELETE OPTIONS PATCH".split())
#: What servers act on where it belongs.
FRAMING = frozenset((b"host", b"connection", b"content-length", b"transfer-encoding", b"upgrade"))
#: What a server may call too long, whatever it is: lines of chunks, heads.
LONG_LINE_BYTES = 48
LONG_HEAD_BYTES = 48 * 1024


class State(Enum):
    """How far a message goes."""

    WHOLE = "whole"
    UNFINISHED = "unfinished"
    INVALID = "invalid"


@dataclass
class Reading:
    """One message as the strict reader understands it.

    Attributes
    ----------
    state : State
        Where the message ends, if it does.
    has_head : bool
        Whether its head is in order, so that an application may be told of it.
    is_optional : bool
        Whether a server may refuse it all the same.
    is_last : bool
        Whether the connection ends with it, so that nothing after it is a message.
    """

    state: State = State.UNFINISHED
    has_head: bool = False
    is_optional: bool = False
    is_last: bool = False
    method: bytes = b""
    target: bytes = b""
    version: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]

    def path_and_query(self) -> tuple[bytes, bytes]:
        """Return the target as an application gets it: of a URL only the path and what follows."""
        target = self.target
        if absolute := ABSOLUTE.fullmatch(target):
            target = absolute[1] or b"/"
            if target.startswith(b"?"):
                target = b"/" + target
        path, _, query = target.partition(b"?")
        return path, query


class _Bad(Exception):
    """The message is no message."""


class _More(Exception):
    """The message has not come in whole."""


def read(data: bytes) -> list[Reading]:
    """Return the messages in the order in which they come, up to the first that is not whole."""
    readings = []
    position = 0
    while data[position:] not in (b"", b"\r", b"\r\n"):  # one empty line is nothing
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
    # An empty line before a message is forgiven; several of them, and what is almost one, may be.
    position = len(data) - len(data[start:].lstrip(b"\r\n"))
    reading.is_optional = data[start:position] not in (b"", b"\r\n")
    position = _read_head(reading, data, position)
    reading.is_optional |= position - start > LONG_HEAD_BYTES
    _check_head(reading)
    reading.has_head = True
    if reading.values(b"transfer-encoding"):
        return _read_chunks(reading, data, position)
    if lengths := reading.values(b"content-length"):
        end = position + int(lengths[0].split(b",")[0])
        reading.body = data[position:end]
        if end > len(data):
            raise _More
        return end
    return position


def _line(reading: Reading, data: bytes, start: int) -> tuple[bytes, int]:
    """Return the line at a position, and where the next one starts."""
    end = data.find(b"\n", start)
    if end < 0:
        raise _More
    if data[start:end].endswith(b"\r"):
        return data[start : end - 1], end + 1
    reading.is_optional = True  # a lone LF may be taken for the end of a line
    return data[start:end], end + 1


def _read_head(reading: Reading, data: bytes, start: int) -> int:
    line, position = _line(reading, data, start)
    parts = [part for part in line.split(b" ") if part]
    reading.is_optional |= b" ".join(parts) != line  # more spaces than one may be forgiven
    # Even of a head that is not whole, a server may refuse what can no longer become one.
    if len(parts) != 3:
        raise _Bad
    reading.method, reading.target, reading.version = parts
    if not (TOKEN.fullmatch(parts[0]) and TARGET.fullmatch(parts[1]) and VERSION.fullmatch(parts[2])):
        raise _Bad
    return _read_fields(reading, reading.headers, data, position)


def _read_fields(reading: Reading, fields: list[tuple[bytes, bytes]], data: bytes, start: int) -> int:
    position = start
    while True:
        line, position = _line(reading, data, position)
        if not line:
            return position
        if line[:1] in b" \t":
            if not fields or not VALUE.fullmatch(line):
                raise _Bad
            # Folded: to be refused, or to be joined.
            reading.is_optional = True
            name, value = fields[-1]
            fields[-1] = (name, (value + b" " + line.strip(b" \t")).strip(b" \t"))
            continue
        name, colon, value = line.partition(b":")
        if not colon or not TOKEN.fullmatch(name) or not VALUE.fullmatch(value):
            raise _Bad
        fields.append((name.lower(), value.strip(b" \t")))


def _check_head(reading: Reading) -> None:
    hosts = reading.values(b"host")
    is_http10 = reading.version == b"HTTP/1.0"
    if len(hosts) > 1 or (not hosts and not is_http10) or not all(map(HOST.fullmatch, hosts)):
        raise _Bad
    reading.is_optional |= any(b"," in host for host in hosts)
    reading.is_optional |= reading.version not in (b"HTTP/1.0", b"HTTP/1.1")
    reading.is_optional |= reading.method not in METHODS
    _check_target(reading)
    _check_framing(reading, is_http10=is_http10)
    wishes = {wish.strip().lower() for value in reading.values(b"connection") for wish in value.split(b",")}
    reading.is_last = b"close" in wishes or (is_http10 and b"keep-alive" not in wishes)
    protocols = b",".join(reading.values(b"upgrade")).lower()
    if b"upgrade" in wishes and b"websocket" in protocols and reading.method == b"GET":
        reading.is_optional = reading.is_last = True  # what follows is another protocol
    if any(value.lower() != b"100-continue" for value in reading.values(b"expect")):
        reading.is_optional = True


def _check_target(reading: Reading) -> None:
    target, method = reading.target, reading.method
    if method == b"CONNECT":
        if not AUTHORITY.fullmatch(target):
            raise _Bad
    elif target == b"*":
        if method != b"OPTIONS":
            raise _Bad
    elif not target.startswith(b"/") and not ABSOLUTE.fullmatch(target):
        raise _Bad
    # Characters that no URI has are common enough, and harmless.
    reading.is_optional |= not TARGET_OF_URIS.fullmatch(target)
    reading.is_optional |= not target.startswith(b"/")
    reading.is_optional |= bool(re.search(rb"%(?![0-9A-Fa-f]{2})", target))


def _check_framing(reading: Reading, *, is_http10: bool) -> None:
    codings = reading.values(b"transfer-encoding")
    lengths = reading.values(b"content-length")
    if codings:
        # One reader could go by the length, another by the chunks, a third know neither.
        if is_http10 or lengths or b",".join(codings).strip(b" \t,").lower() != b"chunked":
            raise _Bad
        reading.is_optional |= codings != [codings[0]] or codings[0].lower() != b"chunked"
    elif lengths:
        numbers = [number.strip(b" \t") for value in lengths for number in value.split(b",")]
        if len(set(numbers)) != 1 or not re.fullmatch(rb"[0-9]+", numbers[0]):
            raise _Bad
        reading.is_optional |= len(numbers) > 1 or len(numbers[0]) > 15
        if len(numbers[0]) > 1000:
            raise _Bad  # Python refuses to read it, too


def _read_chunks(reading: Reading, data: bytes, start: int) -> int:
    position = start
    while True:
        line, position = _chunk_line(reading, data, position)
        matched = CHUNK_LINE.fullmatch(line)
        if matched is None or not VALUE.fullmatch(matched[2]):
            raise _Bad
        reading.is_optional |= len(line) > LONG_LINE_BYTES or matched[2][:1] in (b" ", b"\t")
        reading.is_optional |= len(matched[1]) > 15
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
    trailers: list[tuple[bytes, bytes]] = []
    end = _read_fields(reading, trailers, data, position)
    reading.is_optional |= end - position > LONG_LINE_BYTES * 4
    # What belongs into heads may be refused here.
    reading.is_optional |= not {name for name, _ in trailers}.isdisjoint(FRAMING)
    return end


def _chunk_line(reading: Reading, data: bytes, start: int) -> tuple[bytes, int]:
    end = data.find(b"\n", start)
    if end < 0:
        raise _More
    if not data[start:end].endswith(b"\r"):
        raise _Bad  # forgiven in heads, but not here, where it has been used to smuggle
    return data[start : end - 1], end + 1
