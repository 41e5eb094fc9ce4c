"""Chunked bodies, however they are split, and invalid chunks."""

from __future__ import annotations

import pytest

from daskserve.proxies.exchange.request.chunks import ChunkReader
from daskserve.proxies.exchange.request.head import RefusedRequestError

BODY = (
    b'2;a;b="c;d"\r\nhi\r\n00004 ;x\r\n you\r\nA\r\n0123456789\r\n'
    b"0;end\r\nX-Trailer: 1\r\nContent-Length: 5\r\n\r\n"
)


def read_in(pieces: list[bytes]) -> tuple[bytes, bytes, bool]:
    """Return the data of a body that arrives in pieces, the bytes after it, and whether it has ended."""
    reader = ChunkReader()
    body = rest = b""
    for piece in pieces:
        rest += piece
        while rest and not reader.is_ended:
            data, rest = reader.read(rest)
            body += data
    return body, rest, reader.is_ended


def test_a_body_is_the_same_however_it_is_cut() -> None:
    data = BODY + b"GET /"
    for size in (1, 2, 3, 7, 1000):
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        assert read_in(pieces) == (b"hi you0123456789", b"GET /", True), size


def test_a_part_of_a_body_is_passed_on_at_once() -> None:
    for end in range(len(BODY)):
        body, rest, is_ended = read_in([BODY[:end]])
        assert b"hi you0123456789".startswith(body), end
        assert (rest, is_ended) == (b"", False), end


def test_very_many_chunks_are_read_in_several_turns() -> None:
    reader = ChunkReader()
    body, rest = reader.read(b"1\r\nx\r\n" * 10_000)
    assert 0 < len(body) < 1000
    assert len(rest) == 60_000 - 6 * len(body)


def test_invalid_chunks_are_refused() -> None:
    for data, reason in (
        (b"2\r\nhi\rX", "longer"),
        (b"2\r\nhi\n", "longer"),
        (b"2\r\nhiX", "longer"),
        (b"2\r\nhi0\r\n\r\n", "longer"),
        (b"\r\n", "hexadecimal"),
        (b"2\n", "hexadecimal"),
        (b"2;a\nb\r\n", "hexadecimal"),
        (b"2;a\rb\r\n", "hexadecimal"),
        (b"2;a\0\r\n", "hexadecimal"),
        (b"2 \r\n", "hexadecimal"),
        (b" 2\r\n", "hexadecimal"),
        (b"0x2\r\n", "hexadecimal"),
        (b"+2\r\n", "hexadecimal"),
        (b"-2\r\n", "hexadecimal"),
        (b"2_0\r\n", "hexadecimal"),
        (b"\xb2\r\n", "hexadecimal"),
        (b"1" * 16 + b"\r\n", "hexadecimal"),
        (b"2;" + b"x" * 5000, "too long"),
        (b"0\r\nX: y\n", "trailer"),
        (b"0\r\n\n", "trailer"),
        (b"0\r\nno colon\r\n", "trailer"),
        (b"0\r\nX : y\r\n", "trailer"),
        (b"0\r\n X: y\r\n", "trailer"),
        (b"0\r\nX: \0\r\n", "trailer"),
        (b"0\r\nX: y\rz\r\n", "trailer"),
        (b"0\r\n" + b"X: y\r\n" * 3000, "too long"),
        (b"0\r\nX: " + b"y" * 5000, "too long"),
    ):
        for size in (1, len(data)):
            with pytest.raises(RefusedRequestError, match=reason):
                read_in([data[start : start + size] for start in range(0, len(data), size)])
