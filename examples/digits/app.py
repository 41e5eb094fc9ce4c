"""The deployment: a class that trains a model when a replica starts, and answers requests with it.

It does not import daskserve. A replica creates one instance of the class, awaits it with each Starlette
``Request``, and sends the response that it returns.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from model import (
    PNG_MAGIC,
    InputError,
    classify,
    features_from_numbers,
    features_from_png,
    load_split,
    png_size,
    train,
)
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse

MAX_ITEMS = 1000
MAX_BODY_BYTES = 8 << 20
#: Maximum number of pixels of all images of a form: a thousand large images would be too much work.
MAX_PIXELS = 16 << 20
#: Requests up to this size are answered on the event loop: that takes less time than a thread switch.
INLINE_BYTES = 4096

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Upload(NamedTuple):
    """The body of a request: the parts of a form, or one part with the whole body."""

    parts: list[bytes]
    is_form: bool = False
    is_json: bool = False


class Digits:
    """Classifies images of handwritten digits.

    Accepts a PNG, a JSON array of 64 numbers (0 to 16), a JSON array of such arrays, or a multipart form with
    PNG files. Returns ``{"label": 7, "probabilities": [...]}``, or a list of such objects, in order, for an
    array of arrays and for a form. An invalid request gets ``{"error": "what was wrong"}`` with a 4xx status.
    """

    def __init__(self) -> None:
        self._model = train(load_split())

    async def __call__(self, request: Request) -> JSONResponse:
        try:
            upload = await read_upload(request)
            if sum(map(len, upload.parts)) <= INLINE_BYTES:
                return JSONResponse(self._answer(upload))
            # Decoding a large image or a thousand small ones would block the event loop for too long.
            return JSONResponse(await asyncio.to_thread(self._answer, upload))
        except InputError as error:
            return JSONResponse({"error": error.message}, status_code=error.status)

    def _answer(self, upload: Upload) -> Any:
        rows, is_list = decode(upload)
        answers = classify(self._model, np.array(rows))
        return answers if is_list else answers[0]


async def read_upload(request: Request) -> Upload:
    """Read the body of a request, up to ``MAX_BODY_BYTES``."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    bounded = Request(request.scope, _bounded(request.receive))
    if content_type == "multipart/form-data":
        return Upload(await _read_form(bounded), is_form=True)
    is_json = content_type == "application/json" or content_type.endswith("+json")
    return Upload([await bounded.body()], is_json=is_json)


def decode(upload: Upload) -> tuple[list[np.ndarray], bool]:
    """Return the features of each item, and whether the answer is a list.

    The body's first bytes decide its format, and the content type decides if they do not: curl sends
    ``application/x-www-form-urlencoded`` with everything that it posts.
    """
    if upload.is_form:
        return _decode_form(upload.parts), True
    (body,) = upload.parts
    if body.startswith(PNG_MAGIC):
        return [features_from_png(body)], False
    if upload.is_json or body.lstrip()[:1] in (b"[", b"{"):
        return _decode_json(body)
    if not body:
        raise InputError(400, "the body is empty; post a PNG, or a JSON array of 64 numbers")
    raise InputError(415, "the body is neither a PNG nor JSON nor a multipart form")


def _decode_json(body: bytes) -> tuple[list[np.ndarray], bool]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(400, f"the body is not valid JSON: {error}") from error
    if not (isinstance(values, list) and values and isinstance(values[0], list)):
        return [features_from_numbers(values)], False
    if len(values) > MAX_ITEMS:
        raise InputError(413, f"the body has {len(values)} arrays; post at most {MAX_ITEMS} in one request")
    return [_located(f"array {i}", features_from_numbers, row) for i, row in enumerate(values)], True


def _decode_form(parts: list[bytes]) -> list[np.ndarray]:
    sizes = [_located(f"file {i}", _form_png_size, part) for i, part in enumerate(parts)]
    pixels = sum(width * height for width, height in sizes)
    if pixels > MAX_PIXELS:
        raise InputError(413, f"the files have {pixels} pixels in total; post at most {MAX_PIXELS}")
    return [_located(f"file {i}", features_from_png, part) for i, part in enumerate(parts)]


def _form_png_size(part: bytes) -> tuple[int, int]:
    if not part.startswith(PNG_MAGIC):
        raise InputError(415, "not a PNG")
    return png_size(part)


def _located(where: str, read: Callable[[Any], T], value: Any) -> T:
    """Convert one of several items; an error names the item."""
    try:
        return read(value)
    except InputError as error:
        raise InputError(error.status, f"{where}: {error.message}") from error


async def _read_form(request: Request) -> list[bytes]:
    try:
        async with request.form(max_files=MAX_ITEMS, max_fields=MAX_ITEMS) as form:
            parts = form.multi_items()
            for name, value in parts:
                if not isinstance(value, UploadFile):
                    raise InputError(422, f"form field {name!r} is not a file")
            files = [await value.read() for _, value in parts if isinstance(value, UploadFile)]
    except (MultiPartException, HTTPException) as error:
        message = error.message if isinstance(error, MultiPartException) else error.detail
        is_too_much = message.startswith("Too many") or "exceeded" in message
        raise InputError(413 if is_too_much else 400, f"the form cannot be read: {message}") from error
    if not files:
        raise InputError(422, "the form contains no file; post at least one PNG")
    return files


def _bounded(receive: Receive) -> Receive:
    """Return a ``receive`` that raises once the body exceeds ``MAX_BODY_BYTES``."""
    seen = 0

    async def receive_bounded() -> MutableMapping[str, Any]:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY_BYTES:
            raise InputError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        return message

    return receive_bounded
