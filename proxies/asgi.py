"""Types and constants of ASGI, and a function that sends a whole response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

from daskserve.common.types import Receive, Send

Scope: TypeAlias = MutableMapping[str, Any]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

#: The key in the scope of a request that had begun at a replica that is lost; the value is the error.
LOST_REPLICA = "daskserve.lost_replica"
REQUEST_ID = b"x-request-id"
TEXT = b"text/plain; charset=utf-8"
JSON = b"application/json"
#: Keeps browsers from guessing the type of an error's text. User code sets the headers of its own responses.
NOSNIFF = (b"x-content-type-options", b"nosniff")

# 2.4: after a disconnect `send` raises an OSError, and an application need not listen for one.
ASGI_VERSIONS: Mapping[str, str] = {"version": "3.0", "spec_version": "2.4"}


async def send_whole(
    send: Send, status: int, body: bytes, *, content_type: bytes = TEXT, headers: Headers = ()
) -> None:
    """Send a whole response, with its ``content-length``."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                NOSNIFF,
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})
