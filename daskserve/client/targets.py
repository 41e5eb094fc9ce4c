"""What a program passes to `daskserve.run`, as the application that it stands for."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from daskserve.client.deployments import Application, Deployment
from daskserve.data.replica.definitions import import_definition
from daskserve.errors import BadRequestError


def application_of(target: Any, args: Mapping[str, Any] | None = None) -> Application:
    """Return the application that a target stands for.

    Parameters
    ----------
    target : Application, function or str
        What ``.bind()`` returns; a builder, which is a function with exactly one parameter that returns an
        application; or the import path of one of them, such as ``"module:app"``.
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
    if isinstance(target, str):
        path, target = target, import_definition(target)
        if isinstance(target, str):
            raise TypeError(f"Import path {path!r} must name an application or a builder, not {target!r}.")
    if isinstance(target, Application):
        if args:
            raise BadRequestError(
                f"Application {target.deployment.name!r} is already built, so it takes no arguments, got "
                f"{sorted(args)}; pass a function that takes them and returns the application."
            )
        return target
    if isinstance(target, FunctionType):
        return _built(target, args or {})
    hint = " (did you forget .bind()?)" if isinstance(target, Deployment) else ""
    raise TypeError(
        "serve.run() takes what .bind() returns, a function that returns it, or the import path of one of "
        f"them, got {target!r}{hint}"
    )


def _built(builder: Callable[[Any], Any], args: Mapping[str, Any]) -> Application:
    name = builder.__qualname__
    parameters = list(inspect.signature(builder).parameters.values())
    if len(parameters) != 1:
        raise TypeError(
            f"Application builder {name} must have exactly one parameter, for its arguments, but has "
            f"{len(parameters)}."
        )
    model = _model_of(builder, parameters[0])
    built = builder(dict(args) if model is None else model(**args))
    if not isinstance(built, Application):
        hint = " (did you forget .bind()?)" if isinstance(built, Deployment) else ""
        raise TypeError(f"Application builder {name} must return what .bind() returns, got {built!r}{hint}")
    return built


def _model_of(builder: Callable[[Any], Any], parameter: inspect.Parameter) -> type[Any] | None:
    """Return the pydantic model of a builder's parameter; None if the builder takes a dict."""
    from pydantic import BaseModel

    if parameter.annotation is inspect.Parameter.empty:
        return None
    try:
        annotation = typing.get_type_hints(builder)[parameter.name]
    except NameError as error:
        raise TypeError(
            f"The annotation {parameter.annotation!r} of application builder {builder.__qualname__} cannot "
            f"be resolved: {error}. Define the class at the top level of its module."
        ) from error
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None
