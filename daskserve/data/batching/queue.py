"""The queue behind both kinds of batching: who goes together, when, and what becomes of each.

`daskserve.data.replica.accept_batch` (the classic ``accept_batch``) puts the requests of a replica into one,
on the worker's loop; `daskserve.data.batching.decorator` (``batch`` on methods) puts calls into one, on
whatever loop they are made. There is no loop that could die: a queue acts when something is entered, when a
wait is over and when a batch has ended. Whatever user code does, each item gets its result or an error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from daskserve.clock import LoopClock
from daskserve.errors import ServeError, UserCodeError

logger = logging.getLogger("daskserve.replica")

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class BatchLimits:
    """When a batch runs. May be changed at any time, and shared by several queues."""

    __slots__ = ("max_batch_size", "wait_s")

    def __init__(self, max_batch_size: int, wait_s: float) -> None:
        #: A batch this large runs at once.
        self.max_batch_size = max_batch_size
        #: How long the first item of a batch waits for others.
        self.wait_s = wait_s


class BatchEntry(Generic[ItemT, ResultT]):
    """An item in a queue or in a batch, and its result."""

    __slots__ = ("entered_at", "item", "key", "number", "result")

    def __init__(
        self, item: ItemT, key: Hashable, entered_at: float, number: int, result: asyncio.Future[ResultT]
    ) -> None:
        self.item = item
        self.key = key
        self.entered_at = entered_at
        self.number = number
        self.result = result


class _Line(Generic[ItemT, ResultT]):
    """Entries that may go together, in order. With a measure, also how many of the first ones fit."""

    __slots__ = ("entries", "fitting", "is_full", "measured_for")

    def __init__(self) -> None:
        self.entries: list[BatchEntry[ItemT, ResultT]] = []
        self.forget(0)

    def forget(self, limit: float) -> None:
        """Measure anew."""
        self.fitting = 0
        self.is_full = False
        self.measured_for = limit


class BatchQueue(Generic[ItemT, ResultT]):
    """Collects items into batches and hands each item's result to whoever entered it.

    It belongs to the event loop that it is used on, and holds neither that nor anything of its user while it
    is idle.

    Parameters
    ----------
    run : coroutine function
        Takes a list of items and returns as many results; an exception among them is raised for that item.
    limits : BatchLimits
    max_running : int, optional
        How many batches may run at a time; while so many do, items gather.
    size_of : callable, optional
        Takes a list of items and returns how large they are together; default: as large as they are many.
    on_batch : callable, optional
        Gets of each batch that starts how many seconds each of its items has waited.
    """

    def __init__(
        self,
        run: Callable[[list[ItemT]], Awaitable[Sequence[ResultT | BaseException]]],
        limits: BatchLimits,
        *,
        max_running: int | None = None,
        size_of: Callable[[list[ItemT]], float] | None = None,
        on_batch: Callable[[list[float]], None] | None = None,
    ) -> None:
        self._run = run
        self._limits = limits
        self._max_running = max_running
        self._size_of = size_of
        self._on_batch = on_batch
        self._lines: dict[Hashable, _Line[ItemT, ResultT]] = {}
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._is_starting = False
        #: The batches that run, each with the time of day at which it began.
        self._tasks: dict[asyncio.Task[None], float] = {}

    def __repr__(self) -> str:
        return f"<BatchQueue waiting={self.queued} running={len(self._tasks)}>"

    @property
    def queued(self) -> int:
        """How many items wait for their batch to run."""
        return sum(len(line.entries) for line in list(self._lines.values()))

    @property
    def is_idle(self) -> bool:
        return not self._lines and not self._tasks

    @property
    def running(self) -> dict[asyncio.Task[None], float]:
        """The tasks of the batches that run, each with the time of day at which it began."""
        return dict(self._tasks)

    async def submit(self, item: ItemT, key: Hashable = None) -> ResultT:
        """Return the item's result once its batch has run; cancelling this takes the item out."""
        entry = self.enter(item, key)
        try:
            return await entry.result
        except asyncio.CancelledError:
            self.leave(entry)
            raise
        finally:
            del entry  # else an error's traceback holds this frame, and this frame the error

    def enter(self, item: ItemT, key: Hashable = None) -> BatchEntry[ItemT, ResultT]:
        """Put an item into line; its result is the entry's. Only items of equal keys share a batch.

        Raises
        ------
        RuntimeError
            The item alone is larger than a batch may be.
        Exception
            What ``size_of`` raised for it.
        """
        if self._size_of is not None:
            self._measure([item], self._limits.max_batch_size)
        loop = asyncio.get_running_loop()
        entry: BatchEntry[ItemT, ResultT] = BatchEntry(
            item, key, loop.time(), next(self._numbers), loop.create_future()
        )
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
        line.entries.append(entry)
        self.reconsider()
        return entry

    def leave(self, entry: BatchEntry[ItemT, ResultT]) -> None:
        """Take an item out of line, or out of its batch, which is cancelled once it has no items left."""
        if not entry.result.cancel() and not entry.result.cancelled():
            entry.result.exception()  # looked at, so that nobody complains that it was not
        line = self._lines.get(entry.key)
        if line is not None and entry in line.entries:
            line.entries.remove(entry)
            line.forget(self._limits.max_batch_size)
            self._drop_if_empty(entry.key, line)

    def reconsider(self) -> None:
        """Start what may start; to be called when the limits have changed."""
        if not self._lines and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_starting or not self._lines or self._is_busy():
            return
        if self._next_line() is not None:
            # Not at once: what is entered in the same turn of the loop goes along.
            self._is_starting = True
            asyncio.get_running_loop().call_soon(self._start_batch)
        elif self._lines:
            self._arm_timer()

    def _is_busy(self) -> bool:
        return self._max_running is not None and len(self._tasks) >= self._max_running

    def _next_line(self) -> tuple[Hashable, int] | None:
        """Return the line whose batch may start, and how many go; of several the one that waited longest."""
        found: tuple[int, Hashable, int] | None = None
        now, wait_s = asyncio.get_running_loop().time(), self._limits.wait_s
        for key, line in list(self._lines.items()):
            count, is_full = self._count(line)
            if not line.entries:
                del self._lines[key]  # none of it fits any more
                continue
            first = line.entries[0]
            # The timer's own sum, lest it be rounded to just not yet, again and again.
            is_due = is_full or first.entered_at + wait_s <= now
            if is_due and (found is None or first.number < found[0]):
                found = (first.number, key, count)
        return None if found is None else found[1:]

    def _count(self, line: _Line[ItemT, ResultT]) -> tuple[int, bool]:
        """Return how many of a line go together, and whether there is no use in waiting for more."""
        limit = self._limits.max_batch_size
        entries = line.entries
        if self._size_of is None:
            return min(len(entries), limit), len(entries) >= limit
        if line.measured_for != limit:
            line.forget(limit)
        while line.fitting < len(entries) and not line.is_full:
            try:
                size = self._measure([entry.item for entry in entries[: line.fitting + 1]], limit)
            except BaseException as error:  # of user code; there is nobody here whom it could end
                if line.fitting:
                    line.is_full = True  # each is well alone, so the next one goes by itself
                else:
                    _settle(entries.pop(0).result, error)  # the limit was lowered meanwhile
            else:
                line.fitting += 1
                line.is_full = size >= limit
        return line.fitting, line.is_full

    def _measure(self, items: list[ItemT], limit: float) -> float:
        assert self._size_of is not None
        size = self._size_of(items)
        if not size <= limit:
            raise RuntimeError(
                f"The size of the item, {size!r} by batch_size_fn, is greater than max_batch_size, which is "
                f"{limit}; send smaller items, or increase max_batch_size."
            )
        return size

    def _drop_if_empty(self, key: Hashable, line: _Line[ItemT, ResultT]) -> None:
        if not line.entries and self._lines.get(key) is line:
            del self._lines[key]

    def _arm_timer(self) -> None:
        loop = asyncio.get_running_loop()
        first_at = min(line.entries[0].entered_at for line in self._lines.values())
        due_at = first_at + self._limits.wait_s
        if self._timer is not None:
            if self._timer.when() <= due_at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.reconsider()

    def _start_batch(self) -> None:
        self._is_starting = False
        self._forget_cancelled()
        found = None if self._is_busy() else self._next_line()
        if found is not None:
            key, count = found
            line = self._lines[key]
            batch, line.entries = line.entries[:count], line.entries[count:]
            line.forget(self._limits.max_batch_size)
            self._drop_if_empty(key, line)
            loop = asyncio.get_running_loop()
            if self._on_batch is not None:
                now = loop.time()
                self._on_batch([now - entry.entered_at for entry in batch])
            task = loop.create_task(self._run_batch(batch))
            self._tasks[task] = LoopClock().wall()
            task.add_done_callback(self._note_end)
            _cancel_when_unwanted(task, batch)
        self.reconsider()

    def _forget_cancelled(self) -> None:
        # Whoever is cancelled takes its item out itself, but gets to it a turn of the loop later.
        for key, line in list(self._lines.items()):
            if any(entry.result.done() for entry in line.entries):
                line.entries = [entry for entry in line.entries if not entry.result.done()]
                line.forget(self._limits.max_batch_size)
                self._drop_if_empty(key, line)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self.reconsider()

    async def _run_batch(self, batch: list[BatchEntry[ItemT, ResultT]]) -> None:
        results: Sequence[ResultT | BaseException]
        try:
            results = await self._run([entry.item for entry in batch])
            if len(results) != len(batch):
                raise ServeError(f"A batch of {len(batch)} was answered by {len(results)} results.")
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                for entry in batch:
                    entry.result.cancel()
                raise
            results = [error] * len(batch)  # nobody cancelled the batch: it is an error like any other
        except BaseException as error:  # the error of each of them; nothing of it may end the loop
            if all(entry.result.done() for entry in batch):
                logger.warning("A batch failed after its callers had gone", exc_info=error)
            results = [error] * len(batch)
        _settle_all(batch, results)
        del batch, results  # as in submit()


def raisable(error: BaseException) -> Exception:
    """Return the error, or a stand-in for one that would end more than the call it is raised in."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    stand_in = UserCodeError(f"The user's code gave {type(error).__name__}: {error}")
    stand_in.__cause__ = error
    return stand_in


def _settle_all(batch: list[BatchEntry[Any, ResultT]], results: Sequence[ResultT | BaseException]) -> None:
    for entry, result in zip(batch, results, strict=True):
        _settle(entry.result, result)


def _settle(future: asyncio.Future[ResultT], result: ResultT | BaseException) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(raisable(result))
    else:
        future.set_result(result)


def _cancel_when_unwanted(task: asyncio.Task[None], batch: list[BatchEntry[Any, Any]]) -> None:
    """Cancel a running batch once nobody waits for any of its results."""
    waiting = len(batch)
    has_lost_some = False

    def note(future: asyncio.Future[Any]) -> None:
        nonlocal waiting, has_lost_some
        waiting -= 1
        has_lost_some = has_lost_some or future.cancelled()
        if not waiting and has_lost_some:
            task.cancel()

    for entry in batch:
        entry.result.add_done_callback(note)


def reconsider_on(loop: asyncio.AbstractEventLoop, queue: BatchQueue[Any, Any]) -> None:
    """Have a queue act on changed limits, from any thread."""
    with suppress(RuntimeError):  # what a closed loop raises; nothing waits there any more
        loop.call_soon_threadsafe(queue.reconsider)
