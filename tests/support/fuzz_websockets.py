"""Bad input for a WebSocket: handshakes and frames, valid or not."""

from __future__ import annotations

from collections.abc import Callable

from fuzz_requests import Delivery, damaged, delivered
from hypothesis import strategies as st
from raw_cases import HANDSHAKE

LINES = [b"Host: test", *HANDSHAKE]
HEADERS = [
    b"Connection: close",
    b"Connection: keep-alive, Upgrade",
    b"Upgrade: h2c, websocket",
    b"Upgrade: WEBSOCKET",
    b"Sec-WebSocket-Version: 12",
    b"Sec-WebSocket-Version: \xff",
    b"Sec-WebSocket-Key: short",
    b"Sec-WebSocket-Key: " + b"A" * 9000,
    b"Sec-WebSocket-Protocol: a, b",
    b"Sec-WebSocket-Protocol: ,,\xff;",
    b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits",
    b"Sec-WebSocket-Extensions: ;=,\xff",
    b"Sec-WebSocket-Accept: x",
    b"Content-Length: 5",
    b"Transfer-Encoding: chunked",
    b"Origin: null",
    b"Connection: Upgrade, \xff",
    b"Host: a..b",
    b"Expect: 100-continue",
]
FIRST_LINES = [
    b"GET /socket HTTP/1.1",
    b"GET / HTTP/1.1",
    b"GET /-/healthz HTTP/1.1",
    b"GET /socket HTTP/1.0",
    b"POST /socket HTTP/1.1",
    b"GET /socket/\xff%ff?\xff HTTP/1.1",
    b"GET http://test/socket HTTP/1.1",
]
PAYLOADS = [
    b"",
    b"hello",
    "grüße 🎈".encode(),
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xf0\x9f\x8e",
    b"\x03\xe8",
    b"\x03\xe8bye",
    b"\x03\xe8\xff",
    b"\x03\xed",
    b"\x03\xee",
    b"\x00\x00",
    b"\x0f\xa0",
    b"\xff\xff",
    b"\x03",
    b"x" * 125,
    b"x" * 126,
    b"x" * 40_000,
    b"x" * 70_000,
]


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    is_final: bool = True,
    reserved: int = 0,
    mask: bytes | None = b"mask",
    length: str = "shortest",
) -> bytes:
    """Return a client's frame, which may be invalid."""
    first = (0x80 if is_final else 0) | reserved << 4 | opcode
    masked = 0x80 if mask else 0
    size = len(payload)
    if length == "endless":
        head = bytes((first, masked | 127)) + ((1 << 62) + size).to_bytes(8, "big")
    elif length == "negative":
        head = bytes((first, masked | 127)) + ((1 << 63) + size).to_bytes(8, "big")
    elif length == "long" or size > 65535:
        head = bytes((first, masked | 127)) + size.to_bytes(8, "big")
    elif length == "medium" or size > 125:
        head = bytes((first, masked | 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((first, masked | size))
    if mask:
        payload = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    return head + (mask or b"") + payload


_MANY = st.tuples(
    st.sampled_from([50, 2000]),
    st.sampled_from([frame(0, is_final=False), frame(9), frame(2, b"x"), frame(10, b"x")]),
)
_KINDS = st.integers(0, 11)
_USUAL, _ANY = st.sampled_from([1, 2, 1, 2, 1, 2, 0, 8, 9, 10]), st.integers(0, 15)
_PAYLOADS = st.one_of(st.sampled_from(PAYLOADS), st.binary(max_size=20))
_FINAL = st.sampled_from([True, True, True, False])
_RESERVED = st.sampled_from([0] * 15 + [1, 2, 4])
_MASKS = st.sampled_from([b"mask"] * 8 + [b"\0\0\0\0", None])
_LENGTHS = st.sampled_from(["shortest"] * 12 + ["medium", "long", "endless", "negative"])


@st.composite
def frames(draw: Callable[..., object]) -> bytes:
    """One frame, usually valid, or many small ones."""
    kind = draw(_KINDS)
    if kind == 0:
        count, part = draw(_MANY)
        return frame(2, b"x", is_final=False) * (part[0] == 0) + part * count
    return frame(
        draw(_USUAL if kind < 10 else _ANY),
        draw(_PAYLOADS),
        is_final=draw(_FINAL),
        reserved=draw(_RESERVED),
        mask=draw(_MASKS),
        length=draw(_LENGTHS),
    )


@st.composite
def conversations(draw: Callable[..., object]) -> Delivery:
    """A handshake and some frames."""
    lines = [FIRST_LINES[0], *LINES]
    if draw(_SOMETIMES):
        lines[0], lost, added = draw(_CHANGES)
        if lost:
            lines.pop(lost)
        lines += added
    handshake = b"\r\n".join([*lines, b"", b""])
    sent = b"".join(draw(_SEVERAL_FRAMES))
    if draw(_SOMETIMES):
        sent = damaged(draw, sent)
    return delivered(draw, handshake + sent)


_SOMETIMES = st.sampled_from([False, False, False, True])
_SEVERAL_FRAMES = st.lists(frames(), max_size=6)
_CHANGES = st.tuples(
    st.sampled_from(FIRST_LINES),
    st.sampled_from([0] * len(LINES) + list(range(1, len(LINES) + 1))),
    st.lists(st.sampled_from(HEADERS), max_size=2),
)
