"""HTTP requests that name the method which is to answer them, for backends that allow it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.data.replica.definitions import CALL, Method
from daskserve.data.replica.servable import Servable
from daskserve.errors import BadRequestError

HEADER = b"x-serve-call-method"
#: Public by name, but for daskserve to call, not for everybody who can send a request.
HOOKS = frozenset({"reconfigure", "check_health"})


def named_method(servable: Servable, scope: Mapping[str, Any]) -> Method:
    """Return the method that a request's header names, ``__call__`` without the header.

    ASGI applications have no methods for requests: there the header is the application's own affair.

    Raises
    ------
    BadRequestError
        There is no public method of that name; the message lists those that there are.
    """
    call = servable.methods[CALL]
    if call.is_asgi or scope["type"] != "http":
        return call
    name = next((value.decode("latin-1") for key, value in scope["headers"] if key == HEADER), CALL)
    method = servable.methods.get(name)
    if method is None or name in HOOKS or method.is_asgi:
        found = sorted(each.name for each in servable.methods.values() if not each.is_asgi)
        raise BadRequestError(
            f"Header X-SERVE-CALL-METHOD names {name!r}, which is no public method here; there are: "
            f"{', '.join(each for each in found if each not in HOOKS)}."
        )
    return method
