"""The HTTP responses to errors.

1. `BackPressureError`: 503, with its delay as ``Retry-After``.
2. `ActorLostError` and `QuarantinedError`: 502; the caller decides whether to send the request again.
3. Other `UnavailableError`: 503, ``Retry-After: 1``.
4. Other errors of daskserve with a status below 500: their status and message.
5. All other errors, including those of user code: 500 without details; with ``debug``, the traceback.

The messages of 2 and 3 are for operators, and may contain addresses and names of replicas. Clients get the
reason and the id of the request; the log has the message under this id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daskserve.common.formatting import whole_seconds
from daskserve.errors import BackPressureError, UnavailableError, http_status_of
from daskserve.payload.packed_errors import known_of, packed_here
from daskserve.proxies.asgi import Headers


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A plain-text response.

    ``is_fault`` marks an error that should be investigated, as opposed to an error caused by load.
    ``hides_message`` marks a text that is not the error's message.
    """

    status: int
    text: str
    headers: Headers = ()
    is_fault: bool = False
    hides_message: bool = False


def reply_to(error: BaseException, request_id: str, *, debug: bool = False) -> ErrorReply:
    """Return the response to an error that occurred before a response started."""
    raised, error = error, known_of(error)
    status = http_status_of(error)
    if isinstance(error, BackPressureError):
        return ErrorReply(status, str(error), _retry_after(error.retry_after_s))
    if isinstance(error, UnavailableError):
        headers = () if status == 502 else _retry_after(1)
        if debug or error.is_public:
            return ErrorReply(status, str(error), headers)
        text = f"Request {request_id} failed: {error.public_reason}."
        return ErrorReply(status, text, headers, hides_message=True)
    if status < 500:
        return ErrorReply(status, str(error))
    text = packed_here(raised).text if debug else "Internal Server Error"
    return ErrorReply(500, text, is_fault=True)


def _retry_after(delay_s: Any) -> Headers:
    # User code may raise the error with any value.
    seconds = whole_seconds(delay_s)
    return () if seconds is None else ((b"retry-after", b"%d" % seconds),)
