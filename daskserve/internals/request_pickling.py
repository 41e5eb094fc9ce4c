"""Starlette's requests as arguments of calls: pickling them, after reading their bodies if necessary.

The connection is not pickled. The pickle holds the values of the scope that can be pickled, and the body or
the form that code has read. If the body has not been read, `read_ahead` reads it first.
"""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from starlette.datastructures import FormData, Headers, UploadFile
from starlette.requests import ClientDisconnect, Request, empty_receive

from daskserve.errors import PassedResponseError, UnpicklableError
from daskserve.internals.checking import needs

with needs("starlette", ">=0.42,<2") as check:
    check.fields(Request, "_receive", "_stream_consumed", "_form")
    check.constants(Request.body, "_body")

#: The items of a scope that belong to the application that answers the request.
_OF_THE_APP = frozenset({"app", "router", "endpoint", "route"})
_OF_LIBRARIES = ("daskserve.", "fastapi_", "starlette.")
#: A form without open files: names, each with a string, or with a file's name, content and headers.
PlainForm: TypeAlias = list[tuple[str, str | tuple[str | None, bytes, list[tuple[bytes, bytes]]]]]
_NO_BODY = object()


def is_unread(value: Any) -> bool:
    """Return whether a value is a request whose body or form no code has read."""
    return isinstance(value, Request) and not _is_read(value)


def _is_read(request: Request) -> bool:
    return _body_of(request) is not None or request._form is not None or _is_streamed(request)


def _body_of(request: Request) -> bytes | None:
    found: bytes | None = getattr(request, "_body", None)
    if found is None:
        found = getattr(request, "whole_body", None)
    # A request without a connection, as in a test, has no body that could still arrive.
    return b"" if found is None and request._receive is empty_receive else found


def _is_streamed(request: Request) -> bool:
    return request._stream_consumed or getattr(request, "is_streamed", False)


def reduce_request(request: Request, rebuild: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the result of ``__reduce__`` for a request: a function, and the scope, the body and the form.

    Raises
    ------
    PassedResponseError
        No code has read the body, and only the event loop of the request can.
    UnpicklableError
        The body was streamed, so its parts are gone.
    """
    body = _body_of(request)
    form = None if request._form is None else _plain_form(request._form)
    if body is None and form is None:
        if not _is_streamed(request):
            raise PassedResponseError(
                "The body of the request has not been read, and cannot be pickled. Await request.body() "
                "first, or pass the request to the remote() of a handle."
            )
        raise UnpicklableError(
            "The body of the request was read by stream(), so it cannot be passed on. Read it with "
            "request.body() instead, or pass on only the parts that you need."
        )
    return rebuild, (_plain_scope(request.scope), body, form)


def _plain_scope(scope: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        name: value
        for name, value in scope.items()
        if name not in _OF_THE_APP and not name.startswith(_OF_LIBRARIES)
    }
    state = found.pop("state", None)
    plain = {name: value for name, value in found.items() if _is_plain(value)}
    if isinstance(state, Mapping):
        plain["state"] = {name: value for name, value in state.items() if _is_plain(value)}
    return plain


def _is_plain(value: Any) -> bool:
    try:
        pickle.dumps(value, protocol=5)
    except Exception:  # a foreign object may raise anything; leave it out
        return False
    return True


def _plain_form(form: FormData) -> PlainForm:
    return [
        (name, value if isinstance(value, str) else _plain_file(value)) for name, value in form.multi_items()
    ]


def _plain_file(upload: UploadFile) -> tuple[str | None, bytes, list[tuple[bytes, bytes]]]:
    file, place = upload.file, upload.file.tell()
    file.seek(0)
    content = file.read()
    file.seek(place)
    return upload.filename, content, upload.headers.raw


def set_form(request: Request, form: PlainForm) -> None:
    """Give a rebuilt request its pickled form, instead of a body that can be read."""
    items = [(name, value if isinstance(value, str) else _file_of(*value)) for name, value in form]
    request._form = FormData(items)
    request._stream_consumed = not hasattr(request, "_body")


def _file_of(filename: str | None, content: bytes, headers: list[tuple[bytes, bytes]]) -> UploadFile:
    return UploadFile(io.BytesIO(content), size=len(content), filename=filename, headers=Headers(raw=headers))


def read_ahead(request: Request) -> asyncio.Task[None]:
    """Start to read the whole body of an unread request, and return the task; runs on the request's loop.

    Other code that reads the request waits for the task, and gets the same body.
    """
    receive, body = request._receive, _NO_BODY

    async def read() -> None:
        nonlocal body
        joined = io.BytesIO()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            joined.write(message.get("body", b""))
            if not message.get("more_body", False):
                break
        body = joined.getvalue()
        if not _is_read(request):
            request._body = body

    async def replay() -> MutableMapping[str, Any]:
        nonlocal body
        if not task.done():
            await asyncio.wait([task])
        if body is _NO_BODY:
            return await receive()
        message = {"type": "http.request", "body": body, "more_body": False}
        body = _NO_BODY
        return message

    request._receive = replay
    task = asyncio.get_running_loop().create_task(read())
    return task
