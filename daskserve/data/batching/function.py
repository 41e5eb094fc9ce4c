"""The object that ``batch`` returns for an async method or function.

Each instance has its own queues, one per event loop, created on first use. The queues live as long as the
instance, and reference it only while its calls wait or run. Replicas may share a class or a function within
one process, so limits that change at run time also belong to the instance.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from daskserve.common.formatting import shown
from daskserve.context import (
    RequestContext,
    current_members,
    current_replica,
    current_request,
    get_multiplexed_model_id,
)
from daskserve.data.batching.checks import check_seconds, check_whole
from daskserve.data.batching.early_start import EarlyStart
from daskserve.data.batching.instances import BoundFunction, InstanceFunction, QueuesByLoop
from daskserve.data.batching.limits import BatchLimits
from daskserve.data.batching.queue import BatchQueue
from daskserve.data.batching.results import as_results
from daskserve.data.batching.stream import END, BatchStream, distribute
from daskserve.data.batching.tuning import BatchTuner
from daskserve.data.version_counts import counted_batch
from daskserve.telemetry.tracing.batches import SpansOfBatch, span_of_item

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.span import RecordedSpan

logger = logging.getLogger("daskserve.replica")


class _Item:
    """One call: its instance, arguments and stream."""

    __slots__ = ("args", "instance", "kwargs", "priority", "request", "span", "stream")

    def __init__(
        self, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], stream: BatchStream | None
    ) -> None:
        self.instance = instance
        self.args = args
        self.kwargs = kwargs
        self.stream = stream
        #: The request that makes the call.
        self.request: RequestContext | None = current_request.get()
        #: The priority of the request.
        self.priority = 0 if self.request is None else self.request.priority_number
        #: The span of the call's wait and its batch, if the call is sampled.
        self.span: RecordedSpan | None = None


RequestQueue = BatchQueue[_Item, Any]

#: The attributes of coroutines and generators that hold their frame, and the object that they await.
_FRAMES = ("cr_frame", "ag_frame", "gi_frame")
_AWAITED = ("cr_await", "ag_await", "gi_yieldfrom")


class _InstanceState:
    """The limits and queues of one instance, or of the plain function."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        #: Whether the limits have not been checked against the replica's concurrency yet.
        self.is_unchecked = True
        self.queues_by_loop: QueuesByLoop[RequestQueue] = QueuesByLoop()

    def queues(self) -> list[RequestQueue]:
        return [queue for _, queue in self.queues_by_loop.items()]

    def change(self, *, max_batch_size: int | None = None, wait_s: float | None = None) -> None:
        """Change the limits, even for waiting calls; may be called from any thread."""
        if max_batch_size is not None:
            self.limits.max_batch_size = max_batch_size
        if wait_s is not None:
            self.limits.wait_s = wait_s
        self.is_unchecked = True
        for loop, queue in self.queues_by_loop.items():
            with suppress(RuntimeError):  # the loop is closed, so no items wait there
                loop.call_soon_threadsafe(queue.reconsider)


class _Settings:
    """The settings of a batched function that callers may read and change, per instance."""

    __slots__ = ()

    def _state(self) -> _InstanceState:
        raise NotImplementedError

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Change the maximum batch size; may be called from any thread, such as in ``reconfigure``."""
        self._state().change(max_batch_size=check_whole("max_batch_size", max_batch_size))

    def set_batch_wait_timeout_s(self, batch_wait_timeout_s: float) -> None:
        """Change how long the first call of a batch waits for others; may be called from any thread."""
        wait_s = check_seconds("batch_wait_timeout_s", batch_wait_timeout_s, may_be_zero=True)
        self._state().change(wait_s=wait_s)

    def _get_max_batch_size(self) -> int:
        return self._state().limits.max_batch_size

    def _get_batch_wait_timeout_s(self) -> float:
        return self._state().limits.wait_s

    def _get_curr_iteration_start_times(self) -> tuple[float, ...]:
        """Return the start times of the running batches, in seconds since the epoch."""
        return tuple(sorted(at for queue in self._state().queues() for at in queue.running.values()))

    async def _is_batching_task_alive(self) -> bool:
        """Return True, because no background task exists that could have ended."""
        return True

    async def _get_handling_task_stack(self) -> str:
        """Return the stacks of the batches that run on this loop, as text."""
        loop = asyncio.get_running_loop()
        tasks = [task for queue in self._state().queues() for task in queue.running]
        return "\n".join(_describe_stack(task) for task in tasks if task.get_loop() is loop)


class _BatchRunner:
    """Runs the batches of one function."""

    def __init__(
        self,
        function: Callable[..., Any],
        max_running: int,
        size_fn: Callable[[list[Any]], float] | None,
        latency_target_s: float | None,
    ) -> None:
        self.function = function
        self.max_running = max_running
        self.size_fn = size_fn
        self.latency_target_s = latency_target_s
        self.is_generator = inspect.isasyncgenfunction(function)

    def make_queue(self, limits: BatchLimits) -> RequestQueue:
        """Return a queue for the running loop and the current replica."""
        replica = current_replica.get()
        metrics = None if replica is None else replica.metrics
        counts = None if metrics is None else metrics.batches_of(self.function.__name__)
        tuner = early_start = None
        if self.latency_target_s is not None:
            tuner = BatchTuner(self.latency_target_s, limits, self.max_running)
        elif replica is not None and replica.slots is not None:
            early_start = EarlyStart(replica.slots, f"{self.function.__qualname__} in {replica.display_name}")
        queue: RequestQueue = BatchQueue(
            self._run_streams if self.is_generator else self._run,
            limits if tuner is None else tuner.limits,
            max_running=self.max_running,
            size_of=None if self.size_fn is None else self._size_of,
            on_batch=None if counts is None else counts.observe,
            on_end=None if counts is None else counts.ended,
            tuner=tuner,
            early_start=early_start,
        )
        if metrics is not None:
            metrics.watch_queue(queue.queued)
        if counts is not None:
            counts.watch_queue(queue.queued)
        return queue

    def warn_if_unreachable(self, limits: BatchLimits) -> None:
        """Warn if batches are larger than the concurrency of the current replica."""
        # With batch_size_fn, max_batch_size is not a number of calls; with a target, it is only a bound.
        if self.size_fn is not None or self.latency_target_s is not None:
            return
        replica, wanted = current_replica.get(), limits.max_batch_size * self.max_running
        if replica is not None and 0 < replica.max_ongoing_requests < wanted:
            logger.warning(
                "Batches of %s in %s may never fill: it runs %d requests at a time "
                "(max_ongoing_requests), fewer than max_batch_size * max_concurrent_batches, which is %d.",
                self.function.__qualname__,
                replica.display_name,
                replica.max_ongoing_requests,
                wanted,
            )

    def _size_of(self, items: list[_Item]) -> float:
        assert self.size_fn is not None
        first = [item.args[0] if item.args else next(iter(item.kwargs.values())) for item in items]
        return self.size_fn(first)

    def _begin(self, items: Sequence[_Item]) -> Any:
        # A batch belongs to several requests, so the deadline and id of one of them would be wrong for the
        # others.
        current_request.set(None)
        current_members.set([item.request for item in items if item.request is not None])
        first = items[0]
        own = () if first.instance is None else (first.instance,)
        columns = [list(column) for column in zip(*(item.args for item in items), strict=True)]
        named = {name: [item.kwargs[name] for item in items] for name in first.kwargs}
        return self.function(*own, *columns, **named)

    def _begin_spans(self, items: Sequence[_Item]) -> SpansOfBatch:
        return SpansOfBatch(self.function.__qualname__, [item.span for item in items])

    async def _run(self, items: list[_Item]) -> list[Any]:
        with self._begin_spans(items), counted_batch() as outcomes:
            results = as_results(self.function.__qualname__, await self._begin(items), len(items))
            outcomes.extend(results)
            return results

    async def _run_streams(self, items: list[_Item]) -> list[Any]:
        streams = [item.stream for item in items if item.stream is not None]
        with self._begin_spans(items), counted_batch():
            await distribute(self.function.__qualname__, self._begin(items), streams)
        return [END] * len(items)


class BatchedFunction(InstanceFunction[_InstanceState], _Settings):
    """A batched function or method.

    `inspect` and asyncio treat it as a coroutine function or an async generator function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        max_batch_size: int,
        wait_s: float,
        max_concurrent_batches: int,
        batch_size_fn: Callable[[list[Any]], float] | None,
        latency_target_s: float | None = None,
        preferred: Sequence[int] = (),
        is_method: bool = False,
    ) -> None:
        super().__init__(function, is_method, _InstanceState(BatchLimits(max_batch_size, wait_s, preferred)))
        self._runner = _BatchRunner(function, max_concurrent_batches, batch_size_fn, latency_target_s)
        self._signature = inspect.signature(function)
        #: Counts of positional arguments that the function is known to accept.
        self._accepted_counts: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        limits = self._function_state.limits
        wait = f"{shown(limits.wait_s)} s"
        return f"<batched {self.__qualname__} max_batch_size={limits.max_batch_size} wait={wait}>"

    def _parts(self) -> tuple[Any, ...]:
        limits, runner = self._function_state.limits, self._runner
        return (
            self.__wrapped__,
            limits.max_batch_size,
            limits.wait_s,
            runner.max_running,
            runner.size_fn,
            runner.latency_target_s,
            limits.preferred,
            self._is_method,
        )

    def _new_state(self, ref: weakref.ref[Any]) -> _InstanceState:
        limits = self._function_state.limits
        return _InstanceState(BatchLimits(limits.max_batch_size, limits.wait_s, limits.preferred))

    def __get__(self, instance: Any, owner: type | None = None) -> BatchedFunction | BoundBatch:
        return self if instance is None else BoundBatch(self, instance)

    # ---- calls

    def call(
        self, instance: Any, state: _InstanceState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Coroutine[Any, Any, Any] | AsyncIterator[Any]:
        """Start a call of an instance."""
        key, args, kwargs = self._bind(instance, args, kwargs)
        if self._runner.is_generator:
            return self._stream(state, _Item(instance, args, kwargs, BatchStream()), key)
        return self._submit(state, _Item(instance, args, kwargs, None), key)

    async def _submit(self, state: _InstanceState, item: _Item, key: Hashable) -> Any:
        queue = self._queue(state, item)
        try:
            return await queue.submit(item, key, item.priority)
        finally:
            if item.span is not None:  # the span of a call that left before its batch ran
                item.span.end()
            del item  # as in `BatchQueue.submit`

    async def _stream(self, state: _InstanceState, item: _Item, key: Hashable) -> AsyncIterator[Any]:
        queue = self._queue(state, item)
        stream, span = item.stream, item.span
        assert stream is not None
        entry = queue.add(item, key, item.priority)
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
            queue.remove(entry)
            if span is not None:
                span.end()
            del entry, stream

    def _queue(self, state: _InstanceState, item: _Item) -> RequestQueue:
        """Return the queue for an item, and begin the item's span."""
        if state.is_unchecked:
            state.is_unchecked = False
            self._runner.warn_if_unreachable(state.limits)
        queue = state.queues_by_loop.current(self._runner.make_queue, state.limits)
        item.span = span_of_item(self.__qualname__, waiting=queue.queued)
        return queue

    def _bind(
        self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Hashable, tuple[Any, ...], dict[str, Any]]:
        """Return the key of calls that share batches, and the arguments, positional where possible."""
        if kwargs or len(args) not in self._accepted_counts:
            own = () if instance is None else (instance,)
            bound = self._signature.bind(*own, *args, **kwargs)
            args, kwargs = bound.args[len(own) :], bound.kwargs
            if not args and not kwargs:
                raise TypeError(
                    f"{self.__qualname__} is batched and was called without arguments; pass at least one, "
                    "because it gets a list for each argument."
                )
            if not kwargs:
                self._accepted_counts |= {len(args)}
        # All calls of a batch have the same multiplexed model; see `daskserve.data.multiplexing`.
        names = tuple(sorted(kwargs)) if kwargs else ()
        return (len(args), names, get_multiplexed_model_id()), args, kwargs


class BoundBatch(BoundFunction, _Settings):
    """A batched method of one instance."""

    __slots__ = ()


def _describe_stack(task: asyncio.Task[Any]) -> str:
    """Return the stack of a waiting task, innermost first; its `get_stack` shows only the outermost frame."""
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
