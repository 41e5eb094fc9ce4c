"""The undocumented parts of Starlette that daskserve uses: what an application consists of.

Starlette's applications cannot be copied with `copy.deepcopy`: their middlewares and routers refer to each
other by bound methods, and what they hold (locks, connections) is the user's. `AppCopier` copies only the
objects on the way from an application to its endpoints.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

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


class AppCopier:
    """Copies applications, with the same routes to other endpoints.

    The copies have the state, the lifespan and the middlewares of the originals. Later changes of the
    originals' routes, middlewares and exception handlers do not reach them.

    Parameters
    ----------
    change : callable
        Returns what replaces an endpoint: a `BoundEndpoint`, the same one, or None to leave its routes out.
    """

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        #: The copies, and their originals: an application may be mounted twice, or in itself.
        self._copies: dict[int, tuple[Any, Any]] = {}

    def copied(self, app: Any) -> Any:
        """Return the copy of a Starlette application or router; any other object itself."""
        if id(app) in self._copies:
            return self._copies[id(app)][0]
        if not isinstance(app, (Starlette, Router)):
            return app
        made = copy.copy(app)
        self._copies[id(app)] = made, app
        if isinstance(app, Starlette):
            self.fill_app(made, app)
        else:
            self._fill_router(made, app)
        return made

    def fill_app(self, made: Any, app: Any) -> None:
        """Give the shallow copy of an application its own parts."""
        made.router = self.copied(app.router)
        made.user_middleware = list(app.user_middleware)
        made.exception_handlers = dict(app.exception_handlers)
        made.middleware_stack = None  # the first request builds it

    def _fill_router(self, made: Any, router: Any) -> None:
        routes = [self.route(each, router) for each in router.routes]
        made.routes = [each for each in routes if each is not None]
        made.middleware_stack = _with_end(router.middleware_stack, router.app, made.app)

    def route(self, route: BaseRoute, router: Any) -> BaseRoute | None:
        """Return a router's route, to the changed endpoint or a copied application; None to leave it out."""
        if isinstance(route, (Mount, Host)):
            base = getattr(route, "_base_app", route.app)
            made: Any = copy.copy(route)
            made.app = _with_end(route.app, base, self.copied(base))
            if isinstance(route, Mount):
                made._base_app = self.copied(base)
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


@dataclass(frozen=True)
class BoundEndpoint:
    """A function whose first argument is found in the request.

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


def _with_end(app: Any, end: Any, new: Any) -> Any:
    """Return a copy of a chain of middlewares that ends with another application."""
    if app == end:
        return new
    made = copy.copy(app)
    made.app = _with_end(app.app, end, new)
    return made
