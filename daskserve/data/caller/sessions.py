"""The session of an HTTP request, read from the header or cookie that an option names."""

from __future__ import annotations

from collections.abc import Iterable

#: Longer names of sessions are truncated.
MAX_SESSION = 1024


def session_in(headers: Iterable[tuple[bytes, bytes]], place: str) -> str:
    """Return the name of an HTTP request's session, by ``"header:NAME"`` or ``"cookie:NAME"``.

    Empty if the request has no such header or cookie.
    """
    kind, _, name = place.partition(":")
    wanted = b"cookie" if kind == "cookie" else name.lower().encode()
    value = next((value for each, value in headers if each == wanted), b"").decode("latin-1")
    return (_cookie(value, name) if kind == "cookie" else value)[:MAX_SESSION]


def _cookie(header: str, name: str) -> str:
    """Return the value of a cookie.

    Browsers send values that no RFC allows, such as JSON. Because of one such value, `http.cookies` would
    drop all cookies.
    """
    for part in header.split(";"):
        known, _, value = part.partition("=")
        if known.strip() == name:
            return value.strip().strip('"')
    return ""
