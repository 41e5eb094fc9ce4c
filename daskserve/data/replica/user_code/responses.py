"""Converts the results and errors of user code to HTTP responses.

All functions run where user code runs, because writing a large data frame as JSON takes long.

=====================================  =================================================
``None``                               empty, ``text/plain``
``bytes`` and the like                 as they are, ``application/octet-stream``
``str``                                ``text/plain; charset=utf-8``
Starlette ``Response``                 as it is: headers, cookies, streaming, background task
generator, async generator             streamed as it is produced, ``text/plain; charset=utf-8``
anything else                          JSON, ``application/json``
=====================================  =================================================
"""

from __future__ import annotations

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Generator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from daskserve.common.types import WHOLE_RESPONSE, Message, Payload
from daskserve.context import current_request
from daskserve.data.replica.errors.log import NOT_FAILURES
from daskserve.data.replica.execution.message_pipe import MessagePipe
from daskserve.data.replica.user_code.json import to_json
from daskserve.errors import StreamOptionError, UserCodeError
from daskserve.payload.error_text import text_of
from daskserve.payload.packed_errors import PackedError
from daskserve.payload.pickling import dump
from daskserve.payload.serialization import serialize
from daskserve.payload.unpicklable import path_to, shown

OCTETS = b"application/octet-stream"
TEXT = b"text/plain; charset=utf-8"
EMPTY = b"text/plain"
JSON = b"application/json"


@dataclass(slots=True)
class ConvertedResponse:
    """A whole response; its message is None if it has already been sent."""

    message: Message | None = None
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A result that takes another step: an awaitable, a generator, or a response that sends itself."""

    result: Any

    @property
    def is_stream(self) -> bool:
        """Whether the result is a generator."""
        return isinstance(self.result, (Generator, AsyncGenerator))

    @property
    def needs_thread(self) -> bool:
        """Whether the next step is plain code, which may block."""
        return isinstance(self.result, Generator)


# Always the same tuple objects, because the server caches the bytes that it writes for them.
_PLAIN_HEADERS: Mapping[bytes, tuple[tuple[bytes, bytes], ...]] = {
    kind: ((b"content-type", kind),) for kind in (OCTETS, TEXT, EMPTY, JSON)
}
_TEXT_HEADERS = _PLAIN_HEADERS[TEXT]
_SIMPLE = frozenset({str, bytes, dict, list, int, float, bool, type(None)})
_END = object()


# ---- results


def to_response(result: Any) -> ConvertedResponse | Unfinished:
    """Return the response for a result, or the result as `Unfinished` if it takes another step.

    Raises
    ------
    UserCodeError
        The result cannot be written as JSON; the message names its type.
    """
    kind = type(result)
    if kind is str:
        body = result.encode()
        return ConvertedResponse(
            {"type": WHOLE_RESPONSE, "status": 200, "headers": _TEXT_HEADERS, "body": body}
        )
    if kind in _SIMPLE:
        content_type, body = encode(result)
        return _whole(200, _PLAIN_HEADERS[content_type], body)
    if isinstance(result, Response):
        # Subclasses that only render differently are whole responses; other subclasses send themselves.
        if type(result).__call__ is not Response.__call__ or result.background is not None:
            return Unfinished(result)
        body = bytes(result.body)
        length = (b"content-length", b"%d" % len(body))
        return _whole(
            result.status_code, tuple([each for each in result.raw_headers if each != length]), body
        )
    if isinstance(result, (Generator, AsyncIterator)) or inspect.isawaitable(result):
        return Unfinished(result)
    content_type, body = encode(result)
    return _whole(200, _PLAIN_HEADERS[content_type], body)


async def finish(
    scope: MutableMapping[str, Any], pipe: MessagePipe, result: Any
) -> ConvertedResponse | Unfinished:
    """Send an unfinished result from the user-code loop; await an awaitable, and convert its result."""
    try:
        if isinstance(result, Response):
            await result(scope, pipe.receive, pipe.send)
        elif inspect.isawaitable(result):
            return to_response(await result)
        else:
            await _stream(result, pipe)
        return ConvertedResponse()
    except NOT_FAILURES as error:
        failure = mistaken_error(error) or error
        if failure is error and not pipe.is_started:
            return raised_response(error)
    try:
        raise failure
    finally:
        del failure  # otherwise the traceback refers to this frame, and this frame to the error


async def _stream(chunks: AsyncIterator[Any], pipe: MessagePipe) -> None:
    # The first chunk is computed before the start: an error up to that point can still be answered.
    chunk = await anext(chunks, _END)
    try:
        await pipe.send(_stream_start())
        while chunk is not _END:
            await pipe.send(_stream_chunk(chunk))
            chunk = await anext(chunks, _END)
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()
    await pipe.send(_stream_end())


def finish_in_thread(result: Generator[Any, Any, Any], pipe: MessagePipe) -> ConvertedResponse:
    """Send the chunks of a plain generator, and block this thread while the client is slow."""
    try:
        chunk = next(result, _END)
        is_wanted = pipe.send_from_thread(_stream_start())
        try:
            while is_wanted and chunk is not _END:
                is_wanted = pipe.send_from_thread(_stream_chunk(chunk))
                chunk = next(result, _END) if is_wanted else _END
        finally:
            result.close()
        pipe.send_from_thread(_stream_end())
    except NOT_FAILURES as error:
        if pipe.is_started:
            raise
        return raised_response(error)
    return ConvertedResponse()


def dump_result(name: str, result: Any, serialization: str = "") -> Payload:
    """Pickle the result of a Python call, with the serialization of the current request by default.

    Raises
    ------
    UserCodeError
        It cannot be pickled; the message names its type.
    StreamOptionError
        It is a generator.
    """
    if not serialization:
        request = current_request.get()
        if request is not None:
            serialization = request.response_serialization
    try:
        return serialize(serialization, result) if serialization else dump(result)
    except Exception as error:
        if isinstance(result, (Generator, AsyncGenerator)):
            raise StreamOptionError(
                f"{name} is a generator; call it with handle.options(stream=True)."
            ) from None
        place = shown(path_to(result, [("", result)]))
        raise UserCodeError(
            f"{name} returned a {_name(result)}, which cannot be pickled for the caller: "
            f"{text_of(error)}{place and f' ({place})'}"
        ) from error


def encode(result: Any) -> tuple[bytes, bytes]:
    """Return the content type and the body for a plain result."""
    if isinstance(result, str):
        return TEXT, result.encode()
    if result is None:
        return EMPTY, b""
    if isinstance(result, (bytes, bytearray, memoryview)):
        return OCTETS, bytes(result)
    return JSON, to_json(result)


def _whole(status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> ConvertedResponse:
    return ConvertedResponse({"type": WHOLE_RESPONSE, "status": status, "headers": headers, "body": body})


def _stream_start() -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", TEXT)]}


def _stream_chunk(chunk: Any) -> Message:
    return {"type": "http.response.body", "body": encode(chunk)[1], "more_body": True}


def _stream_end() -> Message:
    return {"type": "http.response.body", "body": b"", "more_body": False}


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# ---- errors


def mistaken_error(error: Exception) -> OSError | None:
    """Return the `OSError` of user code that Starlette has mistaken for a disconnect of the client."""
    context = error.__context__
    return context if isinstance(error, ClientDisconnect) and isinstance(context, OSError) else None


def raised_response(error: Exception) -> ConvertedResponse:
    """Return the response for one of `NOT_FAILURES` that user code has raised."""
    if isinstance(error, ClientDisconnect):
        return _whole(400, _TEXT_HEADERS, b"")  # the client has left
    assert isinstance(error, HTTPException)
    body = str(error.detail or "").encode()
    extra = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in (error.headers or {}).items()]
    if error.status_code in (204, 304):
        return _whole(error.status_code, extra, b"")
    return _whole(error.status_code, (*_TEXT_HEADERS, *extra), body)


def failed_response(error: PackedError, *, is_debug: bool) -> ConvertedResponse:
    """Return the response for an error of user code, with its traceback if ``is_debug``."""
    text = f"Task Error. Traceback: {error.text}" if is_debug else "Internal Server Error"
    answer = _whole(500, _TEXT_HEADERS, text.encode("utf-8", "replace"))
    answer.is_failure = True
    return answer
