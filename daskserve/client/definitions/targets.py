"""Targets of `daskserve.run`: applications, builders and import paths, resolved to an `Application`."""

from __future__ import annotations

import inspect
import sys
import typing
from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from daskserve.client.definitions.deployments import Application, Deployment, default_name
from daskserve.data.replica.user_code.class_app import ingress, is_asgi_app
from daskserve.errors import BadRequestError
from daskserve.payload.importing import import_definition

#: A builder's parameter does not have one of these kinds, and its annotation is not one of these classes.
_BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
_NO_ARGUMENTS = (str, bytes, bool, int, float, list, tuple, set)
#: Flask, Django's `get_wsgi_application` and others.
_WSGI = (
    "{!r} is a WSGI application; daskserve serves ASGI applications. Wrap it: `pip install a2wsgi` on the "
    "workers, too, and serve `a2wsgi.WSGIMiddleware(app)`."
)


def application_of(target: Any, args: Mapping[str, Any] | None = None) -> Application:
    """Resolve a target of `daskserve.run` to an application.

    Parameters
    ----------
    target : Application, ASGI application, function or str
        What ``.bind()`` returns; an ASGI application such as one of FastAPI; a builder, which is a function
        with exactly one parameter that returns one of these; or the import path of one of them, such as
        ``"module:app"``. The replicas import an ASGI application by its path.
    args : dict, optional
        The argument of a builder. If the builder's parameter is annotated with a pydantic model, the builder
        gets the model.

    Raises
    ------
    TypeError
        The target is none of these, a builder has no or several parameters, or returns something else.
    BadRequestError
        A `ValueError`: the import path is wrong, or there are ``args`` but the target is not a builder.
    pydantic.ValidationError
        A `ValueError`: the model refuses the arguments.
    """
    found = target
    if isinstance(target, str):
        found = import_definition(target)
        if isinstance(found, str):
            raise TypeError(f"Import path {target!r} must name an application or a builder, not {found!r}.")
    if isinstance(found, FunctionType) and not is_asgi_app(found):
        if _is_wsgi_app(found):
            raise TypeError(_WSGI.format(found))
        return _built(found, args or {})
    # Replicas import an ASGI application by its path, as its server would. A pickled application would be a
    # copy of the object that its module refers to.
    application = _bound(target if isinstance(target, str) and is_asgi_app(found) else found)
    if args:
        raise BadRequestError(
            f"Application {application.deployment.name!r} is already built, so it takes no arguments, got "
            f"{sorted(args)}; pass a function that takes them and returns the application."
        )
    return application


def factory_application(path: str) -> Application:
    """Return the application of the import path of a function that returns an ASGI application.

    Each replica calls the function, without arguments.
    """
    build = partial(_call, path)
    return Deployment(ingress(build)(), default_name(path)).bind()


def _call(path: str) -> Any:
    return import_definition(path)()


def _bound(found: Any, builder: str = "") -> Application:
    if isinstance(found, Application):
        return found
    if isinstance(found, str) or is_asgi_app(found):
        return Deployment(found, default_name(found)).bind()
    if _is_wsgi_app(found):
        raise TypeError(_WSGI.format(found))
    is_unbound = isinstance(found, Deployment)
    got = f"deployment {found.name!r}, which is not bound: call its bind()" if is_unbound else repr(found)
    if builder:
        raise TypeError(
            f"Application builder {builder} must return what .bind() returns, or an ASGI application, "
            f"got {got}"
        )
    raise TypeError(
        "serve.run() takes what .bind() returns, an ASGI application, a function that returns one of them, "
        f"or the import path of one of them, got {got}"
    )


def _is_wsgi_app(found: Any) -> bool:
    if inspect.isclass(found) or not callable(found):
        return False
    try:
        return list(inspect.signature(found).parameters) == ["environ", "start_response"]
    except (TypeError, ValueError):  # it has no signature
        return False


def _built(builder: Callable[[Any], Any], args: Mapping[str, Any]) -> Application:
    name = builder.__qualname__
    # Optional keyword-only parameters do not count.
    parameters = [
        each
        for each in inspect.signature(builder).parameters.values()
        if each.kind is not each.KEYWORD_ONLY or each.default is each.empty
    ]
    if len(parameters) != 1 or parameters[0].kind in _BY_KEYWORD:
        raise TypeError(
            f"Application builder {name} must have exactly one parameter, for the dict of its arguments, "
            f"but its signature is {inspect.signature(builder)}. For a function that builds an ASGI "
            "application in each replica, run serve.deployment(serve.ingress(function)()).bind()."
        )
    model = _model_of(builder, parameters[0])
    return _bound(builder(dict(args) if model is None else model(**args)), builder=name)


def _model_of(builder: Callable[[Any], Any], parameter: inspect.Parameter) -> type[Any] | None:
    """Return the pydantic model of a builder's parameter; None if the builder takes a dict."""
    from pydantic import BaseModel

    if parameter.annotation is inspect.Parameter.empty:
        return None
    try:
        annotation = _resolved(builder, parameter)
    except NameError as error:
        raise TypeError(
            f"The annotation {parameter.annotation!r} of application builder {builder.__qualname__} cannot "
            f"be resolved: {error}. Define the class at the top level of its module, or where serve.run() is "
            "called."
        ) from error
    models = [BaseModel]
    if "pydantic.v1" in sys.modules:  # then the annotation may be one of its models
        models.append(sys.modules["pydantic.v1"].BaseModel)
    if annotation in _NO_ARGUMENTS:
        raise TypeError(
            f"Application builder {builder.__qualname__} gets a dict of all its arguments, but its parameter "
            f"{parameter.name!r} is annotated as {annotation.__name__}. Annotate it as dict, or as a "
            f"pydantic model with the field {parameter.name!r}."
        )
    is_model = isinstance(annotation, type) and issubclass(annotation, tuple(models))
    return annotation if is_model else None


def _resolved(builder: Callable[[Any], Any], parameter: inspect.Parameter) -> Any:
    """Return the annotation of a parameter, which may be a string, without evaluating the other annotations.

    Names are looked up in the builder's module, and then in the calling functions, because a class that is
    defined in a function can be found only there.
    """
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    names = dict(inspect.getclosurevars(builder).nonlocals)
    frame = inspect.currentframe()
    assert frame is not None
    known: list[dict[str, Any]] = []
    while frame.f_back is not None:
        frame = frame.f_back
        if not frame.f_globals.get("__name__", "").startswith("daskserve."):
            known.append(frame.f_locals)
    stub = FunctionType(_no_code.__code__, builder.__globals__)
    stub.__annotations__ = {parameter.name: parameter.annotation}
    return typing.get_type_hints(stub, localns=ChainMap(names, builder.__globals__, *known))[parameter.name]


def _no_code() -> None: ...
