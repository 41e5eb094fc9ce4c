"""HTTP requests that choose the method by a header, for backends that allow it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.data.replica.definitions import CALL, Method
from daskserve.data.replica.servable import Servable
from daskserve.errors import BadRequestError

HEADER = b"x-serve-call-method"
#: Methods with public names that only daskserve calls.
HOOKS = frozenset({"reconfigure", "check_health"})


def named_method(servable: Servable, scope: Mapping[str, Any]) -> Method:
    """Return the method that a request's header names, ``__call__`` without the header.

    An ASGI application has no such methods; it gets the header like any other.

    Raises
    ------
    BadRequestError
        There is no public method of that name; the message lists the public methods.
    """
    call = servable.methods[CALL]
    if call.is_asgi or scope["type"] != "http":
        return call
    name = next((value.decode("latin-1") for key, value in scope["headers"] if key == HEADER), CALL)
    method = servable.methods.get(name)
    if method is None or name in HOOKS or method.is_asgi:
        found = sorted(each.name for each in servable.methods.values() if not each.is_asgi)
        raise BadRequestError(
            f"Header X-SERVE-CALL-METHOD names {name!r}, which is not a public method; choose one of: "
            f"{', '.join(each for each in found if each not in HOOKS)}."
        )
    return method
