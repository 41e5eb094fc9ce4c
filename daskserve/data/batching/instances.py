"""What functions that collect calls have in common: a state per instance, and bound methods."""

from __future__ import annotations

import asyncio
import inspect
import sys
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

    def present(self, make: Callable[..., QueueT], *args: Any) -> QueueT:
        """Return the queue for the running loop and the current replica; the first call makes it."""
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


class InstanceStates(Generic[StateT]):
    """A state for each instance of a class, dropped with the instance."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[weakref.ref[Any], StateT]] = {}

    def __len__(self) -> int:
        return len(self._states)

    def of(self, instance: Any, make: Callable[[weakref.ref[Any]], StateT], name: str) -> StateT:
        """Return the state of an instance; the first call makes it. Errors name the function."""
        number = id(instance)
        found = self._states.get(number)
        if found is None:
            try:
                ref = weakref.ref(instance, partial(self._forget, number))
            except TypeError:
                raise TypeError(
                    f"{name} cannot be batched: {type(instance).__name__} has __slots__ without "
                    "'__weakref__'; add that to them."
                ) from None
            # Another thread may have made it first.
            found = self._states.setdefault(number, (ref, make(ref)))
        return found[1]

    def _forget(self, number: int, ref: weakref.ref[Any]) -> None:
        found = self._states.get(number)
        if found is not None and found[0] is ref:
            del self._states[number]


class BoundFunction:
    """A function that collects calls, as a method of one instance."""

    __slots__ = ("__self__", "_function")

    def __init__(self, function: Any, instance: Any) -> None:
        self._function = function
        self.__self__ = instance

    def __repr__(self) -> str:
        return f"<{self._function!r} of {self.__self__!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.__self__, self._function.__name__)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BoundFunction)
            and self._function is other._function
            and self.__self__ is other.__self__
        )

    def __hash__(self) -> int:
        return hash((id(self._function), id(self.__self__)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    @property
    def __func__(self) -> Any:
        return self._function

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self._function)
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
