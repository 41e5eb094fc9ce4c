"""A strict reading of frames by RFC 6455, with which the fuzz tests of WebSockets compare the server."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from enum import Enum

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class End(Enum):
    """How the frames end."""

    OPEN = "open"
    CLOSED = "closed"
    VIOLATION = "violation"
    TOO_LARGE = "too large"


@dataclass
class Frames:
    """The complete messages, the payloads of pings, the content of the close frame, and the end."""

    end: End = End.OPEN
    messages: list[str | bytes] = field(default_factory=list)
    pings: list[bytes] = field(default_factory=list)
    pongs: list[bytes] = field(default_factory=list)
    code: int | None = None
    rest: bytes = b""


class _Violation(Exception):
    pass


class _TooLarge(Exception):
    pass


def read_frames(data: bytes, *, is_masked: bool, max_bytes: int) -> Frames:
    """Read the frames of a client (masked) or a server (not masked)."""
    frames = Frames()
    parts: list[bytes] = []
    decoder = codecs.getincrementaldecoder("utf-8")()
    kind = size = 0
    while frames.end is End.OPEN:
        frame = None
        try:
            frame = _read_frame(data, is_masked=is_masked)
            if frame is None:
                frames.rest = data
                return frames
            opcode, is_final, payload, data = frame
            if opcode >= CLOSE:
                _control(frames, opcode, payload)
                continue
            if (opcode == 0) != bool(kind):
                raise _Violation
            kind = opcode or kind
            parts.append(payload)
            size += len(payload)
            if size > max_bytes:
                raise _TooLarge
            if kind == TEXT:
                decoder.decode(payload, is_final)  # a part alone can be invalid
            if is_final:
                whole = b"".join(parts)
                frames.messages.append(whole.decode() if kind == TEXT else whole)
                parts, kind, size = [], 0, 0
        except (_Violation, UnicodeDecodeError):
            frames.end = End.VIOLATION
        except _TooLarge:
            frames.end = End.TOO_LARGE
    frames.rest = data
    return frames


def _read_frame(data: bytes, *, is_masked: bool) -> tuple[int, bool, bytes, bytes] | None:
    """Return the opcode, whether the part is the last, the payload and the rest; None if incomplete."""
    if len(data) < 2:
        return None
    is_final, opcode, length = bool(data[0] & 0x80), data[0] & 0x0F, data[1] & 0x7F
    if data[0] & 0x70 or opcode not in (0, TEXT, BINARY, CLOSE, PING, PONG):
        raise _Violation
    if bool(data[1] & 0x80) != is_masked or (opcode >= CLOSE and (length > 125 or not is_final)):
        raise _Violation
    size_bytes = {126: 2, 127: 8}.get(length, 0)
    if len(data) < 2 + size_bytes:
        return None
    if size_bytes:
        length = int.from_bytes(data[2 : 2 + size_bytes], "big")
        if length < (126 if size_bytes == 2 else 1 << 16) or length >> 63:
            raise _Violation
    start = 2 + size_bytes + 4 * is_masked
    if len(data) < start + length:
        return None
    payload = data[start : start + length]
    if is_masked:
        mask = data[start - 4 : start]
        payload = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    return opcode, is_final, payload, data[start + length :]


def _control(frames: Frames, opcode: int, payload: bytes) -> None:
    if opcode == PING:
        frames.pings.append(payload)
    elif opcode == PONG:
        frames.pongs.append(payload)
    else:
        frames.code = 1005
        if payload:
            frames.code = int.from_bytes(payload[:2], "big")
            if len(payload) == 1 or not _may_be_sent(frames.code):
                raise _Violation
            payload[2:].decode()
        frames.end = End.CLOSED


def _may_be_sent(code: int) -> bool:
    return code in (1000, 1001, 1002, 1003, *range(1007, 1015)) or 3000 <= code < 5000
