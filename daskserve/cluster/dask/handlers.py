"""Functions that a Dask server calls for other processes, for as long as daskserve runs on it.

Problem: Dask keeps every function that was ever a handler, in a cache of signatures. A method would keep its
object, and so everything that a Host or a supervisor has ever held, for as long as the server runs. Choice:
Dask gets an object that refers to the function until it is removed. All objects of one operation are equal,
so the cache keeps one of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from distributed import Scheduler, Worker


class Handler:
    """Calls a function until `release`."""

    def __init__(self, operation: str, function: Callable[..., Any]) -> None:
        #: The attributes of a handler that Dask reads.
        self.__name__ = operation
        self.__signature__ = inspect.signature(function)
        self._function: Callable[..., Any] | None = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            raise RuntimeError(f"The handler of {self.__name__} was removed.")
        return self._function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return type(other) is Handler and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, ...]:
        return (self.__name__, *self.__signature__.parameters)

    def release(self) -> None:
        """Drop the function."""
        self._function = None


def add_handler(server: Scheduler | Worker, operation: str, handler: Callable[..., Any]) -> None:
    """Register a function as the handler of an operation that other processes call."""
    server.handlers[operation] = Handler(operation, handler)


def remove_handler(server: Scheduler | Worker, operation: str) -> None:
    """Undo `add_handler`; idempotent."""
    _release(server.handlers.pop(operation, None))


def replace_method(
    scheduler: Scheduler, name: str, method: Callable[..., Any], *, handler: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Replace a method that also answers remote calls; return the original one for `restore_method`.

    Parameters
    ----------
    handler
        The handler of remote calls; by default ``method``.
    """
    original: Callable[..., Any] = scheduler.handlers[name]
    setattr(scheduler, name, method)
    scheduler.handlers[name] = Handler(name, handler or method)
    return original


def restore_method(scheduler: Scheduler, name: str, original: Callable[..., Any]) -> None:
    """Undo `replace_method`."""
    _release(scheduler.handlers[name])
    scheduler.handlers[name] = original
    vars(scheduler).pop(name, None)


def _release(handler: object) -> None:
    if isinstance(handler, Handler):
        handler.release()
