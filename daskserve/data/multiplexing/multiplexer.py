"""The multiplexed models of one replica: the loaders of its functions, and facts for routers and status."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from daskserve.data.multiplexing.cache import LOADED
from daskserve.data.multiplexing.function import MultiplexedFunction
from daskserve.data.multiplexing.loader import ModelLimits, ModelLoader
from daskserve.telemetry.models import ModelMetrics
from daskserve.telemetry.table import MetricSample

#: Maximum number of models that a replica reports to routers and in its status, most recently used first.
MAX_PUBLISHED = 1000


class Multiplexer:
    """The loaders of one replica."""

    def __init__(self) -> None:
        self.metrics = ModelMetrics()
        #: The loaders, with a reference to the function or object that owns each. The keys are the ``id`` of
        #: the function and of the object, because all functions that a factory makes have the same name.
        self._loaders: dict[tuple[int, int], tuple[Callable[[], Any], ModelLoader]] = {}
        #: The loaders of deleted objects, while they have models.
        self._retired: dict[int, ModelLoader] = {}
        #: Whether the replica has multiplexed functions; if so, its requests hold the models that they use.
        self.is_used = False

    def loader(self, function: Any, instance: Any, limits: ModelLimits) -> ModelLoader:
        """Return the loader of a function, or of a method of an object; the first call creates it."""
        key = (id(function), id(instance))
        found = self._loaders.get(key)
        if found is None:
            self.is_used = True
            owner = function if instance is None else instance
            ref: Callable[[], Any]
            try:
                ref = weakref.ref(owner, partial(self._retire, key))
            except TypeError:  # the object has __slots__ without __weakref__, so it is kept alive
                ref = partial(_same, owner)
            load = partial(_load_by, ref) if instance is None else partial(_load_by, ref, function)
            made = ModelLoader(load, limits, self.metrics, function.__qualname__)
            found = self._loaders.setdefault(key, (ref, made))  # another thread may have created one first
        return found[1]

    def _retire(self, key: tuple[int, int], ref: weakref.ref[Any]) -> None:
        """Forget the loader of a deleted object; any thread may call this, at any time."""
        found = self._loaders.get(key)
        if found is not None and found[0] is ref:
            del self._loaders[key]
            found[1].retire()
            self._retired[id(found[1])] = found[1]
            self._all()

    def _present(self) -> list[ModelLoader]:
        return [loader for _, loader in list(self._loaders.values())]

    def _all(self) -> list[ModelLoader]:
        """Return all loaders that may have models."""
        for number, each in list(self._retired.items()):
            if each.is_over:
                self._retired.pop(number, None)
        return [*self._present(), *list(self._retired.values())]

    def find(self, target: Any) -> bool:
        """Find the multiplexed functions of a replica's object; return whether there are models to load."""
        for function, instance in _functions_of(target):
            self.is_used = True
            if function.limits.preload:
                self.loader(function.__wrapped__, instance, function.limits)
        return bool(self._loaders)

    async def preload(self) -> None:
        """Load the models of ``preload``; raise if one fails."""
        wanted = [(loader, each) for loader in self._present() for each in loader.limits.preload]
        for loader, model_id in wanted:
            await loader.get(model_id)

    async def close(self) -> None:
        """Unload all models. Call this on the event loop of user code."""
        await asyncio.gather(*(each.close() for each in self._all()))

    def facts(self) -> Mapping[str, Any]:
        """Return the facts about the models for routers and the status; empty without loaders."""
        if not self._loaders:
            return {}
        found: dict[str, str] = {}
        loaders = self._present()
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
        loaders = self._all()
        if not loaders:
            return []
        loaded = [name for each in loaders for name, state in each.ids() if state == LOADED]
        return self.metrics.samples(labels, loaded)


def _same(owner: Any) -> Any:
    return owner


def _load_by(ref: Callable[[], Any], *args: Any) -> Any:
    """Load a model: ``args`` are its id, preceded by the function if ``ref`` refers to its object."""
    owner = ref()
    if owner is None:
        raise ReferenceError("the object that loads the model is gone")
    *functions, model_id = args
    return functions[0](owner, model_id) if functions else owner(model_id)


def _functions_of(target: Any) -> Iterator[tuple[MultiplexedFunction, Any]]:
    """Yield the multiplexed methods of an object, and the multiplexed functions of its module.

    The globals of its functions are searched, because an application may be pickled by value.
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
