"""The multiplexed models of one replica: the loaders of its functions, and what others may know of them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from daskserve.data.multiplexing.cache import LOADED
from daskserve.data.multiplexing.function import MultiplexedFunction
from daskserve.data.multiplexing.loader import ModelLimits, ModelLoader
from daskserve.telemetry.models import ModelMetrics
from daskserve.telemetry.table import MetricSample

#: How many models of a replica are published to routers and in its status, the most recently used first.
MAX_PUBLISHED = 1000


class Multiplexer:
    """The loaders of one replica."""

    def __init__(self) -> None:
        self.metrics = ModelMetrics()
        #: By the numbers of the function and of the object whose method it is; loaders keep both alive.
        #: Names would not do: all functions that a factory makes have the same one.
        self._loaders: dict[tuple[int, int], ModelLoader] = {}
        #: Whether the replica has multiplexed functions, so that its requests hold the models that they use.
        self.is_used = False

    def loader(self, function: Any, instance: Any, limits: ModelLimits) -> ModelLoader:
        """Return the loader of a function, or of a method of an object; the first call creates it."""
        key = (id(function), id(instance))
        found = self._loaders.get(key)
        if found is None:
            self.is_used = True
            load = function if instance is None else function.__get__(instance)
            made = ModelLoader(load, limits, self.metrics, function.__qualname__)
            found = self._loaders.setdefault(key, made)  # another thread may have been first
        return found

    def find(self, target: Any) -> bool:
        """Look for multiplexed functions in what a replica serves; return whether to preload models."""
        for function, instance in _functions_of(target):
            self.is_used = True
            if function.limits.preload:
                self.loader(function.function, instance, function.limits)
        return bool(self._loaders)

    async def preload(self) -> None:
        """Load the models that the replica starts with; raise if one fails."""
        wanted = [(loader, each) for loader in self._loaders.values() for each in loader.limits.preload]
        for loader, model_id in wanted:
            await loader.get(model_id)

    async def close(self) -> None:
        """Unload all models; to be called on the event loop of user code."""
        await asyncio.gather(*(each.close() for each in self._loaders.values()))

    def facts(self) -> Mapping[str, Any]:
        """Return what routers and the status say of the models; empty without any."""
        if not self._loaders:
            return {}
        found: dict[str, str] = {}
        loaders = list(self._loaders.values())
        for each in loaders:
            found.update(each.ids()[:MAX_PUBLISHED])
        limits = [each.limits.max_models for each in loaders]
        return {
            "models": dict(list(found.items())[:MAX_PUBLISHED]),
            "count": sum(len(each.cache.models) for each in loaders),
            "capacity": sum(filter(None, limits)) if all(limits) else None,
            "load_s": max((each.load_s for each in loaders), default=0.0),
        }

    def samples(self, labels: tuple[str, str, str]) -> list[MetricSample]:
        """Return the metrics of the models."""
        if not self._loaders:
            return []
        loaded = [
            name for each in list(self._loaders.values()) for name, state in each.ids() if state == LOADED
        ]
        return self.metrics.samples(labels, loaded)


def _functions_of(target: Any) -> Iterator[tuple[MultiplexedFunction, Any]]:
    """Return the multiplexed methods of an object, and the multiplexed functions of its module.

    An application may be pickled by value: then its functions know the names of the module.
    """
    kind = type(target)
    functions = [target] if inspect.isfunction(target) else []
    for name in dir(kind):
        each = inspect.getattr_static(kind, name, None)
        if isinstance(each, MultiplexedFunction):
            yield each, target
        elif inspect.isfunction(each):
            functions.append(each)
    for module in {id(each.__globals__): each.__globals__ for each in functions}.values():
        for value in list(module.values()):
            if isinstance(value, MultiplexedFunction):
                yield value, None
