"""A parsed request to the REST API, and an answer that is not JSON. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daskserve.errors import BadRequestError

#: Pattern of a number in a request that fits into 64 bits.
NUMBER = re.compile("[0-9]{1,18}")
#: Maximum number of characters of an invalid value that an error shows.
MAX_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Document:
    """An answer that is not JSON.

    Attributes
    ----------
    policy : str
        Its Content-Security-Policy.
    """

    content_type: str
    text: str
    policy: str = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True, slots=True)
class APIRequest:
    """A parsed request.

    Attributes
    ----------
    path : dict
        The names in the path.
    query : dict
        The last value of each parameter.
    expected : int or None
        The version in ``If-Match``.
    by : str
        The client, for the history.
    """

    path: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes = b""
    content_type: str = ""
    expected: int | None = None
    by: str = ""

    def flag(self, name: str) -> bool:
        """Return a parameter that is true or false."""
        value = self.query.get(name, "false").lower()
        if value not in ("true", "false", "1", "0", ""):
            raise BadRequestError(f"The parameter {name}={value!r} must be true or false.")
        return value in ("true", "1", "")

    def number(self, name: str) -> int | None:
        """Return a parameter that is a number; None if it is missing."""
        value = self.query.get(name)
        if value is None:
            return None
        if not NUMBER.fullmatch(value):
            raise BadRequestError(
                f"The parameter {name}={value[:MAX_SHOWN]!r} must be a whole number from 0, "
                "of at most 18 digits."
            )
        return int(value)

    def fields(self, *known: str) -> Mapping[str, Any]:
        """Return the fields of a body, which may be empty; raise `BadRequestError` for an unknown one."""
        try:
            found = json.loads(self.body or b"{}")
        except (ValueError, RecursionError):
            raise BadRequestError("the body is not JSON") from None
        if not isinstance(found, dict):
            raise BadRequestError("the body must be a JSON object")
        unknown = [each for each in found if each not in known]
        if unknown:
            text = f"the body has no field {unknown[0][:MAX_SHOWN]!r}; there are: {', '.join(known)}"
            raise BadRequestError(text)
        return found
