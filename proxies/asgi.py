"""Names of ASGI, and functions for whole responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

from daskserve.common.types import WHOLE_RESPONSE, Message, Receive, Send

Scope: TypeAlias = MutableMapping[str, Any]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

REQUEST_ID = b"x-request-id"
TEXT = b"text/plain; charset=utf-8"
JSON = b"application/json"
#: A browser takes the text of an error for nothing else. User code sets the headers of its own responses.
NOSNIFF = (b"x-content-type-options", b"nosniff")

# 2.4: after a disconnect `send` raises an OSError, and an application need not listen for one.
ASGI_VERSIONS: Mapping[str, str] = {"version": "3.0", "spec_version": "2.4"}


async def send_whole(
    send: Send, status: int, body: bytes, *, content_type: bytes = TEXT, headers: Headers = ()
) -> None:
    """Send a complete response that daskserve makes, with its ``content-length``."""
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


def begin_response(held: Message | None, message: Message) -> tuple[Message, Message | None]:
    """Return the start of a response, and what to send now.

    The receiver of a response's messages keeps the start, and passes it on with the first part of the body:
    until then a failure can still become an error response.

    Parameters
    ----------
    held : Message or None
        What was returned before as the start of the same response.
    message : Message
        An ``http.response.start``, after which there is nothing to send yet, or a
        `daskserve.common.types.WHOLE_RESPONSE`, which becomes a start and a body.

    Raises
    ------
    RuntimeError
        The response was started before.
    """
    if held is not None:
        raise RuntimeError("a response was started a second time")
    if message["type"] != WHOLE_RESPONSE:
        return message, None
    return split_whole(message)


def split_whole(message: Message) -> tuple[Message, Message]:
    """Return the two messages of ASGI for a `daskserve.common.types.WHOLE_RESPONSE`."""
    status, body = message["status"], message["body"]
    headers = list(message["headers"])
    names = {name.lower() for name, _ in headers}
    if b"content-length" not in names and b"transfer-encoding" not in names and status not in (204, 304):
        headers.append((b"content-length", b"%d" % len(body)))
    if "request_id" in message and REQUEST_ID not in names:
        headers.append((REQUEST_ID, message["request_id"]))
    start = {"type": "http.response.start", "status": status, "headers": headers}
    return start, {"type": "http.response.body", "body": body}
