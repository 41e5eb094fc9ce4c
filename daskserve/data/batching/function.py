"""What ``batch`` makes of an async method or function: one whose calls are collected into calls of it.

Each instance has queues of its own, one for each event loop it is used on, made when first needed. Nothing
but the instance's life keeps them, and they hold the instance only while calls of it wait or run. Replicas
may share a class, or a function, within one process: so what is changed at run time is the instance's, too.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
import types
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any

from daskserve.context import current_replica, current_request
from daskserve.data.batching.queue import BatchLimits, BatchQueue, reconsider_on
from daskserve.data.batching.results import as_results
from daskserve.data.batching.stream import END, BatchStream, pass_on

logger = logging.getLogger("daskserve.replica")


class _Item:
    """One call: of which instance, and with which arguments."""

    __slots__ = ("args", "instance", "kwargs", "stream")

    def __init__(
        self, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], stream: BatchStream | None
    ) -> None:
        self.instance = instance
        self.args = args
        self.kwargs = kwargs
        self.stream = stream


Queue = BatchQueue[_Item, Any]

#: What coroutines, async generators and generators call their frame, and what they wait for.
_FRAMES = ("cr_frame", "ag_frame", "gi_frame")
_AWAITED = ("cr_await", "ag_await", "gi_yieldfrom")


class _Owner:
    """What one instance (or a function, which is no instance's) has of a batched function."""

    def __init__(self, limits: BatchLimits, ref: weakref.ref[Any] | None = None) -> None:
        self.limits = limits
        self.ref = ref
        #: Whether the limits are yet to be held against what its replica may run.
        self.is_unchecked = True
        # One loop may serve several replicas of a function.
        self._queues: dict[tuple[asyncio.AbstractEventLoop, str], Queue] = {}

    def queue(self, make: Callable[[BatchLimits], Queue]) -> Queue:
        """Return the queue for the running loop and the current replica, made on first use."""
        loop = asyncio.get_running_loop()
        replica = current_replica.get()
        key = (loop, replica.replica_tag if replica is not None else "")
        queue = self._queues.get(key)
        if queue is None:
            self._sweep(loop)
            queue = self._queues[key] = make(self.limits)
        return queue

    def queues(self) -> list[Queue]:
        return [queue for _, queue in list(self._queues.items())]

    def change(self, *, max_batch_size: int | None = None, wait_s: float | None = None) -> None:
        """Change the limits, for what waits already, too; from any thread."""
        if max_batch_size is not None:
            self.limits.max_batch_size = max_batch_size
        if wait_s is not None:
            self.limits.wait_s = wait_s
        self.is_unchecked = True
        for (loop, _), queue in list(self._queues.items()):
            reconsider_on(loop, queue)

    def _sweep(self, present: asyncio.AbstractEventLoop) -> None:
        # Other loops' queues are for their own threads to judge.
        for key, queue in list(self._queues.items()):
            if key[0].is_closed() or (key[0] is present and queue.is_idle):
                del self._queues[key]


class _Settings:
    """What callers may ask of, and change in, a batched function; of the instance it was taken from."""

    __slots__ = ()

    def _owner(self) -> _Owner:
        raise NotImplementedError

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Change how large a batch may be, from now on; from any thread, such as in ``reconfigure``."""
        self._owner().change(max_batch_size=check_max_batch_size(max_batch_size))

    def set_batch_wait_timeout_s(self, batch_wait_timeout_s: float) -> None:
        """Change how long the first call of a batch waits for others, from now on; from any thread."""
        self._owner().change(wait_s=check_wait_s(batch_wait_timeout_s))

    def _get_max_batch_size(self) -> int:
        return self._owner().limits.max_batch_size

    def _get_batch_wait_timeout_s(self) -> float:
        return self._owner().limits.wait_s

    def _get_curr_iteration_start_times(self) -> tuple[float, ...]:
        """Return when the batches that run now began, in seconds since the epoch."""
        return tuple(sorted(at for queue in self._owner().queues() for at in queue.running.values()))

    async def _is_batching_task_alive(self) -> bool:
        """Return whether calls are still collected. Nothing between batches could end, so they are."""
        return True

    async def _get_handling_task_stack(self) -> str:
        """Return where the batches that run on this loop are, as text."""
        loop = asyncio.get_running_loop()
        tasks = [task for queue in self._owner().queues() for task in queue.running]
        return "\n".join(_describe_stack(task) for task in tasks if task.get_loop() is loop)


class _BatchRunner:
    """Runs the batches of one function."""

    def __init__(
        self,
        function: Callable[..., Any],
        max_running: int,
        size_fn: Callable[[list[Any]], float] | None,
    ) -> None:
        self.function = function
        self.max_running = max_running
        self.size_fn = size_fn
        self.is_generator = inspect.isasyncgenfunction(function)

    def make_queue(self, limits: BatchLimits) -> Queue:
        """Return a queue for the running loop and the current replica."""
        replica = current_replica.get()
        figures = None if replica is None else replica.figures
        queue: Queue = BatchQueue(
            self._run_streams if self.is_generator else self._run,
            limits,
            max_running=self.max_running,
            size_of=None if self.size_fn is None else self._size_of,
            on_batch=None if figures is None else figures.batches_of(self.function.__name__).observe,
        )
        if figures is not None:
            figures.watch_queue(queue)
        return queue

    def warn_if_unreachable(self, limits: BatchLimits) -> None:
        """Warn about batches that are larger than what the current replica runs at a time."""
        replica = current_replica.get()
        wanted = limits.max_batch_size * self.max_running
        # With a measure of the user's own, max_batch_size is no number of calls.
        if replica is None or self.size_fn is not None or not replica.max_concurrent_queries:
            return
        if replica.max_concurrent_queries < wanted:
            logger.warning(
                "Batches of %s in backend %r may never fill: it runs %d requests at a time "
                "(max_concurrent_queries), fewer than max_batch_size * max_concurrent_batches, which is %d.",
                self.function.__qualname__,
                replica.backend_tag,
                replica.max_concurrent_queries,
                wanted,
            )

    def _size_of(self, items: list[_Item]) -> float:
        assert self.size_fn is not None
        first = [item.args[0] if item.args else next(iter(item.kwargs.values())) for item in items]
        return self.size_fn(first)

    def _begin(self, items: Sequence[_Item]) -> Any:
        # The batch is nobody's request: deadline and id of any one of them would be wrong for the others.
        current_request.set(None)
        first = items[0]
        own = () if first.instance is None else (first.instance,)
        columns = [list(column) for column in zip(*(item.args for item in items), strict=True)]
        named = {name: [item.kwargs[name] for item in items] for name in first.kwargs}
        return self.function(*own, *columns, **named)

    async def _run(self, items: list[_Item]) -> list[Any]:
        return as_results(self.function.__qualname__, await self._begin(items), len(items))

    async def _run_streams(self, items: list[_Item]) -> list[Any]:
        streams = [item.stream for item in items if item.stream is not None]
        await pass_on(self.function.__qualname__, self._begin(items), streams)
        return [END] * len(items)


class BatchedFunction(_Settings):
    """What `batch` makes of a function; in a class, a method.

    It passes for a coroutine function, or an async generator function, wherever that is asked.
    """

    __name__: str
    __qualname__: str

    def __init__(
        self,
        function: Callable[..., Any],
        max_batch_size: int,
        wait_s: float,
        max_concurrent_batches: int,
        batch_size_fn: Callable[[list[Any]], float] | None,
        is_method: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._own = _Owner(BatchLimits(max_batch_size, wait_s))
        self._runner = _BatchRunner(function, max_concurrent_batches, batch_size_fn)
        self._is_method = is_method
        self._signature = inspect.signature(function)
        self._owners: dict[int, _Owner] = {}
        #: Numbers of arguments that the function is known to take, if none has a name.
        self._fitting_counts: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        limits = self._own.limits
        return (
            f"<batched {self.__qualname__} max_batch_size={limits.max_batch_size} wait={limits.wait_s:g} s>"
        )

    def __reduce__(self) -> str | tuple[Any, ...]:
        if _is_importable(self):
            return self.__qualname__
        limits = self._own.limits
        return BatchedFunction, (
            self._function,
            limits.max_batch_size,
            limits.wait_s,
            self._runner.max_running,
            self._runner.size_fn,
            self._is_method,
        )

    # ---- what passes it for a function, see `inspect.isfunction` and its like

    @property
    def __code__(self) -> types.CodeType:
        return self._function.__code__

    @property
    def __defaults__(self) -> Any:
        return self._function.__defaults__

    @property
    def __kwdefaults__(self) -> Any:
        return self._function.__kwdefaults__

    def __set_name__(self, owner: type, name: str) -> None:
        # Not for a function that was only put into a class as well: that may be called by itself.
        parent = self.__qualname__.rpartition(".")[0]
        self._is_method = bool(parent) and not parent.endswith("<locals>")

    def __get__(self, instance: Any, owner: type | None = None) -> BatchedFunction | BoundBatch:
        return self if instance is None else BoundBatch(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any] | AsyncIterator[Any]:
        if self._is_method and args:  # Class.method(instance, ...)
            return self.call(args[0], self.owner_of(args[0]), args[1:], kwargs)
        return self.call(None, self._own, args, kwargs)

    def _owner(self) -> _Owner:
        return self._own

    # ---- calls

    def owner_of(self, instance: Any) -> _Owner:
        """Return what an instance has of this function; made on first use, gone with the instance."""
        number = id(instance)
        owner = self._owners.get(number)
        if owner is None:
            limits = self._own.limits
            try:
                ref = weakref.ref(instance, functools.partial(_forget, self._owners, number))
            except TypeError:
                raise TypeError(
                    f"{self.__qualname__} cannot be batched: {type(instance).__name__} has __slots__ without "
                    "'__weakref__'; add that to them."
                ) from None
            made = _Owner(BatchLimits(limits.max_batch_size, limits.wait_s), ref)
            owner = self._owners.setdefault(number, made)  # another thread may have been faster
        return owner

    def call(
        self, instance: Any, owner: _Owner, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Coroutine[Any, Any, Any] | AsyncIterator[Any]:
        """Start a call of an instance."""
        key, args, kwargs = self._arrange(instance, args, kwargs)
        if self._runner.is_generator:
            return self._stream(owner, _Item(instance, args, kwargs, BatchStream()), key)
        return self._submit(owner, _Item(instance, args, kwargs, None), key)

    async def _submit(self, owner: _Owner, item: _Item, key: Hashable) -> Any:
        return await self._queue(owner).submit(item, key)

    async def _stream(self, owner: _Owner, item: _Item, key: Hashable) -> AsyncIterator[Any]:
        queue = self._queue(owner)
        stream = item.stream
        assert stream is not None
        entry = queue.enter(item, key)
        stream.follow(entry.result)
        del item
        try:
            while True:
                result = await stream.get()
                if result is END:
                    return
                yield result
        finally:
            stream.leave()
            queue.leave(entry)
            del entry, stream

    def _queue(self, owner: _Owner) -> Queue:
        if owner.is_unchecked:
            owner.is_unchecked = False
            self._runner.warn_if_unreachable(owner.limits)
        return owner.queue(self._runner.make_queue)

    def _arrange(
        self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Hashable, tuple[Any, ...], dict[str, Any]]:
        """Return which calls this one may go with, and its arguments, those that can without their names."""
        if kwargs or len(args) not in self._fitting_counts:
            own = () if instance is None else (instance,)
            bound = self._signature.bind(*own, *args, **kwargs)
            args, kwargs = bound.args[len(own) :], bound.kwargs
            if not args and not kwargs:
                raise TypeError(
                    f"{self.__qualname__} is batched and was called without arguments; it gets a list for "
                    "each argument, so it needs one at least."
                )
            if not kwargs:
                self._fitting_counts |= {len(args)}
        return (len(args), tuple(sorted(kwargs))), args, kwargs


class BoundBatch(_Settings):
    """A batched method of one instance."""

    __slots__ = ("__self__", "_batched")

    def __init__(self, batched: BatchedFunction, instance: Any) -> None:
        self._batched = batched
        self.__self__ = instance

    def __repr__(self) -> str:
        return f"<{self._batched!r} of {self.__self__!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.__self__, self._batched.__name__)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BoundBatch)
            and self._batched is other._batched
            and self.__self__ is other.__self__
        )

    def __hash__(self) -> int:
        return hash((id(self._batched), id(self.__self__)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batched, name)

    @property
    def __func__(self) -> BatchedFunction:
        return self._batched

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self._batched)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any] | AsyncIterator[Any]:
        return self._batched.call(self.__self__, self._owner(), args, kwargs)

    def _owner(self) -> _Owner:
        return self._batched.owner_of(self.__self__)


def _forget(owners: dict[int, _Owner], number: int, ref: weakref.ref[Any]) -> None:
    owner = owners.get(number)
    if owner is not None and owner.ref is ref:
        del owners[number]


def _is_importable(function: BatchedFunction) -> bool:
    """Whether another process finds the very same under its name; pickle then says no more than that."""
    cloudpickle = sys.modules.get("cloudpickle")
    by_value = cloudpickle.list_registry_pickle_by_value() if cloudpickle is not None else ()
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or any(module == each or module.startswith(f"{each}.") for each in by_value):
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function


def _describe_stack(task: asyncio.Task[Any]) -> str:
    """Return where a waiting task is, from the inside out; its own `get_stack` knows the outside only."""
    places: list[str] = []
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame = next((found for found in (getattr(waiting, name, None) for name in _FRAMES) if found), None)
        if frame is not None:
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        waiting = next(
            (found for found in (getattr(waiting, name, None) for name in _AWAITED) if found), None
        )
    return " < ".join(reversed(places))


# ---- options


def check_max_batch_size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"max_batch_size must be a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"max_batch_size must be at least 1, got {value}")
    return value


def check_wait_s(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"batch_wait_timeout_s must be a number of seconds, got {value!r}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"batch_wait_timeout_s must be a time of at least 0 s, got {value}")
    return value
