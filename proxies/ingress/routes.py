"""Finds the endpoint for a path.

A lookup walks the segments of the path from the left, and remembers the last route it found. Its cost depends
on the segments of the deepest route only, not on the number of routes or the length of the path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Route:
    """A path prefix and its endpoint. ``route`` has no trailing slash unless it is ``"/"``."""

    route: str
    endpoint: str
    methods: frozenset[str]


class RouteTable:
    """An immutable set of routes.

    Parameters
    ----------
    routes : mapping
        ``{route: {"endpoint": name, "methods": [...]}}``. Trailing slashes are ignored; of two routes that
        differ only in them, the later one is used.
    """

    def __init__(self, routes: Mapping[str, Mapping[str, Any]]) -> None:
        # Keyed without the trailing slash, so that "/" becomes "" and is a prefix of every path.
        self._routes: dict[str, Route] = {}
        for written, target in routes.items():
            prefix = normalize_prefix(written)
            methods = frozenset(str(method).upper() for method in target["methods"])
            self._routes[prefix] = Route(prefix or "/", str(target["endpoint"]), methods)
        self._max_segments = max((prefix.count("/") for prefix in self._routes), default=0)

    def match(self, path: str) -> Route | None:
        """Return the longest route that ``path`` equals or continues after a slash."""
        routes = self._routes
        best = routes.get("")
        end = 0
        for _ in range(self._max_segments):
            end = path.find("/", end + 1)
            found = routes.get(path if end < 0 else path[:end])
            if found is not None:
                best = found
            if end < 0:
                break
        return best

    def endpoints(self) -> dict[str, str]:
        """Return ``{route: endpoint}``, in the order of the routes."""
        return {route.route: route.endpoint for _, route in sorted(self._routes.items())}

    def __len__(self) -> int:
        return len(self._routes)

    def __repr__(self) -> str:
        return f"<RouteTable {len(self._routes)} routes, at most {self._max_segments} segments>"


def normalize_prefix(path: str) -> str:
    """Return a path prefix with one leading and no trailing slash; the root is the empty string."""
    bare = path.strip("/")
    return f"/{bare}" if bare else ""
