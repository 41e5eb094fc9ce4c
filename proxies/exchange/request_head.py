"""Checks of a request's head: its host, its length, its target and its connection.

Whatever two readers could understand differently is refused: a proxy in front of this one may have taken for
one request what would be two here (request smuggling), or for another host's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

#: The limit of a request line with its headers.
MAX_HEADER_BYTES = 64 * 1024
#: The headers that are checked here.
FRAMING_HEADERS = frozenset(
    ("Host", "Connection", "Content-Length", "Transfer-Encoding", "Expect", "Upgrade")
)

_HOST = re.compile(r"(?:\[[0-9A-Fa-fvV.:]+\]|[A-Za-z0-9\-._~!$&'()*+,;=%]*)(?::[0-9]*)?")
_NO_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://[^/?#]+(.*)")
_AUTHORITY = re.compile(r"[^/?#@]+:[0-9]+")


#: The head of a request, not checked yet: method, target, version (``"HTTP/1.1"`` or ``"HTTP/1.0"``), all
#: headers with names in lower case, and those of `FRAMING_HEADERS` again, repeated values joined by commas.
RequestHead: TypeAlias = tuple[str, str, str, list[tuple[bytes, bytes]], Mapping[str, str]]


def check_host(framing: Mapping[str, str], version: str) -> None:
    """Check that a request has one valid Host header; HTTP/1.0 needs none.

    Raises
    ------
    ValueError
        The header is missing, repeated or malformed.
    """
    host = framing.get("Host")
    if host is None:
        if version != "HTTP/1.0":
            raise ValueError("A request needs a Host header.")
    elif "," in host or _HOST.fullmatch(host) is None or ("%" in host and _NO_ESCAPE.search(host)):
        raise ValueError("Host must be one name or address, with or without a port.")


def body_length(framing: Mapping[str, str], version: str) -> int | None:
    """Return the size of a request's body in bytes; None if it is chunked.

    Raises
    ------
    ValueError
        Two readers could disagree about the end of the request.
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
    """Whether a request's ``Connection`` header keeps the connection open after the response."""
    if not connection:
        return version == "HTTP/1.1"
    options = [option.strip() for option in connection.lower().split(",")]
    if version == "HTTP/1.1":
        return "close" not in options
    return version == "HTTP/1.0" and "keep-alive" in options and "close" not in options


def is_handshake(method: str, framing: Mapping[str, str]) -> bool:
    """Whether an HTTP/1.1 request asks for a WebSocket; see RFC 6455, 4.2.1."""
    is_upgrade = "upgrade" in framing.get("Connection", "").lower()
    return is_upgrade and method == "GET" and "websocket" in framing.get("Upgrade", "").lower()


def asks_to_continue(framing: Mapping[str, str], version: str) -> bool:
    """Whether the client waits for a 100 before it sends the body; HTTP/1.0 does not have that status."""
    return version != "HTTP/1.0" and framing.get("Expect", "").lower() == "100-continue"


def split_target(method: str, target: str) -> tuple[str, str]:
    """Return the path and the query of a request's target.

    Raises
    ------
    ValueError
        The target is not valid for the method.
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
