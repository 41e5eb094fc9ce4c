"""Errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ValidationError

from daskserve.common.formatting import whole_seconds
from daskserve.errors import (
    BackPressureError,
    BadRequestError,
    NotFoundError,
    RequestTimeoutError,
    UnavailableError,
)


class InvalidRequestError(BadRequestError):
    """The request is wrong: ``param`` names the field. Engines may also raise it."""

    default_code: ClassVar[str | None] = None

    def __init__(self, message: str = "", *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or self.default_code


class ContextLengthError(InvalidRequestError):
    """The prompt and the requested tokens exceed the context length of the model."""

    default_code = "context_length_exceeded"


class UnsupportedMediaTypeError(InvalidRequestError):
    """The Content-Type of the body is not JSON."""

    http_status = 415


class ModelNotFoundError(NotFoundError):
    """There is no model or adapter of this name. Engines raise this for adapters that they do not have."""


def error_answer(error: BaseException, request_id: str) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """Return the status, the body and the headers of an error, without internals."""
    if isinstance(error, (InvalidRequestError, ModelNotFoundError)):
        code = "model_not_found" if isinstance(error, ModelNotFoundError) else error.code
        param = "model" if isinstance(error, ModelNotFoundError) else error.param
        return error.http_status, error_body(str(error), "invalid_request_error", param, code), {}
    if isinstance(error, BadRequestError):
        return 400, error_body(str(error), "invalid_request_error"), {}
    if isinstance(error, BackPressureError):
        seconds = whole_seconds(error.retry_after_s)
        retry = {} if seconds is None else {"retry-after": str(seconds)}
        return (
            503,
            error_body(f"The model is overloaded. {error}", "overloaded_error", code="overloaded"),
            retry,
        )
    if isinstance(error, UnavailableError):
        why = str(error) if error.is_public else f"Request {request_id} failed: {error.public_reason}."
        retry = {} if error.http_status == 502 else {"retry-after": "1"}
        return error.http_status, error_body(why, "server_error", code="unavailable"), retry
    if isinstance(error, RequestTimeoutError):
        return 408, error_body(str(error), "timeout_error", code="timeout"), {}
    text = f"The model has failed; the log has the error under the request id {request_id}."
    return 500, error_body(text, "server_error"), {}


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid_request(error: ValidationError) -> InvalidRequestError:
    """Return the error for an invalid body: the first fault, with the name of its field."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    # If a field may have several types, the fault of the matching type is more helpful.
    field = faults[0]["loc"][:1]
    fault = next((e for e in faults if e["loc"][:1] == field and not e["type"].endswith("_type")), faults[0])
    param = _path_of(fault["loc"])
    if fault["type"] == "missing":
        text, code = f"Missing required parameter: '{param}'.", "missing_required_parameter"
    elif not param:
        text, code = f"The body is not valid JSON: {fault['msg']}.", None
    else:
        is_type = fault["type"].endswith("_type")
        text = f"Invalid {'type' if is_type else 'value'} for '{param}': {fault['msg']}."
        code = "invalid_type" if is_type else "invalid_value"
    return InvalidRequestError(text, param=param or None, code=code)


def _path_of(location: tuple[int | str, ...]) -> str:
    """Return the path to a field, ``messages[0].role``, without pydantic's names of types such as ``str``."""
    path = ""
    for each in location:
        if isinstance(each, int):
            path += f"[{each}]"
        elif not path:
            path = each
        elif each.isidentifier() and each not in ("str", "int", "float", "bool", "dict"):
            path += f".{each}"
    return path
