"""Loads and unloads the models of one multiplexed function in one replica.

Each load is a separate task: a slow load delays no request for another model. Callers of the same model
share its load, which continues when one of them leaves. `daskserve.data.multiplexing.cache` decides which
models stay loaded.

A replica's requests may run on several event loops, and end on yet another one. So a lock protects the
state; it is never held while user code runs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from daskserve.common.clock import stopwatch
from daskserve.common.formatting import shown
from daskserve.context import RequestContext, requests_here
from daskserve.data.multiplexing.cache import LOADED, LOADING, QUEUED, CachedModel, ModelCache
from daskserve.data.multiplexing.ids import check_model_id, short_id
from daskserve.data.multiplexing.loads import Load, LoadEndedError, start_load
from daskserve.data.multiplexing.sizes import size_of_model
from daskserve.data.multiplexing.unloading import unload
from daskserve.errors import ClosedError, ModelCapacityError, RequestTimeoutError
from daskserve.loops.event_loop import running_loop
from daskserve.loops.tasks import is_cancelling
from daskserve.payload.packed_errors import raisable
from daskserve.telemetry.models import ModelMetrics
from daskserve.telemetry.tracing.batches import recorded_span

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.span import RecordedSpan

logger = logging.getLogger("daskserve.replica")

#: How long a request waits while other requests use all models that could be dropped for it.
ROOM_TIMEOUT_S = 60.0
#: Maximum number of loading models that a span names.
MAX_NAMED = 8
#: How long the models of a deleted object may be idle.
RETIRED_IDLE_S = 1.0
#: The weight of the newest load in the mean duration of loads.
LOAD_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The options of a multiplexed function; see `daskserve.data.multiplexing.decorator.multiplexed`."""

    max_models: int | None = 3
    max_bytes: int | None = None
    size_of: Callable[[Any], float] | None = None
    unload: Callable[[Any], Any] | None = None
    pinned: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    idle_timeout_s: float | None = None
    load_timeout_s: float | None = None


class ModelLoader:
    """The models of one function, or of one method of one object, in one replica.

    Parameters
    ----------
    load : coroutine function
        Takes a model's id and returns the model.
    name : str
        The function's name, for messages.
    """

    def __init__(
        self,
        load: Callable[[str], Coroutine[Any, Any, Any]],
        limits: ModelLimits,
        metrics: ModelMetrics,
        name: str,
    ) -> None:
        self._load_model = load
        self.limits = limits
        self.metrics = metrics
        self.name = name
        self.cache = ModelCache(limits.max_models, limits.max_bytes, limits.pinned)
        self._lock = threading.RLock()
        self._loads: dict[str, Load] = {}
        #: The loads that wait for a place, in order.
        self._queue: dict[str, Load] = {}
        #: How many models each request holds, by the ``id`` of the request.
        self._holding: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        #: The loads that wait until a model has left.
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._idle_timer: asyncio.TimerHandle | None = None
        #: The event loop of the latest load, and its context, for work that other threads request.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = Context()
        self._is_closed = False
        #: The mean seconds of a load.
        self.load_s = 0.0

    # ---- for user code

    async def get(self, model_id: str) -> Any:
        """Return a model; load it first if necessary."""
        check_model_id(model_id)
        requests, loop = requests_here(), asyncio.get_running_loop()
        self.metrics.requests += 1
        while True:
            with self._lock:
                if self._is_closed:
                    raise ClosedError("The replica has been stopped; it loads no more models.")
                entry = self.cache.use(model_id, loop.time())
                if entry is not None and entry.state == LOADED:
                    self.metrics.hits += 1
                    self._hold(entry, requests)
                    return entry.model
                if entry is None:
                    entry = self.cache.expect(model_id, loop.time())
                    self._loads[model_id] = self._queue[model_id] = added = Load(entry, loop)
                    self._loop, self._context = loop, added.context
                load = self._loads[model_id]
                ready: asyncio.Future[Any] = loop.create_future()
                load.waiters[ready] = loop
                numbers = Counter(map(id, requests))
                load.requesters += numbers
                load.priority = max([load.priority, *(each.priority_number for each in requests)])
                entry.waiting += 1
                self._admit()
            timer = loop.call_later(ROOM_TIMEOUT_S, self._expire, load, ready)
            span = self._span_of_wait(entry)
            try:
                model = await ready
                with self._lock:
                    self._hold(entry, requests)
                return model
            except LoadEndedError:
                continue
            finally:
                timer.cancel()
                if span is not None:
                    span.end()
                with self._lock:
                    load.waiters.pop(ready, None)
                    entry.waiting -= 1
                    load.requesters -= numbers
                    _use_room(self)
                del ready  # otherwise an error and this frame reference each other

    def _span_of_wait(self, entry: CachedModel) -> RecordedSpan | None:
        """Begin the span of a wait for a model or its place; None outside of a sampled trace."""
        above = recorded_span()
        if above is None:
            return None
        facts = {
            "daskserve.step": "model",
            "daskserve.model": short_id(entry.id),
            "daskserve.model.state": str(entry.state),
            "daskserve.queue.waiting_before": entry.waiting - 1,
            "daskserve.queue.loading": tuple(map(short_id, list(self._loads)[:MAX_NAMED])),
        }
        return above.child(f"model of {self.name}", facts)

    def _hold(self, entry: CachedModel, requests: Sequence[RequestContext]) -> None:
        clock = asyncio.get_running_loop().time
        for request in requests:
            held, key, number = request.held, (id(self), entry.id, id(entry)), id(request)
            if held is None or key in held:
                continue
            entry.holders.add(number)
            self._holding[number] += 1
            held[key] = partial(self._let_go, entry, number, clock)
            # The request may have ended in the meantime, on another thread.
            if request.held is not held and (give_back := held.pop(key, None)) is not None:
                give_back()

    def _let_go(self, entry: CachedModel, number: int, clock: Callable[[], float]) -> None:
        """Record the end of a request that has used a model; any thread may call this."""
        with self._lock:
            entry.holders.discard(number)
            entry.used_at = max(entry.used_at, clock())
            self._holding[number] -= 1
            if not self._holding[number]:
                del self._holding[number]
            if not entry.holders:
                _use_room(self)

    def _expire(self, load: Load, ready: asyncio.Future[None]) -> None:
        if load.entry.state == QUEUED and not ready.done():
            ready.set_exception(
                ModelCapacityError(
                    f"This replica had no room for model {short_id(load.entry.id)!r} within "
                    f"{shown(ROOM_TIMEOUT_S)} s, because running requests use all of its "
                    f"{len(self.cache.models) - len(self._loads)} models. Increase "
                    "max_num_models_per_replica, or the number of replicas."
                )
            )

    # ---- room

    def _admit(self) -> None:
        """Start the loads for which there is a place, or a model to drop. The caller holds the lock."""
        is_full = False
        # By priority, then by arrival.
        for load in sorted(self._queue.values(), key=lambda each: -each.priority):
            if all(ready.done() for ready in load.waiters):
                self._forget(load)  # no caller waits for it any longer
                continue
            # A request that holds models may release one of them to make room for another.
            if is_full and not any(each in self._holding for each in load.requesters):
                continue
            victims = self.cache.victims(load.entry, load.requesters)
            if victims is None:
                is_full = True
                continue
            del self._queue[load.entry.id]
            self.cache.admit(load.entry)
            if start_load(load.loop, self._load, load, victims):
                for victim in victims:
                    self._drop(victim)
            else:
                self._forget(load)
                self._settle(load, LoadEndedError())

    def _drop(self, entry: CachedModel) -> None:
        self.cache.drop(entry)
        if (load := self._loads.pop(entry.id, None)) is not None:
            load.cancel()  # no caller waits for it

    def _forget(self, load: Load) -> None:
        if self._loads.get(load.entry.id) is load:
            del self._loads[load.entry.id]
            self._queue.pop(load.entry.id, None)
        self.cache.failed(load.entry)

    # ---- loads

    async def _load(self, load: Load, victims: Sequence[CachedModel]) -> None:
        """Load a model, once its victims are unloaded."""
        load.task = asyncio.current_task()
        error: BaseException | None = None
        model: Any = None
        size_bytes = 0
        try:
            await self._unload_all(victims)
            await self._wait_for_room()
            if load.is_cancelled:
                raise asyncio.CancelledError
            model, size_bytes = await self._loaded_model(load.entry.id)
        except asyncio.CancelledError as raised:
            # A cancellation that user code raised itself counts as an ordinary error.
            error = LoadEndedError() if load.is_cancelled or is_cancelling() else raised
        except BaseException as raised:  # even SystemExit in user code
            error = raised
        with self._lock:
            if self._loads.get(load.entry.id) is load:
                del self._loads[load.entry.id]
            is_kept = error is None and load.entry.state == LOADING
            if is_kept:
                self.cache.loaded(load.entry, model, size_bytes)
                surplus = self.cache.surplus(load.entry)
                for victim in surplus:
                    self._drop(victim)
            else:
                surplus = []
                self.cache.failed(load.entry)
                self.cache.left(load.entry)
            self._settle(load, error, model)
            self._admit()
        self._wake()
        if isinstance(error, Exception) and not isinstance(error, LoadEndedError):
            self.metrics.failures += 1
            logger.error("Model %r of %s was not loaded: %r", short_id(load.entry.id), self.name, error)
        if error is None and not is_kept:
            await self._call_unload(load.entry.id, model)
        del error, model  # otherwise an error and this frame reference each other
        await self._unload_all(surplus)
        self._watch_idle()

    async def _loaded_model(self, model_id: str) -> tuple[Any, int]:
        limits, began = self.limits, stopwatch()
        self.metrics.loads += 1
        loading = asyncio.ensure_future(self._load_model(model_id))
        try:
            await asyncio.wait([loading], timeout=limits.load_timeout_s)
            if not loading.done():
                raise RequestTimeoutError(
                    f"Model {short_id(model_id)!r} was not loaded within load_timeout_s, "
                    f"which is {shown(limits.load_timeout_s or 0)} s."
                )
            model = loading.result()
        finally:
            if not loading.done():  # user code may continue; no caller waits for it
                loading.cancel()
                loading.add_done_callback(partial(self._note_late, model_id))
            del loading  # otherwise an error and this frame reference each other
        took_s = stopwatch() - began
        self.metrics.load_seconds.observe(took_s)
        self.load_s += (took_s - self.load_s) * (LOAD_WEIGHT if self.load_s else 1.0)
        logger.info("Model %r of %s was loaded in %.3f s", short_id(model_id), self.name, took_s)
        if limits.max_bytes is None:
            return model, 0
        try:
            size_bytes = size_of_model(model, limits.size_of)
            if size_bytes > limits.max_bytes:
                raise ModelCapacityError(
                    f"Model {short_id(model_id)!r} has {size_bytes} bytes, more than max_bytes of "
                    f"{self.name}, which is {limits.max_bytes}; increase max_bytes."
                )
        except BaseException as error:
            await self._call_unload(model_id, model)
            del model
            clear_frames(error.__traceback__)  # a frame of `size_of` has the model, too
            raise
        return model, size_bytes

    def _note_late(self, model_id: str, loading: asyncio.Future[Any]) -> None:
        """Unload a model whose load has ended after its timeout."""
        if not loading.cancelled() and loading.exception() is None:
            self._spawn(self._call_unload(model_id, loading.result()))

    def _settle(self, load: Load, error: BaseException | None, model: Any = None) -> None:
        """Give the outcome of a load to its callers."""
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[Any]]] = {}
        for ready, loop in load.waiters.items():
            by_loop.setdefault(loop, []).append(ready)
        for loop, each in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed
                if loop is running_loop():
                    _end_all(each, error, model)
                else:
                    loop.call_soon_threadsafe(_end_all, each, error, model)

    # ---- the end of models

    async def _unload_all(self, victims: Sequence[CachedModel]) -> None:
        if victims:
            # Separate tasks: if this task is cancelled, the models are still unloaded.
            tasks = [self._spawn(self._unload(each)) for each in victims]
            await asyncio.wait(tasks)

    def _spawn(self, code: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(code, name="daskserve-unload-model")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _unload(self, entry: CachedModel) -> None:
        model = entry.model
        if not entry.has_model:  # the cancelled load drops the entry
            return
        try:
            if not self._is_shared(model):
                await self._call_unload(entry.id, model)
        finally:
            del model
            with self._lock:
                self.cache.left(entry)
                self._admit()
            self._wake()

    def _is_shared(self, model: Any) -> bool:
        """Return whether another model id has the same object."""
        with self._lock:
            return any(each.model is model for each in self.cache.models.values())

    async def _call_unload(self, model_id: str, model: Any) -> None:
        began = stopwatch()
        self.metrics.unloads += 1
        await unload(model, self.limits.unload, name=f"model {short_id(model_id)!r} of {self.name}")
        self.metrics.unload_seconds.observe(stopwatch() - began)
        logger.info("Model %r of %s was unloaded", short_id(model_id), self.name)

    async def _wait_for_room(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if not self.cache.must_wait():
                    return
                woken: asyncio.Future[None] = loop.create_future()
                self._sleepers.append((loop, woken))
            await woken

    def _wake(self) -> None:
        """Resume the loads that wait until a model is unloaded."""
        with self._lock:
            sleepers, self._sleepers = self._sleepers, []
        for loop, woken in sleepers:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_end_all, [woken], None)

    def _watch_idle(self) -> None:
        """Unload the models that have been idle for too long, and schedule the next check."""
        idle_s = self.limits.idle_timeout_s
        if idle_s is None or self._is_closed:
            return
        loop = asyncio.get_running_loop()
        with self._lock:
            idle = self.cache.idle_since(loop.time() - idle_s)
            for each in idle:
                self._drop(each)
            if self._idle_timer is not None:
                self._idle_timer.cancel()
            times = [each.used_at for each in self.cache.models.values() if each.id not in self.cache.pinned]
            next_at = max(min(times, default=0.0) + idle_s, loop.time() + idle_s / 8)
            self._idle_timer = loop.call_at(next_at, self._watch_idle) if times else None
        for each in idle:
            self._spawn(self._unload(each))

    def retire(self) -> None:
        """Unload the models once no request uses them; there are no new requests.

        Any thread may call this, even while it holds the lock.
        """
        self.limits = replace(self.limits, idle_timeout_s=RETIRED_IDLE_S)
        self.cache.pinned = frozenset()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._watch_idle, context=self._context.copy())

    @property
    def is_over(self) -> bool:
        """Whether there are no models and no loads, or their loop is closed."""
        is_empty = not self.cache.models and not self.cache.leaving
        return is_empty or (self._loop is not None and self._loop.is_closed())

    async def close(self) -> None:
        """Cancel the loads, and unload all models."""
        self._is_closed = True
        with self._lock:
            if self._idle_timer is not None:
                self._idle_timer.cancel()
            for load in list(self._loads.values()):
                load.cancel()
                if load.entry.state == QUEUED:
                    self._forget(load)
                    self._settle(load, LoadEndedError())
            loaded = [each for each in self.cache.models.values() if each.state == LOADED]
            for each in loaded:
                self._drop(each)
        await self._unload_all(loaded)

    # ---- for the replica

    def ids(self) -> list[tuple[str, str]]:
        """Return the short ids and the states of all models, the most recently used first."""
        with self._lock:
            return [(short_id(each.id), each.state) for each in reversed(self.cache.models.values())]


def _use_room(loader: ModelLoader) -> None:
    """Start waiting loads, or unload surplus models, because a request has freed a model.

    Any thread may call this; the caller holds the lock.
    """
    if loader._queue:
        loader._admit()
    if loader.cache.is_too_large and loader._loop is not None:
        with suppress(RuntimeError):  # the loop is closed
            loader._loop.call_soon_threadsafe(_unload_surplus, loader, context=loader._context.copy())


def _unload_surplus(loader: ModelLoader) -> None:
    with loader._lock:
        surplus = loader.cache.surplus()
        for each in surplus:
            loader._drop(each)
    for each in surplus:
        loader._spawn(loader._unload(each))


def _end_all(futures: Sequence[asyncio.Future[Any]], error: BaseException | None, model: Any = None) -> None:
    for each in futures:
        if each.done():
            continue
        if error is None:
            each.set_result(model)
        else:
            each.set_exception(raisable(error))
            each.exception()  # so that asyncio does not log the exception if the caller has left
