"""The common parts of functions that collect calls: a state for each instance, and bound methods."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from daskserve.context import current_replica

QueueT = TypeVar("QueueT")
StateT = TypeVar("StateT")


class QueuesByLoop(Generic[QueueT]):
    """The queues of one instance, by event loop and replica: one loop may serve several replicas."""

    def __init__(self) -> None:
        #: Each queue, with a reference to an object that exists as long as its replica.
        self._queues: dict[tuple[asyncio.AbstractEventLoop, str], tuple[weakref.ref[Any], QueueT]] = {}

    def current(self, make: Callable[..., QueueT], *args: Any) -> QueueT:
        """Return the queue for the running loop and the current replica; created by the first call."""
        loop = asyncio.get_running_loop()
        replica = current_replica.get()
        tag, owner = ("", loop) if replica is None else (replica.replica_tag, replica.holder)
        found = self._queues.get((loop, tag))
        if found is None or found[0]() is not owner:
            self._drop_unused()
            found = self._queues[loop, tag] = weakref.ref(owner), make(*args)
        return found[1]

    def items(self) -> list[tuple[asyncio.AbstractEventLoop, QueueT]]:
        """Return all queues with their loops; any thread may call this."""
        return [(loop, queue) for (loop, _), (_, queue) in list(self._queues.items())]

    def _drop_unused(self) -> None:
        """Drop the queues whose loop is closed, or whose replica no longer exists."""
        for key, (owner, _) in list(self._queues.items()):
            if key[0].is_closed() or owner() is None:
                self._queues.pop(key, None)  # another thread may have dropped it


class FunctionLike:
    """An object that `inspect` treats like the function that it wraps."""

    __name__: str
    __qualname__: str
    __wrapped__: Any

    @property
    def __code__(self) -> types.CodeType:
        return self.__wrapped__.__code__  # type: ignore[no-any-return]

    @property
    def __defaults__(self) -> Any:
        return self.__wrapped__.__defaults__

    @property
    def __kwdefaults__(self) -> Any:
        return self.__wrapped__.__kwdefaults__

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self.__qualname__ if is_importable(self) else (type(self), self._parts())

    def _parts(self) -> tuple[Any, ...]:
        """Return the arguments with which a copy is constructed."""
        raise NotImplementedError


class InstanceFunction(FunctionLike, Generic[StateT]):
    """A function or method that collects calls, with a state for each instance of its class."""

    def __init__(self, function: Callable[..., Any], is_method: bool, function_state: StateT) -> None:
        functools.update_wrapper(self, function)
        self._is_method = is_method
        #: The state of calls without an instance.
        self._function_state = function_state
        self._states: dict[int, tuple[weakref.ref[Any], StateT]] = {}

    def __set_name__(self, owner: type, name: str) -> None:
        # A function that was assigned to a class attribute later is not a method: it may be called alone.
        parent = self.__qualname__.rpartition(".")[0]
        self._is_method = bool(parent) and not parent.endswith("<locals>")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_method and args:  # Class.method(instance, ...)
            return self.call(args[0], self.state_of(args[0]), args[1:], kwargs)
        return self.call(None, self._function_state, args, kwargs)

    def call(self, instance: Any, state: StateT, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Start a call of an instance."""
        raise NotImplementedError

    def state_of(self, instance: Any) -> StateT:
        """Return the state of an instance; created on first use, dropped with the instance."""
        number = id(instance)
        found = self._states.get(number)
        if found is None:
            try:
                ref = weakref.ref(instance, partial(_forget, self._states, number))
            except TypeError:
                raise TypeError(
                    f"{self.__qualname__} cannot be batched: {type(instance).__name__} has __slots__ without "
                    "'__weakref__'; add that to them."
                ) from None
            # Another thread may have created the state first.
            found = self._states.setdefault(number, (ref, self._new_state(ref)))
        return found[1]

    def _new_state(self, ref: weakref.ref[Any]) -> StateT:
        """Return a new state for the instance to which ``ref`` refers."""
        raise NotImplementedError

    def _state(self) -> StateT:
        return self._function_state


def _forget(states: dict[int, tuple[weakref.ref[Any], StateT]], number: int, ref: weakref.ref[Any]) -> None:
    found = states.get(number)
    if found is not None and found[0] is ref:
        del states[number]


class BoundFunction:
    """An `InstanceFunction` as a method of one instance."""

    __slots__ = ("__func__", "__self__")

    def __init__(self, function: Any, instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance

    def __repr__(self) -> str:
        return f"<{self.__func__!r} of {self.__self__!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.__self__, self.__func__.__name__)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BoundFunction)
            and self.__func__ is other.__func__
            and self.__self__ is other.__self__
        )

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__.call(self.__self__, self._state(), args, kwargs)

    def _state(self) -> Any:
        return self.__func__.state_of(self.__self__)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.__func__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def is_importable(function: Any) -> bool:
    """Return whether another process can import the function by name, so that pickle needs only that."""
    cloudpickle = sys.modules.get("cloudpickle")
    by_value = cloudpickle.list_registry_pickle_by_value() if cloudpickle is not None else ()
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or any(module == each or module.startswith(f"{each}.") for each in by_value):
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function
