"""What the head of a request says about its end, its target and its connection.

Whatever two readers could understand differently is refused: a proxy in front of this one may have taken for
one request what would be two here (request smuggling), or for another host's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

#: A request line with headers longer than this ends the connection.
MAX_HEADER_BYTES = 64 * 1024
#: The headers that are looked at here.
FRAMING_HEADERS = frozenset(
    ("Host", "Connection", "Content-Length", "Transfer-Encoding", "Expect", "Upgrade")
)

_HOST = re.compile(r"(?:\[[0-9A-Fa-fvV.:]+\]|[A-Za-z0-9\-._~!$&'()*+,;=%]*)(?::[0-9]*)?")
_NO_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://[^/?#]+(.*)")
_AUTHORITY = re.compile(r"[^/?#@]+:[0-9]+")


class RequestHead(NamedTuple):
    """The head of a request, before anything in it was checked.

    Attributes
    ----------
    method, target, version : str
        The request line; the version is ``"HTTP/1.1"`` or ``"HTTP/1.0"``.
    headers : list of pairs
        All headers, their names in lower case.
    framing : mapping
        Those of `FRAMING_HEADERS`; the values of one that is repeated are joined by commas.
    """

    method: str
    target: str
    version: str
    headers: list[tuple[bytes, bytes]]
    framing: Mapping[str, str]


def check_host(framing: Mapping[str, str], version: str) -> None:
    """See that a request says for whom it is, once and properly.

    Raises
    ------
    ValueError
        It does not.
    """
    host = framing.get("Host")
    if host is None:
        if version != "HTTP/1.0":
            raise ValueError("A request needs a Host header.")
    elif "," in host or _HOST.fullmatch(host) is None or ("%" in host and _NO_ESCAPE.search(host)):
        raise ValueError("Host must be one name or address, with or without a port.")


def body_length(framing: Mapping[str, str], version: str) -> int | None:
    """Return the bytes of body a request announces; None if it comes in chunks.

    Raises
    ------
    ValueError
        Two readers of these headers could disagree about where the request ends.
    """
    length = framing.get("Content-Length")
    if "Transfer-Encoding" in framing:
        if length is not None or framing["Transfer-Encoding"].lower() != "chunked" or version == "HTTP/1.0":
            raise ValueError("Transfer-Encoding must be chunked, without a Content-Length, in HTTP/1.1.")
        return None
    if length is None:
        return 0
    lengths = {piece.strip(" \t") for piece in length.split(",")}
    written = lengths.pop()
    if lengths or not (written.isascii() and written.isdigit()):
        raise ValueError("Content-Length must be one number.")
    return int(written)


def keeps_alive(connection: str, version: str) -> bool:
    """Whether a request's ``Connection`` header lets the connection go on after the response."""
    if not connection:
        return version == "HTTP/1.1"
    wishes = [wish.strip() for wish in connection.lower().split(",")]
    if version == "HTTP/1.1":
        return "close" not in wishes
    return version == "HTTP/1.0" and "keep-alive" in wishes and "close" not in wishes


def is_handshake(method: str, framing: Mapping[str, str]) -> bool:
    """Whether a request in HTTP/1.1 asks for a WebSocket; see RFC 6455, 4.2.1."""
    is_upgrade = "upgrade" in framing.get("Connection", "").lower()
    return is_upgrade and method == "GET" and "websocket" in framing.get("Upgrade", "").lower()


def asks_to_continue(framing: Mapping[str, str], version: str) -> bool:
    """Whether the client waits for a 100 before it sends the body; HTTP/1.0 does not know that status."""
    return version != "HTTP/1.0" and framing.get("Expect", "").lower() == "100-continue"


def split_target(method: str, target: str) -> tuple[str, str]:
    """Return path and query of a request's target.

    Raises
    ------
    ValueError
        A request of this method cannot have this target.
    """
    if method == "CONNECT":
        if _AUTHORITY.fullmatch(target) is None:
            raise ValueError("The target of CONNECT is a host and a port.")
    elif target[:1] != "/":
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is not None:
            target = absolute[1] if absolute[1][:1] == "/" else f"/{absolute[1]}"
        elif target != "*" or method != "OPTIONS":
            raise ValueError("The target of a request is a path or a URL.")
    path, _, query = target.partition("?")
    return path, query
