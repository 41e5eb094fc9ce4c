"""The two forms of each function of ``import daskserve as serve``: a blocking one and an awaitable one.

The body of both is one coroutine function, so they have the same parameters and docstring. Its first argument
is the `Form`, which says whether its steps block the thread; see `daskserve.loops.blocking`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from daskserve.client.client import AsyncClient, Client, ClientVerbs
from daskserve.client.instance.calls import run_on
from daskserve.client.instance.connection import InstanceConnection
from daskserve.client.verbs.blocking import blocking_form
from daskserve.cluster.protocols.base import ClientConnection
from daskserve.options.fields.ray_names import INSTEAD
from daskserve.payload.shown_errors import shows_errors

P = ParamSpec("P")
T = TypeVar("T")
ClientT = TypeVar("ClientT", Client, AsyncClient)


@dataclass(frozen=True)
class Form(Generic[ClientT]):
    """How a function waits, and the kind of client that it returns."""

    asynchronous: bool
    client: Callable[[InstanceConnection], ClientT]

    async def run(self, cluster_connection: ClientConnection, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the connection's loop and return its result."""
        return await run_on(cluster_connection, coroutine, asynchronous=self.asynchronous)

    def verbs(self, connection: InstanceConnection) -> ClientVerbs:
        """Return the verbs of an instance, which wait in this form."""
        return ClientVerbs(connection, asynchronous=self.asynchronous)


def blocking(
    body: Callable[Concatenate[Form[Client], P], Coroutine[Any, Any, T]], *, owner: str = "serve"
) -> Callable[P, T]:
    """Return the blocking form of a function, named as its body without the underscore.

    ``owner`` is the name that users write before it: the package, or the method's object.
    """
    name = body.__name__.removeprefix("_")

    def start(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return _called(body, name, owner, Form(False, Client), args, kwargs)

    form = blocking_form(start, body, f"{owner}.{name}()", f"{owner}.{name}_async(...)`")
    _name(form, name, body)
    return form


def awaitable(
    body: Callable[Concatenate[Form[AsyncClient], P], Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the awaitable form of a function, named as its body with the suffix ``_async``."""
    name = f"{body.__name__.removeprefix('_')}_async"

    @shows_errors
    @functools.wraps(body)
    async def form(*args: P.args, **kwargs: P.kwargs) -> T:
        return await _called(body, name, "serve", Form(True, AsyncClient), args, kwargs)

    _name(form, name, body)
    return form


def _called(
    body: Callable[..., Coroutine[Any, Any, T]],
    name: str,
    owner: str,
    form: Form[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Coroutine[Any, Any, T]:
    """Call a body, which returns its coroutine; explain errors for arguments that only Ray Serve has."""
    try:
        return body(form, *args, **kwargs)
    except TypeError:
        signature = _users(body)
        theirs = [each for each in kwargs if each in INSTEAD and each not in signature.parameters]
        used = next((each for each in theirs if kwargs[each] is not None), None)
        if used is not None:
            raise TypeError(
                f"{owner}.{name}() has no argument '{used}'. That is Ray Serve's name: {INSTEAD[used]}."
            ) from None
        if theirs:
            return _called(body, name, owner, form, args, {n: kwargs[n] for n in kwargs if n not in theirs})
        known = ", ".join(signature.parameters)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{owner}.{name}(): {error}. Its arguments are: {known}.") from None
        raise


def _name(form: Any, name: str, body: Callable[..., Any]) -> None:
    form.__signature__ = _users(body)
    form.__name__ = form.__qualname__ = name


def _users(body: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that users see: the body's without the form."""
    signature = inspect.signature(body)
    return signature.replace(parameters=list(signature.parameters.values())[1:])
