"""Classes with the routes of an ASGI application, whose methods are endpoints of each replica's object.

Problem: ``@app.get("/")`` in the body of a class registers a function that takes ``self``, and FastAPI treats
``self`` as a query parameter. Several classes may use one application, and several replicas run in one
process. Choice: each object of the class gets a copy of the application, without the routes of other classes.
The endpoints of the copy find the object in the request. While the code of a replica runs, from the
constructor on, the names of the application and its routers refer to the copies. So only this replica serves
the routes that it adds.

FastAPI's public interface does not suffice. ``self = Depends(current_object)`` in a copied signature would
bind the methods, and ``include_router`` would copy their routes to another application. But it does not copy
middlewares, exception handlers, mounted applications, a changed ``openapi``, or the routes of Starlette. It
also changes the target application, which other classes and replicas of the process use. And
``app.add_api_route`` in a constructor would affect all replicas.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar, overload

from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Router

from daskserve.common.types import Message, Receive, Send
from daskserve.data.replica.user_code.definitions import APP, CALL, REMEDY, inspect_definition
from daskserve.data.replica.user_code.json import array_types, plain
from daskserve.internals.starlette import (
    AppCopier,
    BoundEndpoint,
    LeftOutRoute,
    PartName,
    current_copies,
    routes_of,
    share,
)
from daskserve.payload.pickling import Substitute

ClassT = TypeVar("ClassT", bound=type[Any])

#: The attribute of an endpoint that holds the class whose method it is.
OWNER = "__daskserve_class__"
#: The key of the object in the scope of a request.
OBJECT = "daskserve.object"


class Builder:
    """A function that builds an ASGI application in the process of a replica."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build

    def app(self) -> Any:
        """Return the application; raise `TypeError` if the function returns something else."""
        app = self.build()
        if not callable(app):
            name = getattr(self.build, "__qualname__", self.build)
            raise TypeError(
                f"The function {name!r} of @serve.ingress returned {app!r}, not an ASGI application."
            )
        return app


class _AppClass:
    """Serves an ASGI application; keeps the constructor's arguments for the application."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs


class IngressDecorator:
    """Decorates a class, or returns a class that only serves the application; see `ingress`."""

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
        # The class is modified in place instead of subclassed, so that `super()` and `isinstance` keep
        # working.
        setattr(cls, APP, self._app)
        setattr(cls, CALL, _answer)
        if isinstance(self._app, (Starlette, Router)):
            _mark_methods(cls, self._app)
            _share_parts(cls, self._app)
        return cls


def ingress(app: Any) -> IngressDecorator:
    """Decorate a class with the routes of an ASGI application.

    Methods that are endpoints of the application (``@app.get("/items/{id}")``) and their dependencies get
    ``self``, the object of the replica. All public methods stay callable by handle. Each replica gets the
    application as it is when the replica starts, and may add routes, routers and applications to it: in the
    constructor, in ``reconfigure`` or later. Add middlewares and exception handlers in the constructor at the
    latest, because Starlette does not accept them once it has started. The lifespan runs after the
    constructor.

    ``ingress(app)()`` returns a class that only serves the application.

    Parameters
    ----------
    app : ASGI application or function
        A FastAPI or Starlette application, a router of them, or any other ASGI application. Or a function
        without parameters that returns one: each replica calls it after its constructor, so its result need
        not be picklable.

    Raises
    ------
    TypeError
        The argument is neither, or the decorated object is not a class.
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
    return IngressDecorator(Router([app]) if isinstance(app, BaseRoute) else app)


def is_asgi_app(value: Any) -> bool:
    """Return whether a value is an ASGI application, and not a class of ASGI applications."""
    if inspect.isclass(value) or not callable(value) or hasattr(type(value), REMEDY):
        return False
    return inspect_definition(value).is_asgi_app


def has_app(definition: Any) -> bool:
    """Return whether a definition is a class that `ingress` has decorated, or derived from one."""
    return inspect.isclass(definition) and hasattr(definition, APP)


class ObjectApp:
    """The application of one object.

    Attributes
    ----------
    app : ASGI application
        The application that answers; None until a builder has made it.
    copies : mapping
        The copies to which the names of the application and its parts refer in the code of the object.
    """

    def __init__(self, cls: type[Any]) -> None:
        self.app: Any = None
        self.copies: Mapping[PartName, Any] = {}
        self._build: Builder | None = None
        found = getattr(cls, APP)
        if isinstance(found, Builder):
            self._build = found
        elif isinstance(found, (Starlette, Router)):
            copier = _copier(_Binding(cls))
            # The parts are shared again, because the class may have got new parts since it was decorated.
            made, self.copies = copier.copied(*_share_parts(cls, found))
            self.app = copier.app_for(made) if isinstance(made, Router) else made
        else:
            self.app = found

    def join(self, made: Any) -> None:
        """Bind this application to the constructed object.

        Raises
        ------
        TypeError
            The function that builds the application returned something else.
        """
        if self._build is not None:
            app = self._build.app()
            self.app = _copier(lambda endpoint: endpoint).app_for(app) if isinstance(app, Router) else app
        object.__setattr__(made, APP, self)  # bypasses the class's own __setattr__


@contextmanager
def constructing(cls: type[Any]) -> Iterator[Callable[[Any], None]]:
    """Construct an object of a class; during this, the names of its application refer to the object's copy.

    Yields a function that gives the object its application. The constructor's block calls it, because the
    lifespan protocol hides errors of the application.
    """
    if not has_app(cls):
        yield lambda made: None
        return
    own = ObjectApp(cls)
    token = current_copies.set(own.copies)
    try:
        yield own.join
    finally:
        current_copies.reset(token)


def as_definition(definition: Any) -> Any:
    """Return the definition to deploy: for a router or route, a class that serves it."""
    return ingress(definition)() if isinstance(definition, (Router, BaseRoute)) else definition


def forget_endpoints() -> None:
    """Clear the cache in which FastAPI keeps thousands of analyzed functions, and thus their objects."""
    if "fastapi" in sys.modules:
        from daskserve.internals.fastapi import forget_callables

        forget_callables()


def enter_app(made: Any) -> None:
    """Let the names of an application refer to the object's copy, from now on in the current context."""
    found = getattr(made, "__dict__", {}).get(APP)
    if isinstance(found, ObjectApp):
        current_copies.set(found.copies)


async def _answer(self: Any, scope: Message, receive: Receive, send: Send) -> None:
    own: ObjectApp | None = vars(self).get(APP)
    if own is None:  # the object was not created by a replica
        own = ObjectApp(type(self))
        own.join(self)
    scope[OBJECT] = self
    current_copies.set(own.copies)
    await own.app(scope, receive, send)


def current_object(connection: HTTPConnection) -> Any:
    """Return the object whose application answers a request."""
    return connection.scope[OBJECT]


def current_class(connection: HTTPConnection) -> Any:
    """Return the class of the object whose application answers a request."""
    return type(connection.scope[OBJECT])


def _required_parameters(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some builtins have no signature
        return []
    return [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


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


def _copier(change: Callable[[Any], Any]) -> AppCopier:
    if "fastapi" not in sys.modules:  # without it, no application can be from FastAPI
        return AppCopier(change)
    from daskserve.internals.fastapi import FastAPICopier, encode_types

    encode_types(array_types(), plain)  # the same as for results of plain methods
    return FastAPICopier(change)


# ---- the methods of a class among the endpoints of an application


def _share_parts(cls: type[Any], app: Any) -> list[Any]:
    """Share an application, and those that the methods of a class refer to, among the class's objects."""
    functions = [_function(value) for each in cls.__mro__ for value in vars(each).values()]
    found = [app, *(each for function in functions for each in _apps_of(function))]
    # The paths are included, because all classes that `ingress` creates have the same name.
    paths = ",".join(str(getattr(each, "path", "")) for each in routes_of(app))
    share(found, f"{cls.__module__}.{cls.__qualname__} {paths}")
    return found


def _apps_of(function: Any) -> list[Any]:
    """Return the applications and routers that a function refers to by name."""
    if not isinstance(function, FunctionType):
        return []
    codes, names = [function.__code__], set[str]()
    for code in codes:
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    values = [function.__globals__[name] for name in sorted(names) if name in function.__globals__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the variable is not assigned yet
            values.append(cell.cell_contents)
    return [each for each in values if isinstance(each, (Starlette, Router))]


def _mark_methods(cls: type[Any], app: Any) -> None:
    """Mark the functions that are methods of a class, for the routes of other classes."""
    for name, value in vars(cls).items():
        function = _function(value)
        if isinstance(function, FunctionType) and function.__qualname__ == f"{cls.__qualname__}.{name}":
            vars(function).setdefault(OWNER, cls)
    for route in routes_of(app):
        function = _function(getattr(route, "endpoint", None))
        owner = _owner(cls, function)
        if owner is not None:
            vars(function).setdefault(OWNER, owner)


def without_others(cls: type[Any], substitution: Callable[[], Substitute] | None = None) -> Substitute:
    """Return a reducer that leaves out routes to methods of other classes when a class is pickled."""
    substitute = None if substitution is None else substitution()

    def reduce(value: Any) -> Any:
        if isinstance(value, BaseRoute):
            if hasattr(value, "original_router"):  # pickled without the routes that it caches
                return type(value), (value.original_router, value.include_context)  # type: ignore[attr-defined]
            owner = getattr(_function(getattr(value, "endpoint", None)), OWNER, cls)
            if owner not in cls.__mro__:
                return LeftOutRoute, ()
        return NotImplemented if substitute is None else substitute(value)

    return reduce


def _owner(cls: type[Any], endpoint: Any) -> type[Any] | None:
    """Return the class of which an endpoint is a method; None for other functions and objects."""
    if not isinstance(endpoint, FunctionType):
        return None
    owner: type[Any] | None = getattr(endpoint, OWNER, None)
    if owner is not None:
        return owner
    name = (endpoint.__module__, endpoint.__qualname__.rpartition(".")[0])
    for each in cls.__mro__:
        # If the class has given a name to several methods, the name refers to the last one.
        if name == (each.__module__, each.__qualname__) or any(
            _function(value) is endpoint for value in vars(each).values()
        ):
            return each
    return None


def _function(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute


class _Binding:
    """Replaces the methods of a class by functions that find their object in the request.

    Methods bound to the object would not work: FastAPI keeps the endpoints that it has analyzed, so the
    object, with its model, would outlive its replica.
    """

    def __init__(self, cls: type[Any]) -> None:
        self._cls = cls

    def __call__(self, endpoint: Any) -> Any:
        function = _function(endpoint)
        owner = _owner(self._cls, function)
        if owner is None:
            return endpoint
        if owner not in self._cls.__mro__:
            return None
        attribute = self._attribute(owner, function)
        if isinstance(attribute, staticmethod):
            return endpoint if attribute.__func__ is function else attribute.__func__
        first = current_class if isinstance(attribute, classmethod) else current_object
        return BoundEndpoint(_function(attribute), first)

    def _attribute(self, owner: type[Any], endpoint: Any) -> Any:
        """Return the attribute of the class for an endpoint, which a derived class may have overridden."""
        name = endpoint.__name__
        for each in self._cls.__mro__:
            found = vars(each).get(name, endpoint)
            if each is owner:
                return found if _code(found) == endpoint.__code__ else endpoint
            if name in vars(each):
                return found
        return endpoint


def _code(attribute: Any) -> Any:
    # Compare the code, because another replica in this process may have given the class new functions with
    # equal code.
    return getattr(_function(attribute), "__code__", None)
