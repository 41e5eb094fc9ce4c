"""The undocumented parts of FastAPI that daskserve uses: what its routes are made of.

FastAPI is optional. Import this module only for an application of FastAPI.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from types import CellType, FunctionType
from typing import Annotated, Any, get_args, get_origin

from starlette.requests import HTTPConnection

from daskserve.internals.checking import needs
from daskserve.internals.starlette import AppCopier, BoundEndpoint

with needs("fastapi", ">=0.115.7,<1") as check:
    from fastapi import FastAPI
    from fastapi.datastructures import Default
    from fastapi.encoders import encoders_by_class_tuples
    from fastapi.params import Depends
    from fastapi.routing import APIRoute, APIWebSocketRoute

    check.fields(FastAPI, "openapi_schema", "dependency_overrides")
    check.attributes(FastAPI, "openapi", "setup")

#: The module of FastAPI's own endpoints, such as ``/openapi.json``. They refer to their application as
#: ``self``.
APPLICATIONS = FastAPI.__module__


class FastAPICopier(AppCopier):
    """Copies applications of FastAPI as `AppCopier` does; see there."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__(change)
        self._functions: dict[BoundEndpoint, Any] = {}

    def fill_app(self, made: Any, app: Any) -> None:
        """Give the shallow copy of an application its own parts."""
        super().fill_app(made, app)
        if not isinstance(app, FastAPI):
            return
        made.openapi_schema = None
        made.router.routes = [self._own_route(each, made, app) for each in made.router.routes]
        if "openapi" in vars(app):
            made.openapi = CustomOpenAPI.of(made, app)

    def _own_route(self, route: Any, made: Any, app: Any) -> Any:
        endpoint = getattr(route, "endpoint", None)
        if isinstance(endpoint, FunctionType) and endpoint.__module__ == APPLICATIONS:
            return self.routed(route, _with_self(endpoint, app, made), app.router)
        return route

    def route(self, route: Any, router: Any) -> Any:
        """Return a router's route, to the changed endpoint or a copied application; None to leave it out."""
        # FastAPI before 0.136 copies the routes of a router that is included.
        included = getattr(route, "original_router", None)
        if included is None:
            return super().route(route, router)
        made = self.copied(included)
        context = dataclasses.replace(route.include_context, included_router=made)
        return type(route)(original_router=made, include_context=context)

    def routed(self, route: Any, endpoint: Any, router: Any) -> Any:
        """Return a copy of a route with another endpoint, a function or method."""
        kind = next((each for each in (APIRoute, APIWebSocketRoute) if isinstance(route, each)), None)
        if kind is None:
            return super().routed(route, endpoint, router)
        # The constructor analyses the endpoint. A route keeps the other arguments as attributes, except for
        # one of a WebSocket's, which is the router's.
        names = [*inspect.signature(kind).parameters]
        arguments = {name: getattr(route, name) for name in names if hasattr(route, name)}
        arguments["endpoint"] = self._function(endpoint)
        arguments.setdefault("dependency_overrides_provider", router.dependency_overrides_provider)
        arguments["dependencies"] = [self._depends(each) for each in route.dependencies]
        if getattr(route, "stream_item_type", None) is not None:
            arguments["response_model"] = Default(None)  # the annotation says it
        made = copy.copy(route)
        kind.__init__(made, **arguments)
        return made

    # ---- dependencies

    def _function(self, bound: BoundEndpoint) -> Any:
        """Return a function that FastAPI calls with the bound argument, as one of its dependencies."""
        if bound not in self._functions:
            # One function for each: FastAPI tells dependencies apart by identity.
            self._functions[bound] = made = _copied_function(bound.function, bound.function.__closure__ or ())
            signature = inspect.signature(bound.function)
            first, *others = signature.parameters.values()
            parameters = [first.replace(annotation=Annotated[Any, Depends(_awaitable(bound.first))])]
            parameters += [self._parameter(each) for each in others]
            made.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return self._functions[bound]

    def _parameter(self, parameter: inspect.Parameter) -> inspect.Parameter:
        if isinstance(parameter.default, Depends):
            return parameter.replace(default=self._depends(parameter.default))
        if get_origin(parameter.annotation) is not Annotated:
            return parameter
        kind, *extras = get_args(parameter.annotation)
        changed = [self._depends(each) if isinstance(each, Depends) else each for each in extras]
        return parameter.replace(annotation=Annotated[(kind, *changed)])

    def _depends(self, depends: Any) -> Any:
        bound = self._change(depends.dependency)
        if not isinstance(bound, BoundEndpoint):
            return depends
        made = copy.copy(depends)
        object.__setattr__(made, "dependency", self._function(bound))  # it is frozen
        return made


def encode_types(types: tuple[type[Any], ...], encode: Callable[[Any], Any]) -> None:
    """Let FastAPI turn objects of more types into JSON, in this process."""
    encoders_by_class_tuples[encode] = types


def _awaitable(first: Callable[[HTTPConnection], Any]) -> Any:
    async def find(connection: HTTPConnection) -> Any:  # a plain function would run in a thread
        return first(connection)

    return find


def _with_self(function: FunctionType, old: Any, new: Any) -> FunctionType:
    """Return a copy of a function of FastAPI's that refers to another application."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return _copied_function(
        function,
        [CellType(new) if name == "self" and cell.cell_contents is old else cell for name, cell in cells],
    )


def _copied_function(function: FunctionType, closure: Iterable[CellType]) -> FunctionType:
    made = FunctionType(function.__code__, function.__globals__, closure=tuple(closure))
    for name in ("__defaults__", "__kwdefaults__", *functools.WRAPPER_ASSIGNMENTS):
        setattr(made, name, getattr(function, name))
    made.__dict__.update(function.__dict__)
    return made


class CustomOpenAPI:
    """The function that a user has set as ``app.openapi``, for a copy of the application.

    FastAPI's documentation extends the schema in this way. Such a function reads ``app.routes`` and writes
    ``app.openapi_schema`` of the original, by a global variable.
    """

    def __init__(self, app: Any, original: Any, function: Callable[[], Any]) -> None:
        self._app = app
        self._original = original
        self._function = function

    @classmethod
    def of(cls, made: Any, app: Any) -> CustomOpenAPI:
        """Return the function for a copy of an application, which may be a copy itself."""
        found = app.openapi
        if isinstance(found, CustomOpenAPI):
            return cls(made, found._original, found._function)
        return cls(made, app, found)

    def __call__(self) -> Any:
        """Call the function while the original has the copy's routes."""
        app, original = self._app, self._original
        saved = original.router, original.openapi_schema
        original.router, original.openapi_schema = app.router, app.openapi_schema
        try:
            found = self._function()
            app.openapi_schema = original.openapi_schema
        finally:
            original.router, original.openapi_schema = saved
        return found
