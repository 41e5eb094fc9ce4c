"""Inspects definitions of user code without running them: their methods, and how to call each."""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import State

from daskserve.data.tasks.marks import CONSUMER

#: The attribute that `daskserve.data.replica.requests.accept_batch` sets on a callable.
ACCEPT_BATCH = "_serve_accept_batch"

CALL = "__call__"
#: Public methods that only daskserve calls.
HOOKS = frozenset(
    {
        "reconfigure",
        "check_health",
        "record_autoscaling_stats",
        "record_replica_metadata",
        "record_routing_stats",
    }
)

#: The attribute that holds the application or builder of a class, or an object's own application.
APP = "__daskserve_app__"
#: An attribute of classes whose objects cannot be served: what to serve instead.
REMEDY = "__daskserve_remedy__"
ASGI_PARAMETERS = ("scope", "receive", "send")


def _reduce_state(state: State) -> tuple[Any, ...]:
    return State, (), vars(state), None, None, _restore_state


def _restore_state(state: State, attributes: dict[str, Any]) -> None:
    vars(state).update(attributes)


# When pickle looks up ``__setstate__`` of a new `State`, the search in a dict that does not exist yet
# recurses endlessly. Every Starlette and FastAPI application has a `State`. Code that pickles a definition
# has inspected it before, and so has imported this module.
copyreg.pickle(State, _reduce_state)


@dataclass(frozen=True, slots=True)
class Method:
    """A method of user code that requests can call."""

    name: str
    is_async: bool
    takes_argument: bool
    is_asgi: bool = False
    accepts_batches: bool = False


@dataclass(frozen=True, slots=True)
class CallableFacts:
    """The facts about a definition. The defaults are for import paths, because these are not imported."""

    is_blocking: bool = True
    is_asgi_app: bool = False
    accepts_batches: bool = False
    ignores_bodies: bool = False
    docs_path: str = ""
    methods: Mapping[str, Method] = field(default_factory=dict)
    #: The queue of tasks that the class consumes: a `daskserve.data.tasks.decorator.ConsumerSpec`.
    consumer: Any = None

    def rare(self) -> dict[str, Any]:
        """Return the facts that only few definitions have, by name, if they differ from the defaults."""
        names = ("ignores_bodies", "docs_path")
        return {name: value for name in names if (value := getattr(self, name))}


def inspect_definition(
    definition: Any, init_args: Sequence[Any] = (), init_kwargs: Mapping[str, Any] | None = None
) -> CallableFacts:
    """Return the facts about a definition without running it.

    Raises
    ------
    TypeError
        It cannot be served.
    ValueError
        It is not a class, but there are init arguments.
    """
    if isinstance(definition, str):
        return CallableFacts()
    remedy = getattr(type(definition), REMEDY, "")
    if remedy:
        raise TypeError(f"{definition!r} is not a function, a class or an ASGI application. {remedy}")
    if inspect.isclass(definition):
        methods = _methods_of_class(definition)
    elif callable(definition):
        if init_args or init_kwargs:
            raise ValueError(f"Only a class takes init arguments; pass none for {_describe(definition)}.")
        methods = {CALL: _method(CALL, definition, definition)}
    else:
        methods = {}
    call = methods.get(CALL)
    answering = [call] if call else [each for each in methods.values() if each.name not in HOOKS]
    # A class need not have methods, because it may do all of its work in the constructor and in threads.
    if not answering and not inspect.isclass(definition):
        raise TypeError(
            "Backend definition must be a function, a class, an ASGI application or an import path, "
            f"got {_describe(definition)}"
        )
    return CallableFacts(
        is_blocking=any(not each.is_async for each in answering),
        is_asgi_app=call is not None and call.is_asgi,
        accepts_batches=any(each.accepts_batches for each in answering),
        ignores_bodies=call is not None and not (call.is_async or call.takes_argument),
        docs_path=_docs_path(getattr(definition, APP, definition)),
        methods=methods,
        consumer=getattr(definition, CONSUMER, None) if inspect.isclass(definition) else None,
    )


def _docs_path(app: Any) -> str:
    """Return the path of a FastAPI application's documentation, below its route; empty if it has none."""
    is_fastapi = any(each.__module__.partition(".")[0] == "fastapi" for each in type(app).__mro__)
    found = getattr(app, "docs_url", "") if is_fastapi else ""
    return found if isinstance(found, str) else ""


def python_methods(definition: Any) -> list[str]:
    """Return the names of the public methods of a class, which can be called by handle."""
    if not inspect.isclass(definition):
        return []
    return [name for name, _ in _functions_of(definition) if name != CALL]


def _describe(definition: Any) -> str:
    if inspect.isclass(definition):
        return f"class {definition.__name__}"
    name = getattr(definition, "__name__", None)
    return f"{type(definition).__name__} {name}" if name else f"{type(definition).__name__}: {definition!r}"


def _methods_of_class(cls: type) -> dict[str, Method]:
    methods = {}
    for name, value in _functions_of(cls):
        is_bound = isinstance(inspect.getattr_static(cls, name), (staticmethod, classmethod))
        methods[name] = _method(name, value, cls, skip=0 if is_bound else 1)
    return methods


def _functions_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each public method of a class, and of ``__call__``, in order."""
    for name in dir(cls):
        if name == CALL or not name.startswith("_"):
            value = getattr(cls, name, None)
            if callable(value) and not inspect.isclass(value):
                yield name, value


def _method(name: str, function: Any, owner: Any, skip: int = 0) -> Method:
    positional = _positional_parameters(function)[skip:]
    is_asgi = tuple(positional[:3]) == ASGI_PARAMETERS
    return Method(
        name,
        is_async=is_asgi or is_async(function),
        takes_argument=bool(positional),
        is_asgi=is_asgi,
        accepts_batches=hasattr(function, ACCEPT_BATCH) or hasattr(owner, ACCEPT_BATCH),
    )


def _positional_parameters(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some builtins have no signature; assume that they take the request
        return ["request"]
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    names = []
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            # Add two, so that one remains even if the first is skipped as ``self``.
            names += [f"{parameter.name}{index}" for index in range(2)]
        elif parameter.kind not in kinds:
            names.append(parameter.name)
    return names


def is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = type(function).__call__  # an object made callable by its class
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def takes_rank(function: Any) -> bool:
    """Return whether a user's ``reconfigure`` has a parameter ``rank``."""
    try:
        parameter = inspect.signature(function).parameters.get("rank")
    except (ValueError, TypeError):  # some builtins have no signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return parameter is not None and parameter.kind in kinds
