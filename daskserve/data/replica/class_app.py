"""A class with the routes of an ASGI application: its methods are endpoints, bound to each replica's object.

Problem: ``@app.get("/")`` in the body of a class registers a function that takes ``self``, and FastAPI takes
``self`` for a query parameter. Several classes may use one application, and several replicas run in one
process. Choice: the application is never changed. The decorator copies it, without the routes of other
classes, and each object of the class gets a copy of that copy, whose endpoints find it in the request.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, TypeVar, overload

from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.routing import Router

from daskserve.data.replica.definitions import CALL, REMEDY, inspect_definition
from daskserve.data.replica.jsonable import array_types, plain
from daskserve.internals.starlette import AppCopier, BoundEndpoint
from daskserve.types import Message, Receive, Send

ClassT = TypeVar("ClassT", bound=type[Any])

#: The attribute of a class with its application or builder, and of an object with its own application.
APP = "__daskserve_app__"
#: The attribute of an endpoint with the class that it is a method of.
OWNER = "__daskserve_class__"
#: The key of the object in the scope of a request.
OBJECT = "daskserve.object"


class Builder:
    """A function that builds an ASGI application where a replica runs."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build


class _AppClass:
    """Serves an ASGI application; keeps the arguments of its constructor for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs


class IngressDecorator:
    """What `ingress` returns: decorates a class, or makes one that has only the application's routes."""

    def __init__(self, app: Any) -> None:
        self._app = app

    @overload
    def __call__(self, cls: None = None, /) -> type[Any]: ...

    @overload
    def __call__(self, cls: ClassT, /) -> ClassT: ...

    def __call__(self, cls: Any = None, /) -> Any:
        """Give a class the routes of the application, and return it."""
        if cls is None:
            attributes = {"__module__": __name__, "__doc__": _AppClass.__doc__}
            cls = type("ASGIIngressDeployment", (_AppClass,), attributes)
        _check_class(cls)
        # The class is changed, not derived from: `super()` and `isinstance` keep their meaning.
        setattr(cls, APP, self._app if isinstance(self._app, Builder) else _app_for(cls, self._app))
        setattr(cls, CALL, _answer)
        return cls


def ingress(app: Any) -> IngressDecorator:
    """Give a class the routes of an ASGI application; use it as a decorator.

    Methods that are endpoints of the application (``@app.get("/items/{id}")``) and their dependencies get
    ``self``, the object of the replica. All public methods stay callable by handle. Routes, middlewares and
    exception handlers are taken from the application when the class is decorated; its lifespan runs in each
    replica, after the constructor.

    ``ingress(app)()`` returns a class that only serves the application.

    Parameters
    ----------
    app : ASGI application or function
        A FastAPI or Starlette application, a router of them, or any other ASGI application. Or a function
        without parameters that returns one: each replica calls it after its constructor, so what it returns
        need not be picklable.

    Raises
    ------
    TypeError
        The argument is neither, or what is decorated is not a class.
    ValueError
        The class has a ``__call__`` method.

    Examples
    --------
    >>> app = FastAPI()
    >>> @serve.deployment
    ... @serve.ingress(app)
    ... class Greeter:
    ...     def __init__(self, greeting):
    ...         self.greeting = greeting
    ...
    ...     @app.get("/{name}")
    ...     def greet(self, name: str):
    ...         return f"{self.greeting}, {name}!"
    """
    if not callable(app):
        raise TypeError(
            f"@serve.ingress takes an ASGI application, or a function that builds one, got {app!r}."
        )
    if isinstance(app, (FunctionType, MethodType, functools.partial, type)) and not is_asgi_app(app):
        required = _required_parameters(app)
        if required:
            raise TypeError(
                f"The function {getattr(app, '__qualname__', app)!r} of @serve.ingress must take no "
                f"arguments, because each replica calls it without any, or the ASGI arguments scope, receive "
                f"and send; it takes {', '.join(required)}."
            )
        return IngressDecorator(Builder(app))
    return IngressDecorator(app)


def is_asgi_app(value: Any) -> bool:
    """Return whether a value is an ASGI application, and not a class of them."""
    if inspect.isclass(value) or not callable(value) or hasattr(type(value), REMEDY):
        return False
    return inspect_definition(value).is_asgi_app


def has_app(definition: Any) -> bool:
    """Return whether a definition is a class that `ingress` has decorated, or derived from one."""
    return inspect.isclass(definition) and hasattr(definition, APP)


def own_app(made: Any) -> Any:
    """Return the application of an object whose class `ingress` has decorated, which it keeps.

    Raises
    ------
    TypeError
        The function that builds the application returned something else.
    """
    found = vars(made).get(APP)
    if found is None:
        found = getattr(type(made), APP)
        found = _built(found) if isinstance(found, Builder) else _copier(_Binding(type(made))).copied(found)
        object.__setattr__(made, APP, found)  # not by the class's own __setattr__
    return found


async def _answer(self: Any, scope: Message, receive: Receive, send: Send) -> None:
    scope[OBJECT] = self
    await own_app(self)(scope, receive, send)


def current_object(connection: HTTPConnection) -> Any:
    """Return the object whose application answers a request."""
    return connection.scope[OBJECT]


def current_class(connection: HTTPConnection) -> Any:
    """Return the class of that object."""
    return type(connection.scope[OBJECT])


def _required_parameters(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some builtins have none
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    has_default = [
        each.default is not inspect.Parameter.empty or each.kind in variable for each in parameters
    ]
    return [each.name for each, has in zip(parameters, has_default, strict=True) if not has]


def _check_class(cls: Any) -> None:
    if not inspect.isclass(cls):
        hint = "; write @serve.ingress below @serve.deployment" if hasattr(cls, "bind") else ""
        raise TypeError(f"@serve.ingress decorates classes, got {cls!r}{hint}.")
    if not has_app(cls) and any(CALL in vars(each) for each in cls.__mro__):
        raise ValueError(
            f"Class {cls.__name__} has a __call__ method, but @serve.ingress lets the application answer "
            "HTTP requests. Give the method another name, and a route of the application."
        )
    if not cls.__dictoffset__:
        raise ValueError(f'Class {cls.__name__} has __slots__, but @serve.ingress needs "__dict__" in them.')


def _built(builder: Builder) -> Any:
    app = builder.build()
    if not callable(app):
        name = getattr(builder.build, "__qualname__", builder.build)
        raise TypeError(f"The function {name!r} of @serve.ingress returned {app!r}, not an ASGI application.")
    return app


def _copier(change: Callable[[Any], Any]) -> AppCopier:
    if "fastapi" not in sys.modules:  # then no application can be one of FastAPI
        return AppCopier(change)
    from daskserve.internals.fastapi import FastAPICopier, encode_types

    encode_types(array_types(), plain)  # as for results of plain methods
    return FastAPICopier(change)


# ---- the methods of a class among the endpoints of an application


def _app_for(cls: type[Any], app: Any) -> Any:
    """Return a copy of an application as it is now, without endpoints that are methods of other classes."""
    if not isinstance(app, (Starlette, Router)):
        return app

    def kept(endpoint: Any) -> Any:
        owner = _owner(cls, _function(endpoint))
        if owner is not None:
            setattr(_function(endpoint), OWNER, owner)
        return None if owner is not None and owner not in cls.__mro__ else endpoint

    return _copier(kept).copied(app)


def _owner(cls: type[Any], endpoint: Any) -> type[Any] | None:
    """Return the class of which an endpoint is a method; None if it is a function or object of its own."""
    if not isinstance(endpoint, FunctionType):
        return None
    owner: type[Any] | None = getattr(endpoint, OWNER, None)
    if owner is not None:
        return owner
    name = (endpoint.__module__, endpoint.__qualname__.rpartition(".")[0])
    for each in cls.__mro__:
        # A name that the class has given to several methods is that of its last one.
        if name == (each.__module__, each.__qualname__) or any(
            _function(value) is endpoint for value in vars(each).values()
        ):
            return each
    return None


def _function(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute


class _Binding:
    """Replaces the methods of a class by functions that find their object in the request.

    Not by methods of the object: FastAPI keeps the endpoints that it has analyzed, and the object, with its
    model, would outlive its replica.
    """

    def __init__(self, cls: type[Any]) -> None:
        self._cls = cls

    def __call__(self, endpoint: Any) -> Any:
        owner = _owner(self._cls, endpoint)
        if owner is None:
            return endpoint
        attribute = self._attribute(owner, endpoint)
        if isinstance(attribute, staticmethod):
            return attribute.__func__
        first = current_class if isinstance(attribute, classmethod) else current_object
        return BoundEndpoint(_function(attribute), first)

    def _attribute(self, owner: type[Any], endpoint: Any) -> Any:
        """Return what an endpoint is in its class, or what a class derived from that has instead."""
        name = endpoint.__name__
        for each in self._cls.__mro__:
            found = vars(each).get(name, endpoint)
            if each is owner:
                return found if _code(found) == endpoint.__code__ else endpoint
            if name in vars(each):
                return found
        return endpoint


def _code(attribute: Any) -> Any:
    # Another replica in this process may have given the class new functions, with equal code.
    return getattr(_function(attribute), "__code__", None)
