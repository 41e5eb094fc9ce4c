"""A table of raw requests, and what a connection must make of them.

Each case has a name, the bytes, the statuses of the responses, and the requests that the application sees,
with their bodies. What follows the bytes on the connection is part of the case: after a request that is
refused, a smuggled one that must never be seen; otherwise one that must be, which shows that both sides still
agree where a request begins.

The cases are in `raw_heads` (what each line of a head may be), `raw_bodies` (where a request ends) and
`raw_moments` (what is huge, slow or early).
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
    """One connection's worth of bytes.

    Attributes
    ----------
    name : str
        What is special about the bytes.
    data : bytes
        What the client sends.
    statuses : tuple of int
        The responses, ``100 Continue`` left out.
    seen : tuple
        The requests that the application sees: method and target, and the body; None for one that it does not
        get whole.
    stops : tuple
        After how many bytes the client pauses, and for how many seconds.
    is_closed : bool
        Whether the server ends the connection before it is idle for too long.
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
    """Return a head of these lines; ``host=b""`` leaves that out."""
    return b"\r\n".join([each for each in (first, host, *lines) if each] + [b"", b""])


def refused(name: str, data: bytes, status: int = 400) -> RawCase:
    """Return the case of a request that is refused, with all that follows it."""
    return RawCase(name, data + SMUGGLED, (status,))


def served(
    name: str, data: bytes, *seen: tuple[bytes, bytes | None], statuses: tuple[int, ...] = ()
) -> RawCase:
    """Return the case of requests that are served, with the one that follows them."""
    return RawCase(
        name, data + LAST, (*(statuses or (200,) * len(seen)), 200), (*seen, (b"GET /echo?last", b""))
    )


def shown(data: bytes) -> str:
    """Return bytes as a part of a name."""
    return data.decode("latin-1").encode("unicode_escape").decode("ascii")
