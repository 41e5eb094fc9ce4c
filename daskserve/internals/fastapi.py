"""The undocumented parts of FastAPI that daskserve uses: the parts of its routes.

FastAPI is optional. Import this module only for an application of FastAPI.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Annotated, Any, get_args, get_origin

from starlette.requests import HTTPConnection

from daskserve.internals import by_value
from daskserve.internals.checking import needs
from daskserve.internals.starlette import AppCopier, BoundEndpoint

with needs("fastapi", ">=0.115.7,<1") as check:
    from fastapi import FastAPI
    from fastapi.datastructures import Default
    from fastapi.dependencies import models
    from fastapi.encoders import encoders_by_class_tuples
    from fastapi.params import Depends
    from fastapi.routing import APIRoute, APIRouter, APIWebSocketRoute

    check.fields(FastAPI, "openapi_schema", "dependency_overrides")


class FastAPICopier(AppCopier):
    """Copies applications of FastAPI; see `AppCopier`."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__(change)
        self._functions: dict[BoundEndpoint, Any] = {}

    def fill_app(self, made: Any, app: Any) -> None:
        """Replace the parts of a shallow copy of an application by copies."""
        super().fill_app(made, app)
        if isinstance(app, FastAPI):
            made.openapi_schema = None
            # shared, because tests change them later
            made.dependency_overrides = vars(app)["dependency_overrides"]

    def app_for(self, router: Any) -> Any:
        """Return an application with a router."""
        return (
            self.with_router(FastAPI(), router) if isinstance(router, APIRouter) else super().app_for(router)
        )

    def route(self, route: Any, router: Any) -> Any:
        """Return a router's route, with a changed endpoint or a copied application; None to leave it out."""
        # FastAPI before 0.136 copies the routes of a router that is included.
        included = getattr(route, "original_router", None)
        if included is None:
            return super().route(route, router)
        made = self.part(included)
        context = dataclasses.replace(route.include_context, included_router=made)
        return type(route)(original_router=made, include_context=context)

    def routed(self, route: Any, endpoint: Any, router: Any) -> Any:
        """Return a copy of a route with another endpoint, a function or method."""
        kind = next((each for each in (APIRoute, APIWebSocketRoute) if isinstance(route, each)), None)
        if kind is None:
            return super().routed(route, endpoint, router)
        # The constructor analyses the endpoint. A route keeps the other arguments as attributes, except for
        # one argument of a WebSocket's route, which is taken from the router.
        names = [*inspect.signature(kind).parameters]
        arguments = {name: getattr(route, name) for name in names if hasattr(route, name)}
        arguments["endpoint"] = self._function(endpoint) if isinstance(endpoint, BoundEndpoint) else endpoint
        arguments.setdefault("dependency_overrides_provider", router.dependency_overrides_provider)
        arguments["dependencies"] = [self._depends(each) for each in route.dependencies]
        if getattr(route, "stream_item_type", None) is not None:
            arguments["response_model"] = Default(None)  # the annotation defines it
        made = copy.copy(route)
        kind.__init__(made, **arguments)
        return made

    # ---- dependencies

    def _function(self, bound: BoundEndpoint) -> Any:
        """Return a function that FastAPI calls with the bound argument, as one of its dependencies."""
        if bound not in self._functions:
            # One function for each, because FastAPI distinguishes dependencies by identity.
            self._functions[bound] = made = _copied_function(bound.function)
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
        object.__setattr__(made, "dependency", self._function(bound))  # the dependency is frozen
        return made


def forget_callables() -> None:
    """Clear the caches that are keyed by endpoints and dependencies."""
    for each in vars(models).values():
        if isinstance(each, by_value.CACHED_FUNCTION):
            each.cache_clear()


def encode_types(types: tuple[type[Any], ...], encode: Callable[[Any], Any]) -> None:
    """Let FastAPI turn objects of more types into JSON, in this process."""
    encoders_by_class_tuples[encode] = types


def _awaitable(first: Callable[[HTTPConnection], Any]) -> Any:
    # async, because a plain function would run in a thread
    async def find(connection: HTTPConnection) -> Any:
        return first(connection)

    return find


def _copied_function(function: FunctionType) -> FunctionType:
    made = FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
    for name in ("__defaults__", "__kwdefaults__", *functools.WRAPPER_ASSIGNMENTS):
        setattr(made, name, getattr(function, name))
    made.__dict__.update(function.__dict__)
    return made
