"""Classic batching: many requests in one call of the user's code.

A callable marked with `accept_batch` gets a list of requests and returns a list of as many results. The
`BatchQueue` decides on the worker's loop who goes together; a `Batch` does the user's side of it.

There is no loop that could die: a queue acts when something is submitted, when a wait is over and when a
batch has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from daskserve import payload as pickled
from daskserve.data.conversion import Answer, Unfinished, dump_result, failure, to_answer
from daskserve.data.requests import HTTPRequest, ServeRequest, legacy_argument
from daskserve.errors import ServeError
from daskserve.types import Payload, Receive

CallableT = TypeVar("CallableT", bound=Callable[..., Any])
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

MARK = "_serve_accept_batch"


def accept_batch(callable_: CallableT) -> CallableT:
    """Mark a function, a method or a class as taking a list of requests.

    Its ``max_batch_size`` and ``batch_wait_timeout`` are options of the backend. It must return a list of as
    many results, in order; a result that is an exception fails that request alone.

    Examples
    --------
    >>> @accept_batch
    ... def double(requests):
    ...     return [2 * int(request.query_params["n"]) for request in requests]
    """
    setattr(callable_, MARK, True)
    return callable_


class _Entry(Generic[ItemT, ResultT]):
    __slots__ = ("due_at", "item", "result")

    def __init__(self, item: ItemT, due_at: float, result: asyncio.Future[ResultT]) -> None:
        self.item = item
        self.due_at = due_at
        self.result = result


class BatchQueue(Generic[ItemT, ResultT]):
    """Collects items into batches and hands each item's result to whoever submitted it.

    Parameters
    ----------
    run : coroutine function
        Takes a list of items and returns as many results; an exception among them is raised for that item.
    max_batch_size : int
        A batch this large runs at once.
    wait_s : float
        How long the first item of a batch waits for others.
    is_serial : bool
        Whether a batch waits for the one before it, as plain functions do; items that come meanwhile gather.
    """

    def __init__(
        self,
        run: Callable[[list[ItemT]], Awaitable[Sequence[ResultT | BaseException]]],
        *,
        max_batch_size: int,
        wait_s: float,
        is_serial: bool,
    ) -> None:
        self.max_batch_size = max_batch_size
        self.wait_s = wait_s
        self._run = run
        self._is_serial = is_serial
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Entry[ItemT, ResultT]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_starting = False
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<BatchQueue waiting={len(self._waiting)} running={len(self._tasks)}>"

    @property
    def queued(self) -> int:
        """How many items wait for their batch to run."""
        return len(self._waiting)

    async def submit(self, item: ItemT) -> ResultT:
        """Return the item's result once its batch has run; cancelling this takes the item out."""
        entry: _Entry[ItemT, ResultT] = _Entry(
            item, self._loop.time() + self.wait_s, self._loop.create_future()
        )
        self._waiting.append(entry)
        self._schedule()
        try:
            return await entry.result
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            raise

    def _schedule(self) -> None:
        if self._is_starting or not self._waiting or (self._is_serial and self._tasks):
            return
        if len(self._waiting) >= self.max_batch_size or self._waiting[0].due_at <= self._loop.time():
            # Not at once: what is submitted in the same turn of the loop goes along.
            self._is_starting = True
            self._loop.call_soon(self._start_batch)
        elif self._timer is None:
            self._timer = self._loop.call_at(self._waiting[0].due_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._schedule()

    def _start_batch(self) -> None:
        self._is_starting = False
        if self._waiting:
            count = min(len(self._waiting), self.max_batch_size)
            batch = [self._waiting.popleft() for _ in range(count)]
            task = self._loop.create_task(self._run_batch(batch))
            self._tasks.add(task)
            task.add_done_callback(self._note_end)
            _cancel_when_unwanted(task, batch)
        self._schedule()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._schedule()

    async def _run_batch(self, batch: list[_Entry[ItemT, ResultT]]) -> None:
        try:
            results = await self._run([entry.item for entry in batch])
            if len(results) != len(batch):
                raise ServeError(f"A batch of {len(batch)} was answered by {len(results)} results.")
        except asyncio.CancelledError:
            for entry in batch:
                entry.result.cancel()
            raise
        except Exception as error:  # the error of each of them
            for entry in batch:
                _settle(entry.result, error)
        else:
            for entry, result in zip(batch, results, strict=True):
                _settle(entry.result, result)


def _settle(future: asyncio.Future[ResultT], result: ResultT | BaseException) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


def _cancel_when_unwanted(task: asyncio.Task[None], batch: list[_Entry[Any, Any]]) -> None:
    """Cancel a running batch once nobody waits for any of its results."""
    wanted = len(batch)

    def note(future: asyncio.Future[Any]) -> None:
        nonlocal wanted
        wanted -= future.cancelled()
        if not wanted:
            task.cancel()

    for entry in batch:
        entry.result.add_done_callback(note)


# ---- on the user's side


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One request on its way into a batch: an HTTP scope with its whole body, or the head of a call."""

    head: Mapping[str, Any]
    scope: MutableMapping[str, Any] | None = None
    body: bytes = b""
    payload: Payload | None = None

    def request(self, receive: Receive) -> HTTPRequest | ServeRequest | Any:
        """Return what the user's code gets for it."""
        if self.scope is not None:
            return HTTPRequest(self.scope, receive, self.body)
        args, kwargs = ((), {}) if self.payload is None else pickled.load(self.payload)
        return legacy_argument(self.head, args, kwargs)


#: What becomes of one item: a response, the pickled result of a call, or the error of a call.
Outcome = Answer | Unfinished | Payload | Exception


class Batch:
    """The user's side of one batch: its requests, and then the outcome of each."""

    def __init__(self, name: str, items: Sequence[BatchItem], *, is_debug: bool) -> None:
        self._name = name
        self._is_debug = is_debug
        self._items = items
        self._outcomes: list[Outcome | None] = [None] * len(items)
        self.requests: list[Any] = []
        for index, item in enumerate(items):
            try:
                self.requests.append(item.request(_no_message))
            except Exception as error:  # an unreadable argument is that caller's trouble only
                self._outcomes[index] = self._failed(item, error)

    def split(self, results: Any) -> list[Outcome]:
        """Return all outcomes, given what the user's code returned."""
        expected = len(self.requests)
        if isinstance(results, (str, bytes, Mapping, set, frozenset)) or not isinstance(results, Iterable):
            return self.fail(
                ServeError(
                    f"{self._name} must return a list of results, one per request of the batch; "
                    f"it returned a {type(results).__name__}."
                )
            )
        results = list(results)
        if len(results) != expected:
            return self.fail(
                ServeError(
                    f"{self._name} must return one result per request: it got {expected} "
                    f"and returned {len(results)}."
                )
            )
        remaining = iter(results)
        return [
            self._convert(item, next(remaining)) if outcome is None else outcome
            for item, outcome in zip(self._items, self._outcomes, strict=True)
        ]

    def fail(self, error: Exception) -> list[Outcome]:
        """Return all outcomes, given what the user's code raised. It is logged once."""
        answer: Answer | None = None
        outcomes: list[Outcome] = []
        for item, outcome in zip(self._items, self._outcomes, strict=True):
            if outcome is None and item.scope is not None:
                answer = answer or failure(error, is_debug=self._is_debug)
                outcome = answer
            outcomes.append(error if outcome is None else outcome)
        return outcomes

    def _convert(self, item: BatchItem, result: Any) -> Outcome:
        try:
            if isinstance(result, Exception):
                return self._failed(item, result)
            if item.scope is not None:
                return to_answer(result)
            return dump_result(self._name, result)
        except Exception as error:  # one result that cannot be written is one failure
            return self._failed(item, error)

    def _failed(self, item: BatchItem, error: Exception) -> Outcome:
        return error if item.scope is None else failure(error, is_debug=self._is_debug)


async def answer_batch(
    function: Callable[[list[Any]], Any], name: str, items: Sequence[BatchItem], is_debug: bool
) -> list[Outcome]:
    """Let an async function answer a batch."""
    batch = Batch(name, items, is_debug=is_debug)
    try:
        return batch.split(await function(batch.requests) if batch.requests else [])
    except Exception as error:  # the user's, and the answer to all of them
        return batch.fail(error)


def answer_batch_in_thread(
    function: Callable[[list[Any]], Any], name: str, items: Sequence[BatchItem], is_debug: bool
) -> list[Outcome]:
    """Let a plain function answer a batch."""
    batch = Batch(name, items, is_debug=is_debug)
    try:
        return batch.split(function(batch.requests) if batch.requests else [])
    except Exception as error:  # the user's, and the answer to all of them
        return batch.fail(error)


async def _no_message() -> Any:
    return {"type": "http.disconnect"}
