"""Names, and routes with variables: ``/users/{name}``, ``/orders/{number:int}``, ``/files/{path:path}``.

They are written as in Starlette, except that the kind ``uuid`` is missing, because channels cannot carry its
values. ``starlette.routing.compile_path`` is not used. Its patterns match whole paths, whereas a route is a
prefix. Its numbers have any length, whereas channels carry 64 bits.

Proxies import this module, so it does not import pydantic.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from daskserve.errors import BadRequestError

#: The kinds of variables: the pattern of a value, and its type. The first match is used.
KINDS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "int": ("[0-9]{1,18}", int),
    "float": (r"[0-9]{1,18}(?:\.[0-9]{1,18})?", float),
    "str": ("[^/]+", str),
    "path": (".*", str),
}
_VARIABLE = re.compile(rf"\{{([a-zA-Z_][a-zA-Z0-9_]*)(?::({'|'.join(KINDS)}))?\}}")


def check_part_name(name: Any, what: str) -> None:
    """Raise `TypeError` or `BadRequestError` unless an application or deployment can have the name."""
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a string, got {name!r}")
    if not name:
        raise BadRequestError(f"{what} must not be empty")
    # Control characters would act on a terminal that shows the status, and half a surrogate pair cannot be
    # stored.
    if any(unicodedata.category(each) in ("Cc", "Cs") for each in name):
        raise BadRequestError(f"{what} must not have control characters, got {name!r}")


def check_route(route: Any) -> None:
    """Raise `TypeError` or `BadRequestError` unless the route is None or a valid path."""
    if route is None:
        return
    if not isinstance(route, str):
        raise TypeError(f"route_prefix must be a string or None, got {route!r}")
    if not route.startswith("/"):
        raise BadRequestError(f"route_prefix must start with '/', got {route!r}")
    if route != "/" and route.endswith("/"):
        raise BadRequestError(f"route_prefix must not end with '/', got {route!r}")
    check_variables(route, "route_prefix")
    check_not_reserved(route, "route_prefix")


def check_not_reserved(route: str, what: str) -> None:
    """Raise `BadRequestError` if a route is reserved for daskserve."""
    if route == "/-" or route.startswith("/-/"):
        raise BadRequestError(
            f"{what} must not be below '/-', which is reserved for daskserve, got {route!r}"
        )


def check_variables(route: str, what: str) -> None:
    """Raise `BadRequestError` unless all braces in a route are variables with different names."""
    if "{" in _VARIABLE.sub("", route) or "}" in _VARIABLE.sub("", route):
        raise BadRequestError(
            f"{what} has a variable that is not valid; write {{name}} or {{name:kind}}, where the kind is "
            f"one of {', '.join(KINDS)}, got {route!r}"
        )
    # With several variables in one segment, the time for a match could grow with the square of the path's
    # length.
    if any(len(_VARIABLE.findall(segment)) > 1 for segment in route.split("/")):
        raise BadRequestError(f"a segment of {what} must have one variable at most, got {route!r}")
    names = names_of(route)
    if len(set(names)) < len(names):
        raise BadRequestError(f"the variables of {what} must have different names, got {route!r}")
    if ":path}" in route.removesuffix(":path}"):
        raise BadRequestError(
            f"a variable of the kind 'path' takes the rest of a path, so it must be the end of {what}, "
            f"got {route!r}"
        )


def has_variables(route: str) -> bool:
    """Whether a route, or a segment of one, has variables."""
    return "{" in route and _VARIABLE.search(route) is not None


def shape_of(route: str) -> str:
    """Return a route without the names of its variables: routes of the same shape match the same paths."""
    return _VARIABLE.sub(lambda found: f"{{:{found[2] or 'str'}}}", route)


def names_of(route: str) -> tuple[str, ...]:
    """Return the names of a route's variables, in order."""
    return tuple(found[1] for found in map(_VARIABLE.search, route.split("/")) if found is not None)


class SegmentPattern:
    """A segment of a route with a variable, possibly with fixed text around it.

    Attributes
    ----------
    takes_rest : bool
        Whether it matches the rest of a path instead of one segment.
    rank : tuple
        Sorts segments: if several match, the first is used. Longer fixed text comes first, then the kind of
        variable that matches less.
    """

    def __init__(self, segment: str) -> None:
        before, _, kind, after = _VARIABLE.split(segment, maxsplit=1)
        kind = kind or "str"
        pattern, self._convert = KINDS[kind]
        self._regex = re.compile(f"{re.escape(before)}({pattern}){re.escape(after)}", re.DOTALL)
        self.takes_rest = kind == "path"
        self.rank = (self.takes_rest, -len(before + after), list(KINDS).index(kind), segment)

    def value(self, text: str) -> Any:
        """Return the value of the variable; None if the text does not match."""
        found = self._regex.fullmatch(text)
        return None if found is None else self._convert(found[1])
