"""Finds the route of a path.

A lookup walks the segments of the path from the left, and remembers the last route that matched. Its cost
depends only on the depth of the deepest route, not on the number of routes or the length of the path. Routes
with variables need a tree of segments, which is built only if there are some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from daskserve.common.types import ALL_HTTP_METHODS
from daskserve.options.routing.route_variables import SegmentPattern, has_variables, names_of, shape_of


@dataclass(frozen=True, slots=True)
class Route:
    """A path prefix and its endpoint.

    Attributes
    ----------
    route : str
        The route as written, without a trailing slash unless it is ``"/"``.
    application : str
        The application of the endpoint; empty if it has none.
    prefix : str
        The part of the path that it matched; empty for ``"/"``.
    path_params : mapping or None
        The values of its variables; None if it has none.
    access_log : bool or None
        Whether its requests are logged; None if its deployment does not set ``enable_access_log``.
    """

    route: str
    endpoint: str
    methods: frozenset[str]
    application: str = ""
    prefix: str = ""
    path_params: Mapping[str, Any] | None = None
    access_log: bool | None = None

    @property
    def takes_any_method(self) -> bool:
        """Whether all standard methods are allowed; then all others are, too, such as those of WebDAV."""
        return self.methods.issuperset(ALL_HTTP_METHODS)


class RouteTable:
    """An immutable set of routes.

    Parameters
    ----------
    routes : mapping
        ``{route: {"endpoint": name, "methods": [...], "application": name, "pending": True}}``,
        ``application`` is present for routes of applications, ``pending`` during the first deploy of one.
        Trailing slashes are ignored; of two routes that differ only in them, the later one is used.
    """

    def __init__(self, routes: Mapping[str, Mapping[str, Any]]) -> None:
        # Keyed without the trailing slash, so that "/" becomes "" and is a prefix of every path.
        self._routes: dict[str, Route] = {}
        #: The routes of applications that are being deployed for the first time; they match last.
        self._pending: RouteTable | None = None
        pending = {
            route: {**target, "pending": False} for route, target in routes.items() if target.get("pending")
        }
        if pending:
            self._pending = RouteTable(pending)
        for written, target in routes.items():
            if target.get("pending"):
                continue
            prefix = normalize_prefix(written)
            methods = frozenset(str(method).upper() for method in target["methods"])
            application = str(target.get("application", ""))
            endpoint, access_log = str(target["endpoint"]), target.get("access_log")
            self._routes[prefix] = Route(
                prefix or "/", endpoint, methods, application, prefix, access_log=access_log
            )
        self._max_segments = max((prefix.count("/") for prefix in self._routes), default=0)
        self._tree = _Segment.tree(self._routes) if any(map(has_variables, self._routes)) else None

    def match(self, path: str) -> Route | None:
        """Return the longest route that is a prefix of ``path`` up to a slash or the end; None if there is
        none.

        A fixed segment takes precedence over a variable. Pending routes come last.
        """
        routes = self._routes
        if self._tree is not None and path.startswith("/"):
            best = self._tree.find(path)
        else:
            best = routes.get("")
            end = 0
            for _ in range(self._max_segments):
                end = path.find("/", end + 1)
                found = routes.get(path if end < 0 else path[:end])
                if found is not None:
                    best = found
                if end < 0:
                    break
        if best is None and self._pending is not None:
            return self._pending.match(path)
        return best

    def endpoints(self) -> dict[str, str]:
        """Return ``{route: endpoint}`` without pending routes, sorted by route."""
        return {route.route: route.endpoint for _, route in sorted(self._routes.items())}

    def names(self) -> dict[str, str]:
        """Return ``{route: application}``, sorted; the endpoint for a route without an application."""
        routes = sorted(self._routes.items())
        return {route.route: route.application or route.endpoint for _, route in routes}

    def __len__(self) -> int:
        return len(self._routes)

    def __repr__(self) -> str:
        return f"<RouteTable {len(self._routes)} routes, at most {self._max_segments} segments>"


class _Segment:
    """A node of the tree of routes: the segments that may follow."""

    def __init__(self) -> None:
        self.route: Route | None = None
        self._names: tuple[str, ...] = ()
        self._fixed: dict[str, _Segment] = {}
        self._variable: dict[str, tuple[SegmentPattern, _Segment]] = {}
        self._by_rank: list[tuple[SegmentPattern, _Segment]] = []

    @classmethod
    def tree(cls, routes: Mapping[str, Route]) -> _Segment:
        """Return the root of the tree of all routes, by their prefixes."""
        root = cls()
        for prefix, route in routes.items():
            node = root
            for segment in prefix.split("/")[1:]:
                node = node._below(segment)
            node.route = route
            node._names = names_of(prefix)
        return root

    def _below(self, segment: str) -> _Segment:
        if not has_variables(segment):
            return self._fixed.setdefault(segment, _Segment())
        shape = shape_of(segment)
        if shape not in self._variable:
            self._variable[shape] = SegmentPattern(segment), _Segment()
            self._by_rank = sorted(self._variable.values(), key=lambda each: each[0].rank)
        return self._variable[shape][1]

    def find(self, path: str, start: int = 0, values: tuple[Any, ...] = ()) -> Route | None:
        """Return the best route for a path whose part up to the slash at ``start`` has matched.

        Each node is visited at most once, because it belongs to one position in the path.
        """
        if start < len(path):
            end = path.find("/", start + 1)
            if end < 0:
                end = len(path)
            segment = path[start + 1 : end]
            fixed = self._fixed.get(segment)
            found = None if fixed is None else fixed.find(path, end, values)
            if found is not None:
                return found
            for pattern, below in self._by_rank:
                upto = len(path) if pattern.takes_rest else end
                value = pattern.value(path[start + 1 : upto])
                found = None if value is None else below.find(path, upto, (*values, value))
                if found is not None:
                    return found
        route = self.route
        if route is None or not values:
            return route
        return replace(route, prefix=path[:start], path_params=dict(zip(self._names, values, strict=True)))


def normalize_prefix(path: str) -> str:
    """Return a path prefix with one leading and no trailing slash; the root is the empty string."""
    bare = path.strip("/")
    return f"/{bare}" if bare else ""
