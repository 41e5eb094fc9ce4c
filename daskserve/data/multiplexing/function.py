"""The object that ``multiplexed`` returns for an async function or method that loads a model."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Coroutine
from typing import Any

from daskserve.context import current_replica
from daskserve.data.batching.instances import FunctionLike
from daskserve.data.multiplexing.loader import ModelLimits, ModelLoader
from daskserve.errors import NotInReplicaError


class MultiplexedFunction(FunctionLike):
    """A function or method that returns a model by its id, and loads it first if necessary.

    Each replica has its own models, and each object has separate models for its methods. `inspect` and
    asyncio treat this object as a coroutine function.
    """

    def __init__(self, function: Any, limits: ModelLimits) -> None:
        functools.update_wrapper(self, function)
        self.limits = limits
        self._signature = inspect.signature(function)
        #: A method takes its object as an additional first argument.
        self._count = len(self._signature.parameters)

    def __repr__(self) -> str:
        return f"<multiplexed {self.__qualname__} {self.limits!r}>"

    def _parts(self) -> tuple[Any, ...]:
        return self.__wrapped__, self.limits

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        if kwargs or len(args) != self._count:
            args = self._signature.bind(*args, **kwargs).args  # raises the same errors as a call
        return self._get(self._loader(args[0] if self._count > 1 else None), args)

    async def _get(self, loader: ModelLoader, args: tuple[Any, ...]) -> Any:
        """Return a model. This call keeps the function and its object alive; the loader does not."""
        return await loader.get(args[-1])

    def _loader(self, instance: Any) -> ModelLoader:
        replica = current_replica.get()
        if replica is None or replica.multiplexer is None:
            raise NotInReplicaError(
                f"{self.__qualname__} can only be used within a deployment: its models belong to "
                "a replica. A thread of your own must run in the replica's context: "
                "Thread(target=contextvars.copy_context().run, ...)."
            )
        found: ModelLoader = replica.multiplexer.loader(self.__wrapped__, instance, self.limits)
        return found
