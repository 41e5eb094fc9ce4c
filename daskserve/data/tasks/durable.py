"""The adapters of daskserve's own queues: at the instance, in an SQLite file, and in Redis."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import threading
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any

from daskserve.common.clock import LoopClock, system_rng, time_of_day
from daskserve.common.settings import process_variables
from daskserve.data.tasks import states
from daskserve.data.tasks.adapter import AsyncCapability, TaskProcessorAdapter
from daskserve.data.tasks.config import (
    MAX_NAME,
    DurableOptions,
    InstanceAdapterConfig,
    RedisAdapterConfig,
    SQLiteAdapterConfig,
    TaskProcessorConfig,
    TaskResult,
)
from daskserve.data.tasks.consumer import Failure, TaskConsumer
from daskserve.data.tasks.errors import TaskConflictError
from daskserve.data.tasks.payloads import (
    checked_arguments,
    digest_of,
    error_parts,
    error_text,
    joined,
    load,
    packed_arguments,
)
from daskserve.data.tasks.queues.instance import InstanceQueue
from daskserve.data.tasks.queues.protocol import Change, TaskQueue
from daskserve.data.tasks.queues.sqlite import SqliteQueue
from daskserve.data.tasks.states import Task, TaskState
from daskserve.errors import BadRequestError, BodyTooLargeError, NotFoundError
from daskserve.loops.tasks import is_cancelling
from daskserve.options.fields.priority import MAX_PRIORITY
from daskserve.payload.packed_errors import packed_here
from daskserve.payload.pickling import dump

#: Number of attempts to change a task that other programs change at the same time.
TRIES = 20
#: The options of a task; see `DurableAdapter.enqueue_task_sync`.
OPTIONS = frozenset({"id", "delay_s", "at", "priority", "result_ttl_s"})


class DurableAdapter(TaskProcessorAdapter):
    """The adapter of a queue of daskserve's own."""

    options_class: type[DurableOptions]
    #: Returns the queue for the adapter's options.
    queue_of: Callable[[Any], TaskQueue]

    def __init__(self, config: TaskProcessorConfig) -> None:
        super().__init__()
        if not isinstance(config.adapter_config, self.options_class):
            raise TypeError(
                f"adapter_config is of type {type(config.adapter_config).__name__}; {type(self).__name__} "
                f"takes a {self.options_class.__name__}"
            )
        self._async_capabilities = set(AsyncCapability)
        self.config = config
        self._options: DurableOptions = config.adapter_config
        self._rules = config.rules()
        self._name = config.queue_name
        self.queue = type(self).queue_of(self._options)
        self._handlers: dict[str, Callable[..., Any]] = {}
        self._concurrency = 1
        self._thread: _ConsumerThread | None = None

    def initialize(self, consumer_concurrency: int = 1) -> None:
        """Open the queue, and create it if necessary."""
        self._concurrency = consumer_concurrency
        self.queue.open()

    def shutdown(self) -> None:
        """Close the queue."""
        self.stop_consumer()
        self.queue.close()

    # ---- submitting

    def enqueue_task_sync(
        self,
        task_name: str,
        args: Any = None,
        kwargs: Any = None,
        **options: Any,
    ) -> TaskResult:
        """Submit a task; it is durable when this returns.

        Parameters
        ----------
        id : str, optional
            Makes the task run once: if the queue has a task with this id, that task is returned.
        delay_s, at
            The earliest start: a delay in seconds, or a time (with a time zone, or seconds since the epoch).
        priority : int
            Tasks with a higher one run first.
        result_ttl_s : float, optional
            Overrides the option of the queue.

        Raises
        ------
        TaskQueueFullError
            Too many tasks wait.
        BodyTooLargeError
            The arguments exceed ``max_payload_bytes``.
        TaskConflictError
            The id belongs to a task with another handler or other arguments.
        TaskQueueError The queue cannot be reached; submit the task again, with an id if it must not run
        twice.
        """
        return self.submit_many([{"task_name": task_name, "args": args, "kwargs": kwargs, **options}])[0]

    def submit_many(self, tasks: Sequence[Mapping[str, Any]]) -> list[TaskResult]:
        """Submit tasks in one step, all or none; each is a dict with the arguments of `enqueue_task_sync`."""
        made = [_made(self.config, **each) for each in tasks]
        added = self.queue.add(made, self._options.max_queue_length, time_of_day())
        return [result_of(task, is_new=is_new) for task, is_new in added]

    # ---- querying

    def find(self, task_id: str) -> Task:
        """Return a task as the queue keeps it; raise `NotFoundError` if there is none."""
        (task,) = self.queue.get(self._name, [task_id])
        if task is None or (task.has_ended and task.expires_at <= time_of_day()):
            raise NotFoundError(
                f"Queue {self._name!r} has no task with the id {task_id!r:.200}: it was never submitted, or "
                "it ended so long ago that it was removed."
            )
        return task

    def get_task_status_sync(self, task_id: str) -> TaskResult:
        """Return the status of a task; raise `NotFoundError` if it is unknown or was removed."""
        return result_of(self.find(task_id))

    def cancel_task_sync(self, task_id: str) -> bool:
        """Cancel a task: at once if it waits, and within a second if it runs async code.

        Returns False if the task has already ended. A plain function cannot be stopped: it runs to its end,
        and its result is dropped.
        """

        def cancelled(task: Task) -> Task | None:
            if task.has_ended or task.is_cancelled:
                return None
            return states.cancelled(task, time_of_day(), self._rules)

        return _changed(self, task_id, cancelled).is_cancelled

    def retry_task_sync(self, task_id: str) -> TaskResult:
        """Queue again a task that has failed, was cancelled, or could not run."""
        return result_of(_changed(self, task_id, lambda task: states.requeued(task, time_of_day())))

    def get_metrics_sync(self) -> dict[str, Any]:
        """Return how many tasks there are by state, and the age of the oldest waiting task, in seconds."""
        stats = self.queue.stats(self._name, time_of_day())
        counts = {each.value: stats.counts.get(each, 0) for each in TaskState}
        return {**counts, "waiting": stats.waiting, "running": stats.running, "oldest_s": stats.oldest_s}

    def health_check_sync(self) -> list[dict[str, Any]]:
        """Return the health of the queue; raise `TaskQueueError` if the queue does not answer."""
        self.get_metrics_sync()
        return [{self._name: {"ok": "pong"}}]

    # ---- consuming outside a deployment

    def register_task_handle(self, func: Callable[..., Any], name: str | None = None) -> None:
        """Add a handler: a function, or a coroutine function."""
        self._handlers[name or func.__name__] = func

    def start_consumer(self, **kwargs: Any) -> None:
        """Consume tasks in threads of this process."""
        if self._thread is None:
            self._thread = _ConsumerThread(self, self._handlers, self._concurrency)

    def stop_consumer(self, timeout: float = 10.0) -> None:
        """Take no more tasks, and wait for running ones; tasks that still run after the timeout return to the
        queue."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop(timeout)


def _changed(adapter: DurableAdapter, task_id: str, change: Callable[[Task], Task | None]) -> Task:
    """Change a task in its queue; return it, unchanged if ``change`` returns None."""
    for _ in range(TRIES):
        task = adapter.find(task_id)
        after = change(task)
        if after is None:
            return task
        if adapter.queue.write([Change(after)])[0]:
            return after
    raise TaskConflictError(f"Task {task_id!r} keeps changing; try again.")


def _redis_queue(options: RedisAdapterConfig) -> TaskQueue:
    from daskserve.data.tasks.queues.redis_queue import RedisQueue  # an optional dependency

    return RedisQueue(options.read_url(process_variables()), options.prefix)


class InstanceTaskProcessorAdapter(DurableAdapter):
    """The adapter of a queue that the instance keeps."""

    options_class = InstanceAdapterConfig
    queue_of = staticmethod(lambda options: InstanceQueue(synchronous=options.synchronous))


class SQLiteTaskProcessorAdapter(DurableAdapter):
    """The adapter of a queue in an SQLite file."""

    options_class = SQLiteAdapterConfig
    queue_of = staticmethod(lambda options: SqliteQueue(options.file, synchronous=options.synchronous))


class RedisTaskProcessorAdapter(DurableAdapter):
    """The adapter of a queue in Redis."""

    options_class = RedisAdapterConfig
    queue_of = staticmethod(_redis_queue)


class _ConsumerThread:
    """A consumer of functions, with an event loop in its own thread."""

    def __init__(
        self, adapter: DurableAdapter, handlers: Mapping[str, Callable[..., Any]], room: int
    ) -> None:
        self._adapter, self._handlers, self._room = adapter, handlers, room
        self._loop = asyncio.new_event_loop()
        # Separate threads, so that long functions do not delay the renewal of leases.
        self._functions = ThreadPoolExecutor(room, "daskserve-task")
        self._timeout = 10.0
        self._is_over = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="daskserve-task-consumer", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._consume())

    async def _consume(self) -> None:
        threads = ThreadPoolExecutor(2, "daskserve-task-queue")
        call = partial(self._loop.run_in_executor, threads)
        consumer = new_consumer(
            self._adapter,
            "program",
            self._handlers,
            self._run,
            lambda: self._room,
            clock=LoopClock(),
            rng=system_rng(),
            call=call,
        )
        consumer.start()
        await self._is_over.wait()
        consumer.pause()
        try:
            async with asyncio.timeout(self._timeout):
                await consumer.drained()
        except TimeoutError:
            pass  # tasks that still run return to the queue
        await consumer.close()
        for each in (threads, self._functions):
            each.shutdown(wait=False)

    async def _run(self, task: Task) -> bytes:
        function = self._handlers[task.name]
        try:
            args, kwargs = load(task.payload)
            if inspect.iscoroutinefunction(function):
                value = await function(*args, **kwargs)
            else:
                call = partial(contextvars.copy_context().run, function, *args, **kwargs)
                value = await self._loop.run_in_executor(self._functions, call)
            result = joined(dump(value, is_final=True))
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelling():
                raise
            packed = packed_here(error)
            raise Failure(error_text(packed.summary, packed.text)) from None
        return checked_result(task, result, self._adapter.config.adapter_config)

    def stop(self, timeout: float) -> None:
        self._timeout = timeout
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(timeout + 10.0)


def new_consumer(
    adapter: DurableAdapter,
    owner: str,
    handlers: Collection[str],
    run: Callable[[Task], Awaitable[bytes]],
    room: Callable[[], int],
    **parts: Any,
) -> TaskConsumer:
    """Return a consumer of an adapter's queue; the parameters are those of `TaskConsumer`."""
    return TaskConsumer(adapter.queue, adapter.config, f"{owner}:{new_id()}", handlers, run, room, **parts)


def checked_result(task: Task, result: bytes, options: DurableOptions) -> bytes:
    """Return a result; raise `Failure` if it is too large to be kept."""
    if len(result) > options.max_payload_bytes:
        error = BodyTooLargeError(
            f"The result of task {task.name!r} takes {len(result)} bytes, more than "
            f"max_payload_bytes={options.max_payload_bytes}; store the data elsewhere, and return its "
            "location."
        )
        raise Failure(error_text(f"{type(error).__name__}: {error}", ""), is_final=True)
    return result


def result_of(task: Task, *, is_new: bool = True) -> TaskResult:
    """Return the public view of a task."""
    summary, traceback = error_parts(task.error)
    result = load(task.result) if task.result else summary or None
    progress = load(task.progress) if task.progress else None
    return TaskResult(
        id=task.id,
        status=task.state.value,
        created_at=task.created_at,
        result=result,
        attempts=task.attempts,
        progress=progress,
        traceback=traceback,
        is_new=is_new,
    )


def new_id() -> str:
    """Return a new unique id for a task or consumer."""
    return str(uuid.uuid4())


def _made(
    config: TaskProcessorConfig, task_name: Any = None, args: Any = None, kwargs: Any = None, **given: Any
) -> Task:
    """Return a new task; see `DurableAdapter.enqueue_task_sync`."""
    if unknown := given.keys() - OPTIONS:
        # Celery has many more options, which must not be ignored silently.
        raise BadRequestError(f"enqueue_task has no option {', '.join(map(repr, sorted(unknown)))}.")
    id, priority, result_ttl_s = given.get("id"), given.get("priority", 0), given.get("result_ttl_s")
    for what, text in (("task_name", task_name), *((("id", id),) if id is not None else ())):
        if not isinstance(text, str) or not 0 < len(text) <= MAX_NAME:
            raise BadRequestError(f"{what} is {text!r:.100}; give a text of up to {MAX_NAME} characters")
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise BadRequestError(
            f"priority is {priority!r}; give a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    if result_ttl_s is not None and not _is_duration(result_ttl_s):
        raise BadRequestError(f"result_ttl_s is {result_ttl_s!r:.100}; give a number of seconds, from 0 on")
    args, kwargs = checked_arguments(args, kwargs)
    options: DurableOptions = config.adapter_config
    payload = packed_arguments(task_name, args, kwargs, options.max_payload_bytes)
    now = time_of_day()
    return Task(
        id or new_id(),
        config.queue_name,
        task_name,
        payload,
        created_at=now,
        due_at=_due_at(now, given.get("delay_s", 0.0), given.get("at")),
        priority=priority,
        digest=digest_of(args, kwargs) if id else "",
        result_ttl_s=result_ttl_s,
    )


def _is_duration(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 <= value < 2**40


def _due_at(now: float, delay_s: Any, at: Any) -> float:
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise BadRequestError(f"at is {at}, without a time zone; use datetime.now(UTC), for example")
        at = at.timestamp()
    if not _is_duration(delay_s) or not (at is None or _is_duration(at)) or (at is not None and delay_s):
        raise BadRequestError(
            f"delay_s is {delay_s!r:.100} and at is {at!r:.100}; give only one of them, and no time in the "
            "past"
        )
    return now + delay_s if at is None else float(at)
