"""The queue of both kinds of batching.

`daskserve.data.replica.requests.accept_batch` (the classic ``accept_batch``) queues the requests of a
replica, on the worker's loop. `daskserve.data.batching.decorator` (``batch``) queues calls, on the loop where
they are made. A queue has no background task. It acts when an item is added, when a wait is over and when a
batch has ended. Each item gets a result or an error, whatever user code does.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from daskserve.common.clock import LoopClock, stopwatch
from daskserve.data.batching.early_start import EarlyStart
from daskserve.data.batching.limits import BatchLimits
from daskserve.data.batching.tuning import BatchTuner
from daskserve.errors import ServeError
from daskserve.loops.alarm import Alarm
from daskserve.options.fields.priority import BATCH_PRIORITY
from daskserve.payload.packed_errors import raisable

logger = logging.getLogger("daskserve.replica")

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(eq=False, slots=True)
class BatchEntry(Generic[ItemT, ResultT]):
    """An item in a queue or in a batch, and its result."""

    item: ItemT
    key: Hashable
    added_at: float
    number: int
    result: asyncio.Future[ResultT]
    priority: int = 0


class _KeyQueue(Generic[ItemT, ResultT]):
    """Entries of one key, by priority and then by arrival.

    With ``size_of``, it also holds how many of the first entries fit into a batch.
    """

    __slots__ = ("entries", "fitting", "is_full", "measured_for")

    def __init__(self) -> None:
        self.entries: list[BatchEntry[ItemT, ResultT]] = []
        self.forget(0)

    def put(self, entry: BatchEntry[ItemT, ResultT]) -> None:
        """Insert an entry behind those of the same priority."""
        entries = self.entries
        if not entries or entries[-1].priority >= entry.priority:
            entries.append(entry)
            return
        bisect.insort_right(entries, entry, key=lambda each: -each.priority)
        self.forget(self.measured_for)

    @property
    def oldest(self) -> BatchEntry[ItemT, ResultT]:
        """The entry that has waited longest; there must be one."""
        entries = self.entries
        if entries[0].priority == entries[-1].priority:
            return entries[0]
        return min(entries, key=lambda each: each.number)

    def forget(self, limit: float) -> None:
        """Discard the measured sizes."""
        self.fitting = 0
        self.is_full = False
        self.measured_for = limit


class BatchQueue(Generic[ItemT, ResultT]):
    """Collects items into batches and returns each item's result to its submitter.

    A queue belongs to the event loop that uses it. While idle, it references neither that loop nor its user.

    Parameters
    ----------
    run : coroutine function
        Takes a list of items and returns one result per item; a result that is an exception is raised for its
        item.
    limits : BatchLimits
    max_running : int, optional
        Maximum number of batches that run at a time; further items wait. If it is 2 or more, the items of
        batch jobs use all but one.
    size_of : callable, optional
        Takes a list of items and returns the size of their batch; default: the number of items.
    on_batch : callable, optional
        Called when a batch starts, with the waiting time of each of its items in seconds, and with the
        maximum number of items, which is 0 with ``size_of``.
    on_end : callable, optional
        Called when a batch has ended, with the seconds that it ran.
    tuner : BatchTuner, optional
        Observes each batch, and changes the limits.
    early_start : EarlyStart, optional
        Decides when a batch has no more callers to wait for; without it, each batch waits.
    """

    def __init__(
        self,
        run: Callable[[list[ItemT]], Awaitable[Sequence[ResultT | BaseException]]],
        limits: BatchLimits,
        *,
        max_running: int | None = None,
        size_of: Callable[[list[ItemT]], float] | None = None,
        on_batch: Callable[[list[float], int], None] | None = None,
        on_end: Callable[[float], None] | None = None,
        tuner: BatchTuner | None = None,
        early_start: EarlyStart | None = None,
    ) -> None:
        self._run = run
        self._limits = limits
        self._max_running = max_running
        self._size_of = size_of
        self._on_batch = on_batch
        self._on_end = on_end
        self._tuner = tuner
        self._early_start = early_start
        self._ended_at = -math.inf
        self._key_queues: dict[Hashable, _KeyQueue[ItemT, ResultT]] = {}
        self._numbers = itertools.count()
        self._alarm = Alarm(self.reconsider)
        self._is_starting = False
        #: The task of each running batch, with its start time in seconds since the epoch, its start time on
        #: the `stopwatch`, and its items.
        self._tasks: dict[asyncio.Task[None], tuple[float, float, list[BatchEntry[ItemT, ResultT]]]] = {}

    def __repr__(self) -> str:
        return f"<BatchQueue waiting={self.queued()} running={len(self._tasks)}>"

    def queued(self) -> int:
        """Return the number of items that wait for their batch to run; any thread may call this."""
        key_queues = list(self._key_queues.values())
        if len(key_queues) == 1:  # the usual case
            return len(key_queues[0].entries)
        return sum(len(key_queue.entries) for key_queue in key_queues)

    @property
    def running(self) -> dict[asyncio.Task[None], float]:
        """The tasks of running batches, with their start times in seconds since the epoch."""
        return {task: began for task, (began, _, _) in self._tasks.items()}

    async def submit(self, item: ItemT, key: Hashable = None, priority: int = 0) -> ResultT:
        """Return the item's result once its batch has run; cancellation removes the item."""
        entry = self.add(item, key, priority)
        try:
            return await entry.result
        except asyncio.CancelledError:
            self.remove(entry)
            raise
        finally:
            del entry  # otherwise an error and this frame reference each other

    def add(self, item: ItemT, key: Hashable = None, priority: int = 0) -> BatchEntry[ItemT, ResultT]:
        """Add an item and return its entry, which holds its result.

        Items with different keys never share a batch. Items with a greater ``priority`` go first.

        Raises
        ------
        RuntimeError
            The item alone exceeds the maximum batch size.
        Exception
            The error that ``size_of`` raised for the item.
        """
        if self._size_of is not None:
            self._measure([item], self._limits.max_batch_size)
        loop = asyncio.get_running_loop()
        entry: BatchEntry[ItemT, ResultT] = BatchEntry(
            item, key, loop.time(), next(self._numbers), loop.create_future(), priority
        )
        key_queue = self._key_queues.get(key)
        if key_queue is None:
            key_queue = self._key_queues[key] = _KeyQueue()
        key_queue.put(entry)
        if not (self._is_starting or self._joins_a_wait(key_queue)):
            self.reconsider()
        return entry

    def _joins_a_wait(self, key_queue: _KeyQueue[ItemT, ResultT]) -> bool:
        """Return whether a new entry only joins a batch that is already waiting.

        This is true for most entries, and `reconsider` takes longer than everything else in `add`.
        """
        limits, early_start = self._limits, self._early_start
        return (
            self._alarm.is_set
            and len(key_queue.entries) < (limits.enough or limits.max_batch_size)
            and not limits.preferred
            and self._size_of is None
            and (early_start is None or not early_start.has_all(self.queued()))
        )

    def remove(self, entry: BatchEntry[ItemT, ResultT]) -> None:
        """Remove an item from the queue or its batch; a batch without items is cancelled."""
        if not entry.result.cancel() and not entry.result.cancelled():
            entry.result.exception()  # so that asyncio does not log the exception as never retrieved
            return
        for task, (_, _, batch) in self._tasks.items():
            if entry in batch:
                if all(each.result.done() for each in batch):
                    task.cancel()
                return
        key_queue = self._key_queues.get(entry.key)
        if key_queue is not None and entry in key_queue.entries:
            key_queue.entries.remove(entry)
            key_queue.forget(self._limits.max_batch_size)
            self._drop_if_empty(entry.key, key_queue)

    def reconsider(self) -> None:
        """Start the batches that are due; call this after the limits have changed."""
        if not self._key_queues:
            self._alarm.cancel()
        if self._is_starting or not self._key_queues or self._is_busy():
            return
        if self._next_key_queue() is not None:
            # Deferred, so that items added in the same iteration of the loop join the batch.
            self._is_starting = True
            asyncio.get_running_loop().call_soon(self._start_batch)
            return
        waiting = [each.oldest for each in self._key_queues.values() if self._may_run(each)]
        if waiting:
            self._alarm.set(min(map(self._due_at, waiting)))

    def _is_busy(self) -> bool:
        return self._max_running is not None and len(self._tasks) >= self._max_running

    def _may_run(self, key_queue: _KeyQueue[ItemT, ResultT]) -> bool:
        """Return whether a batch of these entries may run now; batch jobs leave one batch for live calls."""
        if self._max_running is None or self._max_running < 2 or len(self._tasks) < self._max_running - 1:
            return True
        return key_queue.entries[0].priority > BATCH_PRIORITY

    def _next_key_queue(self) -> tuple[Hashable, int] | None:
        """Return the key and size of the next batch; None if no batch is due.

        If several are due, the next one is the one with the greatest priority, then the one that has waited
        longest.
        """
        found: tuple[int, int, Hashable, int] | None = None
        now = asyncio.get_running_loop().time()
        has_all = self._has_all()
        for key, key_queue in list(self._key_queues.items()):
            count, is_full = self._count(key_queue)
            if not key_queue.entries:
                del self._key_queues[key]  # none of its items fits any longer
                continue
            is_due = is_full or has_all or self._due_at(key_queue.oldest) <= now
            first = key_queue.entries[0]
            is_due = is_due and self._may_run(key_queue)
            if is_due and (found is None or (-first.priority, first.number) < found[:2]):
                found = (-first.priority, first.number, key, count)
        return None if found is None else found[2:]

    def _has_all(self) -> bool:
        """Return whether all expected calls are queued, while no batch runs."""
        early_start = self._early_start
        return early_start is not None and not self._tasks and early_start.has_all(self.queued())

    def _due_at(self, first: BatchEntry[ItemT, ResultT]) -> float:
        """Return when a batch with this first item runs, regardless of its size."""
        limits = self._limits
        began = max(first.added_at, self._ended_at) if limits.restarts_wait else first.added_at
        return began + limits.wait_s

    def _count(self, key_queue: _KeyQueue[ItemT, ResultT]) -> tuple[int, bool]:
        """Return how many entries fit into the next batch, and whether that batch is full."""
        limit = self._limits.max_batch_size
        entries = key_queue.entries
        if self._size_of is None:
            return self._limits.take(len(entries))
        if key_queue.measured_for != limit:
            key_queue.forget(limit)
        while key_queue.fitting < len(entries) and not key_queue.is_full:
            try:
                size = self._measure([entry.item for entry in entries[: key_queue.fitting + 1]], limit)
            except BaseException as error:  # even SystemExit in user code, which must not end the loop
                if key_queue.fitting:
                    # Each item is valid alone, so the next item belongs to another batch.
                    key_queue.is_full = True
                else:
                    _settle([entries.pop(0)], [error])  # the limit was lowered in the meantime
            else:
                key_queue.fitting += 1
                key_queue.is_full = size >= limit
        return key_queue.fitting, key_queue.is_full

    def _measure(self, items: list[ItemT], limit: float) -> float:
        assert self._size_of is not None
        size = self._size_of(items)
        if not size <= limit:
            raise RuntimeError(
                f"The size of the item, {size!r} by batch_size_fn, is greater than max_batch_size, which is "
                f"{limit}; send smaller items, or increase max_batch_size."
            )
        return size

    def _drop_if_empty(self, key: Hashable, key_queue: _KeyQueue[ItemT, ResultT]) -> None:
        if not key_queue.entries and self._key_queues.get(key) is key_queue:
            del self._key_queues[key]

    def _start_batch(self) -> None:
        self._is_starting = False
        self._forget_cancelled()
        found = None if self._is_busy() else self._next_key_queue()
        if found is not None:
            key, count = found
            key_queue = self._key_queues[key]
            has_waited = not (self._has_all() or self._count(key_queue)[1])
            batch, key_queue.entries = key_queue.entries[:count], key_queue.entries[count:]
            key_queue.forget(self._limits.max_batch_size)
            self._drop_if_empty(key, key_queue)
            loop = asyncio.get_running_loop()
            now = loop.time()
            waits_s = [now - entry.added_at for entry in batch]
            most = self._limits.max_batch_size if self._size_of is None else 0
            if self._on_batch is not None:
                self._on_batch(waits_s, most)
            if has_waited and self._early_start is not None:
                self._early_start.waited(waits_s, self._limits.wait_s, most)
            task = loop.create_task(self._run_batch(batch))
            self._tasks[task] = LoopClock().wall(), stopwatch(), batch
            task.add_done_callback(self._note_end)
        self.reconsider()

    def _forget_cancelled(self) -> None:
        # A cancelled caller removes its item itself, but only in the next iteration of the loop.
        for key, key_queue in list(self._key_queues.items()):
            if any(entry.result.done() for entry in key_queue.entries):
                key_queue.entries = [entry for entry in key_queue.entries if not entry.result.done()]
                key_queue.forget(self._limits.max_batch_size)
                self._drop_if_empty(key, key_queue)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        _, began, _ = self._tasks.pop(task)
        if self._on_end is not None:
            self._on_end(stopwatch() - began)
        self.reconsider()

    async def _run_items(self, batch: list[BatchEntry[ItemT, ResultT]]) -> Sequence[ResultT | BaseException]:
        tuner, began = self._tuner, LoopClock().now()
        waits_s = [] if tuner is None else [began - entry.added_at for entry in batch]
        if tuner is not None:
            tuner.started(len(waits_s))
        try:
            results = await self._run([entry.item for entry in batch])
        except BaseException:
            if tuner is not None:
                tuner.failed(len(waits_s))
            raise
        finally:
            del batch  # as in submit()
        # Set before the callers get their results, because they may send their next items at once.
        self._ended_at = now = LoopClock().now()
        if tuner is not None:
            tuner.ended(now, waits_s, now - began, self.queued())
        return results

    async def _run_batch(self, batch: list[BatchEntry[ItemT, ResultT]]) -> None:
        results: Sequence[ResultT | BaseException]
        try:
            results = await self._run_items(batch)
            if len(results) != len(batch):
                raise ServeError(
                    f"A batch of {len(batch)} items got {len(results)} results; return one result per item."
                )
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                for entry in batch:
                    entry.result.cancel()
                raise
            results = [error] * len(batch)  # the batch was not cancelled, so this is an error of user code
        except BaseException as error:  # even SystemExit in user code, which must not end the loop
            if all(entry.result.done() for entry in batch):
                logger.warning("A batch failed after all of its callers had left", exc_info=error)
            results = [error] * len(batch)
        if self._early_start is not None:  # called before the callers get their results, as above
            self._early_start.ended(self.queued() + sum(len(each) for _, _, each in self._tasks.values()))
        _settle(batch, results)
        del batch, results  # as in submit()


def _settle(batch: list[BatchEntry[Any, ResultT]], results: Sequence[ResultT | BaseException]) -> None:
    for entry, result in zip(batch, results, strict=True):
        if entry.result.done():
            continue
        if isinstance(result, BaseException):
            entry.result.set_exception(raisable(result))
        else:
            entry.result.set_result(result)
