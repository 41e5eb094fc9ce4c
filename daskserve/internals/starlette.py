"""The undocumented parts of Starlette that daskserve uses: the parts of an application.

Starlette's applications cannot be copied with `copy.deepcopy`: their middlewares and routers refer to each
other by bound methods, and locks or connections in them belong to the user. `AppCopier` copies only the
objects on the way from an application to its endpoints.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count, repeat
from types import FunctionType
from typing import Any, SupportsIndex, TypeAlias

from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Host, Mount, Route, Router, WebSocketRoute

from daskserve.internals.checking import needs

with needs("starlette", ">=0.42,<2") as check:
    from starlette.routing import request_response, websocket_session

    check.fields(Starlette, "router", "middleware_stack", "user_middleware", "exception_handlers")
    check.fields(Router, "routes", "middleware_stack")
    check.attributes(Router, "app")
    check.fields(Mount, "app", "_base_app")
    check.fields(Host, "app")
    check.fields(Route, "endpoint", "app")
    check.fields(WebSocketRoute, "endpoint", "app")

#: A name for a part of an application, which is the same in each process that has the application.
PartName: TypeAlias = tuple[str, int]
#: The copies of parts in the current context, by the part's name.
current_copies: ContextVar[Mapping[PartName, Any] | None] = ContextVar("current_copies", default=None)


def parts_of(app: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield an application or router, and those in it (included, mounted, or by host), each once."""
    seen = set() if seen is None else seen
    if not isinstance(app, (Starlette, Router)) or id(app) in seen:
        return
    seen.add(id(app))
    yield app
    if isinstance(app, Starlette):
        yield from parts_of(app.router, seen)
        return
    for route in app.routes:
        yield from parts_of(_base_of(route), seen)


def routes_of(app: Any) -> Iterator[BaseRoute]:
    """Yield the routes of an application or router, and of all applications and routers in it."""
    for part in parts_of(app):
        if isinstance(part, Router):
            yield from part.routes


def _base_of(route: BaseRoute) -> Any:
    """Return the application or router that a route leads to; None if it has an endpoint."""
    # FastAPI before 0.136 copies the routes of a router that is included.
    included = getattr(route, "original_router", None)
    return getattr(route, "_base_app", getattr(route, "app", None)) if included is None else included


# ---- parts that forward to copies


class SharedPart:
    """An application or router that is used by the code of several objects, each with its own copy.

    While the code of such an object runs, the attributes of the part are those of the copy. So a route that
    the code adds to ``app`` is added to the application that is served. Only the class of the part is
    replaced for this.
    """

    part_name: PartName

    def __getattribute__(self, name: str) -> Any:
        own = _copy_for(self, name)
        return super().__getattribute__(name) if own is None else getattr(own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = _copy_for(self, name)
        if own is None:
            super().__setattr__(name, value)
        else:
            setattr(own, name, value)

    def __delattr__(self, name: str) -> None:
        own = _copy_for(self, name)
        if own is None:
            super().__delattr__(name)
        else:
            delattr(own, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        made, (cls, *others), *rest = reduced
        plain = cls.__bases__[1] if cls is type(self) else cls
        return _made_shared, (cls.part_name, made, plain, *others), *rest


def _copy_for(part: SharedPart, name: str) -> Any:
    copies = current_copies.get()
    return None if copies is None or name.startswith("__") else copies.get(type(part).part_name)


def _made_shared(name: PartName, make: Callable[..., Any], *arguments: Any) -> Any:
    made = make(*arguments)
    _share(made, name)
    return made


def share(apps: Iterable[Any], name: str) -> None:
    """Make the parts of applications forward to the copies of the running code, unless they already do."""
    seen: set[int] = set()
    parts = [part for app in apps for part in parts_of(app, seen)]
    taken = {type(each).part_name for each in parts if isinstance(each, SharedPart)}
    free = iter(each for each in zip(repeat(name), count()) if each not in taken)
    for part in parts:
        if not isinstance(part, SharedPart):
            _share(part, next(free))


def _share(part: Any, name: PartName) -> None:
    plain = type(part)
    attributes = {"part_name": name, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    part.__class__ = type(plain.__name__, (SharedPart, plain), attributes)


# ---- copies


class AppCopier:
    """Copies applications; the copies have the same routes, but changed endpoints.

    The copies have the state, the lifespan and the middlewares of the originals, but separate lists. Routes
    that are added to a copy later also get changed endpoints, but are not copied.

    Parameters
    ----------
    change : callable
        Returns the replacement of an endpoint: a `BoundEndpoint`, the same one, or None to leave its routes
        out.
    """

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        #: By name, because an application may be mounted twice or in itself, and another replica may have
        #: loaded the same names as different objects in the meantime. None once all copies exist.
        self._copies: dict[PartName, Any] | None = {}

    def copied(self, app: Any, *others: Any) -> tuple[Any, Mapping[PartName, Any]]:
        """Return the copy of an application or router, and the copies of all parts by their names.

        All parts are shared; see `share`. ``others`` are also copied, because code may add them to the
        application.
        """
        made, *_ = [self.part(each) for each in (app, *others)]
        copies, self._copies = self._copies or {}, None
        return made, copies

    def part(self, app: Any) -> Any:
        """Return the copy of an application or router; any other object itself."""
        if not isinstance(app, (Starlette, Router)):
            return app
        if self._copies is None:
            return self._added(app)
        kind: Any = type(app)
        name = kind.part_name
        if name in self._copies:
            return self._copies[name]
        made = self._copies[name] = _shallow_copy(app)
        if isinstance(made, Starlette):
            self.fill_app(made, app)
        else:
            run = kind.app.__get__(app)
            made.middleware_stack = _with_end(made.middleware_stack, run, made.app)
            made.routes = OwnRoutes(self, made, made.routes)
        return made

    def fill_app(self, made: Any, app: Any) -> None:
        """Replace the parts of a shallow copy of an application by copies."""
        made.router = self.part(made.router)
        made.middleware_stack = None  # the first request builds a new one

    def _added(self, app: Any) -> Any:
        """Return the application or router to add to a copy: its copy, or itself with changed routes."""
        if isinstance(app, SharedPart):
            return (current_copies.get() or {}).get(type(app).part_name, app)
        for part in parts_of(app):
            if isinstance(part, Router) and not isinstance(part.routes, OwnRoutes):
                part.routes = OwnRoutes(self, part, part.routes)
        return app

    def app_for(self, router: Any) -> Any:
        """Return an application with a router, because a router alone is not a full HTTP application."""
        return self.with_router(Starlette(), router)

    def with_router(self, app: Any, router: Any) -> Any:
        """Replace an application's router with another one that gets its routes; return the application."""
        router.routes.extend(app.routes)
        app.router = router
        return app

    def route(self, route: BaseRoute, router: Any) -> BaseRoute | None:
        """Return a router's route, with a changed endpoint or a copied application; None to leave it out."""
        if isinstance(route, LeftOutRoute):
            return None
        if isinstance(route, (Mount, Host)):
            base = _base_of(route)
            made: Any = copy.copy(route)
            made.app = _with_end(route.app, base, self.part(base))
            if isinstance(route, Mount):
                made._base_app = self.part(base)
            return made  # type: ignore[no-any-return]
        if not isinstance(route, (Route, WebSocketRoute)):
            return route
        endpoint = self._change(route.endpoint)
        if endpoint is None:
            return None
        return route if endpoint is route.endpoint else self.routed(route, endpoint, router)

    def routed(self, route: Any, endpoint: Any, router: Any) -> BaseRoute:
        """Return a copy of a route with another endpoint."""
        if isinstance(endpoint, BoundEndpoint):
            endpoint = endpoint.for_starlette()
        wrap: Any = websocket_session if isinstance(route, WebSocketRoute) else request_response
        made = copy.copy(route)
        made.endpoint = endpoint
        end = route.app
        while not isinstance(end, FunctionType):
            end = end.app
        made.app = _with_end(route.app, end, wrap(endpoint))
        return made  # type: ignore[no-any-return]


class OwnRoutes(list[BaseRoute]):
    """The routes of a router; an `AppCopier` changes routes that are added."""

    def __init__(self, copier: AppCopier, router: Any, routes: Iterable[BaseRoute]) -> None:
        self._copier = copier
        self._router = router
        super().__init__(self._changed(routes))

    def _changed(self, routes: Iterable[BaseRoute]) -> list[BaseRoute]:
        found = [self._copier.route(each, self._router) for each in routes]
        return [each for each in found if each is not None]

    def append(self, route: BaseRoute) -> None:
        super().extend(self._changed([route]))

    def insert(self, index: SupportsIndex, route: BaseRoute) -> None:
        self[index:index] = [route]

    def extend(self, routes: Iterable[BaseRoute]) -> None:
        super().extend(self._changed(routes))

    def __iadd__(self, routes: Iterable[BaseRoute]) -> OwnRoutes:  # type: ignore[override, misc]
        self.extend(routes)
        return self

    def __setitem__(self, index: Any, routes: Any) -> None:
        if isinstance(index, slice):
            super().__setitem__(index, self._changed(routes))
        else:
            self[index : index + 1 or None] = [routes]


class LeftOutRoute(BaseRoute):
    """Stands for a route to a method of a class that is not deployed; it is never served."""


@dataclass(frozen=True)
class BoundEndpoint:
    """A function whose first argument is derived from the request.

    Attributes
    ----------
    function : function
    first : callable
        Returns the first argument for a request or WebSocket.
    """

    function: Any
    first: Callable[[HTTPConnection], Any]

    def for_starlette(self) -> Any:
        """Return a function that Starlette calls with a request or WebSocket."""
        function, first = self.function, self.first
        if inspect.iscoroutinefunction(function):

            async def endpoint(connection: HTTPConnection) -> Any:
                return await function(first(connection), connection)

            return endpoint
        return lambda connection: function(first(connection), connection)


def _shallow_copy(app: Any) -> Any:
    """Return a copy of a `SharedPart` with copied lists and dicts, and with its original class."""
    kind: Any = type(app).__bases__[1]
    made = kind.__new__(kind)
    own = (list, dict)
    vars(made).update({k: copy.copy(v) if type(v) in own else v for k, v in vars(app).items()})
    return made


def _with_end(app: Any, end: Any, new: Any) -> Any:
    """Return a copy of a chain of middlewares that ends with another application."""
    if app == end:
        return new
    made = copy.copy(app)
    made.app = _with_end(app.app, end, new)
    return made
