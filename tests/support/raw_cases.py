"""A table of raw requests, with the required responses and effects.

Each case has a name, the bytes, the statuses of the responses, and the requests that the application sees,
with their bodies. A refused request is followed by a smuggled one, which the application must never see. Any
other request is followed by one that it must see: then both sides still agree where a request begins.

The cases are in `raw_heads` (the lines of a head), `raw_bodies` (the end of a request) and `raw_moments`
(huge, slow and early data).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fuzz_requests import SMUGGLED

#: The limits of heads in these cases.
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100

LAST = b"GET /echo?last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked"


@dataclass(frozen=True)
class RawCase:
    """The bytes of one connection, and the required result.

    Attributes
    ----------
    name : str
        The property of the bytes that the case tests.
    data : bytes
        The bytes that the client sends.
    statuses : tuple of int
        The statuses of the responses, without ``100 Continue``.
    seen : tuple
        The requests that the application sees: method and target, and the body, which is None if it is
        incomplete.
    stops : tuple
        The positions at which the client pauses, each with its pause in seconds.
    is_closed : bool
        Whether the server closes the connection before the idle timeout.
    is_cut : bool
        Whether the last response is incomplete.
    """

    name: str
    data: bytes = field(repr=False)
    statuses: tuple[int, ...]
    seen: tuple[tuple[bytes, bytes | None], ...] = ()
    stops: tuple[tuple[int, float], ...] = ()
    is_closed: bool = True
    is_cut: bool = False


#: The lines of the handshake of a WebSocket.
HANDSHAKE = (
    b"Connection: Upgrade",
    b"Upgrade: websocket",
    b"Sec-WebSocket-Version: 13",
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


def head(*lines: bytes, first: bytes = b"POST /echo HTTP/1.1", host: bytes = b"Host: a") -> bytes:
    """Return a head with these lines; ``host=b""`` omits the host."""
    return b"\r\n".join([each for each in (first, host, *lines) if each] + [b"", b""])


def refused(name: str, data: bytes, status: int = 400) -> RawCase:
    """Return the case of a refused request, followed by a smuggled one."""
    return RawCase(name, data + SMUGGLED, (status,))


def served(
    name: str, data: bytes, *seen: tuple[bytes, bytes | None], statuses: tuple[int, ...] = ()
) -> RawCase:
    """Return the case of requests that are served, followed by another one."""
    return RawCase(
        name, data + LAST, (*(statuses or (200,) * len(seen)), 200), (*seen, (b"GET /echo?last", b""))
    )


def shown(data: bytes) -> str:
    """Return bytes as a part of a name."""
    return data.decode("latin-1").encode("unicode_escape").decode("ascii")
