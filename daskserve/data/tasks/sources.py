"""``source``: each replica reads a user's async iterator, and passes its items to a method.

The reader belongs to the user's object: it starts with the constructor and stops with the destructor, which
waits for the items that are being handled, within the grace period of the replica. An item is acknowledged
after its handler has returned. An item that is not acknowledged should be delivered again by its origin, to
this replica or to another one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from daskserve.common.clock import LoopClock
from daskserve.common.types import short_tag
from daskserve.context import current_replica
from daskserve.loops.tasks import TaskSet

logger = logging.getLogger("daskserve.sources")

#: The attribute of an object that holds its readers.
READERS = "__daskserve_readers__"
#: Number of items that are handled at a time outside of a replica.
OUTSIDE = 10
#: After reading for this long, a source that fails restarts after the shortest pause.
STEADY_S = 60.0


@dataclass(frozen=True, slots=True)
class SourceItem:
    """An item of a source, with functions to call after it was handled.

    Attributes
    ----------
    value : object
        The handler's argument.
    ack : callable, optional
        Called without arguments once the handler has returned; may be a coroutine function.
    nack : callable, optional
        Called with the error if the handler has raised.
    """

    value: Any
    ack: Callable[[], Any] | None = None
    nack: Callable[[Exception], Any] | None = None


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How a source is read; see `source`."""

    handler: str
    max_in_flight: int | None
    backoff_s: float
    max_backoff_s: float


class Source:
    """A method with `source`, until its class is complete; then the class has the method itself."""

    def __init__(self, read: Callable[[Any], AsyncIterator[Any]], options: SourceOptions) -> None:
        self._read, self._options = read, options

    def __set_name__(self, owner: type, name: str) -> None:
        handler = getattr(owner, self._options.handler, None)
        if not inspect.isfunction(handler):
            raise TypeError(
                f"{owner.__name__}.{name} gives its items to {self._options.handler!r}, but "
                f"{owner.__name__} has no method of this name"
            )
        setattr(owner, name, self._read)
        _wrap_constructor(owner, self._read, self._options)
        _wrap_destructor(owner)


def source(
    handler: str,
    *,
    max_in_flight: int | None = None,
    backoff_s: float = 1.0,
    max_backoff_s: float = 60.0,
) -> Callable[[Callable[[Any], AsyncIterator[Any]]], Any]:
    """Make each replica read an async generator method and pass its items to another method.

    A plain value that it yields is passed to the handler unchanged. A `SourceItem` also says how it is
    acknowledged. If the generator raises, it is called again after a pause; if it returns, reading ends. When
    the replica stops, the generator is closed, and items that are being handled are finished and
    acknowledged.

    The class gets an ``async def __init__``, so a subclass with a constructor must await it.

    Parameters
    ----------
    handler : str
        The name of the method: a plain one, which runs in a thread, or a coroutine function.
    max_in_flight : int, optional
        How many items a replica handles at a time. Default: ``max_ongoing_requests``.
    backoff_s, max_backoff_s : float
        The pause after the first error, in seconds; it doubles with each error up to the longest.

    Examples
    --------
    >>> @serve.deployment(num_replicas=3)
    ... class Clicks:
    ...     @serve.tasks.source("count")
    ...     async def clicks(self):
    ...         async for message in subscribe("clicks"):
    ...             yield serve.tasks.SourceItem(message.data, ack=message.ack)
    ...
    ...     async def count(self, click): ...
    """
    if not isinstance(handler, str):
        raise TypeError('source takes the name of a method: @serve.tasks.source("handle")')
    if max_in_flight is not None and (not isinstance(max_in_flight, int) or max_in_flight < 1):
        raise ValueError(f"max_in_flight is {max_in_flight!r}; give a whole number, at least 1")
    if not 0 < backoff_s <= max_backoff_s:
        raise ValueError(f"backoff_s is {backoff_s!r}; give a number above 0, up to max_backoff_s")

    def decorate(read: Callable[[Any], AsyncIterator[Any]]) -> Source:
        if not inspect.isasyncgenfunction(read):
            raise TypeError(f"source is for methods of the form `async def` with `yield`, got {read!r:.100}")
        return Source(read, SourceOptions(handler, max_in_flight, backoff_s, max_backoff_s))

    return decorate


def _wrap_constructor(owner: Any, read: Callable[[Any], AsyncIterator[Any]], options: SourceOptions) -> None:
    construct: Any = owner.__init__

    @wraps(construct)
    async def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made = construct(self, *args, **kwargs)
        if inspect.isawaitable(made):
            await made
        reader = SourceReader(read.__get__(self), getattr(self, options.handler), options)
        vars(self).setdefault(READERS, []).append(reader)
        reader.start()

    owner.__init__ = __init__


def _wrap_destructor(owner: Any) -> None:
    if READERS in vars(owner):
        return  # the readers of another source
    setattr(owner, READERS, ())
    destruct: Any = getattr(owner, "__del__", None)

    async def __del__(self: Any) -> None:
        try:
            await asyncio.gather(*(each.stop() for each in getattr(self, READERS)))
        finally:
            ended = None if destruct is None else destruct(self)
            if inspect.isawaitable(ended):
                await ended

    owner.__del__ = __del__


class SourceReader:
    """Reads one source of one object."""

    def __init__(
        self,
        read: Callable[[], AsyncIterator[Any]],
        handle: Callable[[Any], Any],
        options: SourceOptions,
        clock: LoopClock | None = None,
    ) -> None:
        replica = current_replica.get()
        slots = OUTSIDE if replica is None else replica.max_ongoing_requests
        self._place = "" if replica is None else f" of replica {short_tag(replica.replica_tag)}"
        self._read, self._handle, self._options = read, handle, options
        self._limit = options.max_in_flight or slots or OUTSIDE
        self._room = asyncio.Semaphore(self._limit)
        self._clock = clock or LoopClock()
        self._tasks, self._reading = TaskSet(logger), TaskSet(logger)
        self._threads: ThreadPoolExecutor | None = None
        #: How many items were handled, and how many failed.
        self.handled = self.failed = 0

    def start(self) -> None:
        """Begin to read."""
        self._reading.spawn(self._run(), "source")

    async def stop(self) -> None:
        """Read no more, and wait until all items that were read are handled; cancelling the wait cancels
        them."""
        try:
            await self._reading.close()
            await self._tasks.wait()
        except BaseException:
            self._tasks.cancel()
            raise
        finally:
            if self._threads is not None:
                self._threads.shutdown(wait=False)

    async def _run(self) -> None:
        options, pause_s = self._options, self._options.backoff_s
        while True:
            began = self._clock.now()
            try:
                await self._read_all()
                logger.info("Source %s%s has ended", self._name, self._place)
                return
            except Exception:
                if self._clock.now() - began > STEADY_S:
                    pause_s = options.backoff_s
                logger.exception(
                    "Source %s%s failed; it is read again in %s s", self._name, self._place, pause_s
                )
            await self._clock.sleep(pause_s)
            pause_s = min(options.max_backoff_s, 2 * pause_s)

    @property
    def _name(self) -> str:
        return getattr(self._read, "__qualname__", repr(self._read))

    async def _read_all(self) -> None:
        items: Any = self._read()
        async with aclosing(items):
            while True:
                # Wait for room before taking an item, so that no item waits here.
                await self._room.acquire()
                try:
                    item = await anext(items)
                except BaseException as error:
                    self._room.release()
                    if isinstance(error, StopAsyncIteration):
                        return
                    raise
                self._tasks.spawn(self._carry(item), "source-item")

    async def _carry(self, item: Any) -> None:
        item = item if isinstance(item, SourceItem) else SourceItem(item)
        try:
            try:
                await self._handled(item.value)
            except Exception as error:
                self.failed += 1
                logger.exception("An item of source %s%s failed", self._name, self._place)
                await _called(item.nack and partial(item.nack, error))
            else:
                self.handled += 1
                await _called(item.ack)
        except Exception:
            # The origin of the item should deliver it again.
            logger.exception("An item of source %s%s was not acknowledged", self._name, self._place)
        finally:
            self._room.release()

    async def _handled(self, value: Any) -> None:
        if inspect.iscoroutinefunction(self._handle):
            await self._handle(value)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._limit, "daskserve-source")
        call = partial(copy_context().run, self._handle, value)
        await asyncio.get_running_loop().run_in_executor(self._threads, call)


async def _called(function: Callable[[], Any] | None) -> None:
    result: Awaitable[Any] | None = None if function is None else function()
    if inspect.isawaitable(result):
        await result
