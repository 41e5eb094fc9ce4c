"""HTTP requests that choose a method by a header, for backends with ``method_header=True``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.data.replica.user_code.definitions import CALL, HOOKS, Method
from daskserve.data.replica.user_code.servable import Servable
from daskserve.errors import BadRequestError

HEADER = b"x-serve-call-method"


def named_method(servable: Servable, scope: Mapping[str, Any]) -> Method:
    """Return the method that a request's header names, or ``__call__`` without the header.

    An ASGI application gets all requests, with the header.

    Raises
    ------
    BadRequestError
        There is no public method of that name, or the header is missing and there is no ``__call__``; the
        message lists the public methods.
    """
    call = servable.methods.get(CALL)
    if call is not None and (call.is_asgi or scope["type"] != "http"):
        return call
    name = next((value.decode("latin-1") for key, value in scope["headers"] if key == HEADER), CALL)
    method = servable.methods.get(name)
    if method is None or name in HOOKS or method.is_asgi:
        problem = (
            "is missing, and there is no __call__ to answer without it"
            if name == CALL
            else f"names {name!r}, which is not a public method"
        )
        found = sorted(each.name for each in servable.methods.values() if not each.is_asgi)
        raise BadRequestError(
            f"Header X-SERVE-CALL-METHOD {problem}; choose one of: "
            f"{', '.join(each for each in found if each not in HOOKS)}."
        )
    return method


def no_call_error() -> BadRequestError:
    """Return the error for a request without the name of a method, to a class without ``__call__``."""
    return BadRequestError(
        "A class without __call__ answers HTTP requests only if its backend has the option "
        "method_header=True and the header X-SERVE-CALL-METHOD names a method."
    )
