"""Takes tasks from a queue, runs them, and writes how they ended.

A consumer runs on one event loop; queues block, so they are called in threads. Its loops are independent of
each other, and each one continues after the queue was unreachable:

- one takes as many tasks as there is room for; - one writes how tasks ended, many tasks in one step; - one
renews leases, and finds tasks that were cancelled or given to another consumer; - one finds tasks of lost
consumers, and removes tasks that ended long ago; - one creates the tasks of schedules.

The end of a task counts once it is written. If a consumer is killed before, the task runs again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from daskserve.common.clock import Clock
from daskserve.common.formatting import counted
from daskserve.data.tasks import states
from daskserve.data.tasks.errors import TaskConflictError, TaskQueueError
from daskserve.data.tasks.payloads import dead_letter
from daskserve.data.tasks.queues.protocol import Change, QueueStats, TaskQueue, WaitingQueue
from daskserve.data.tasks.schedules import due_task, last_time, next_time
from daskserve.data.tasks.states import RetryRules, Task, TaskState
from daskserve.loops.tasks import TaskSet

if TYPE_CHECKING:  # slow to import
    from daskserve.data.tasks.config import DurableOptions, TaskProcessorConfig

logger = logging.getLogger("daskserve.tasks")

T = TypeVar("T")

#: How often a consumer checks whether its tasks were cancelled.
CANCEL_POLL_S = 0.5
#: How often a consumer looks for lost tasks and counts the tasks of the queue.
UPKEEP_S = 1.0
#: The pause after a consumer has taken all tasks. It then takes the tasks that arrived meanwhile together.
GATHER_S = 0.02
#: Maximum number of lost tasks that one step recovers, and of old tasks that one step removes.
BATCH = 500
#: Maximum pause before the next attempt to reach a queue.
MAX_PAUSE_S = 5.0


#: The id of a task, and its revision when claimed: a task that was given back keeps its attempt number.
Key: TypeAlias = tuple[str, int]


@dataclass(slots=True)
class LeasedTask:
    """A task that a consumer has."""

    task: Task
    #: The asyncio task that runs it; None if it is only returned to the queue.
    run: asyncio.Task[None] | None = None
    #: Whether the result could not be written, so that an error is written instead.
    is_replaced: bool = False
    #: Whether another consumer has the task, so that its end is not written.
    is_dropped: bool = False


class Released(Exception):
    """A task was not begun, or its replica stops, so another consumer should run it."""


class Lost(Exception):
    """The process that ran a task was killed."""


class Failure(Exception):
    """A task failed; the text comes from `daskserve.data.tasks.payloads.error_text`."""

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final


class TaskConsumer:
    """One consumer of one queue.

    Parameters
    ----------
    handlers : collection of str
        The names of the tasks that it can run.
    run : callable
        Runs a task and returns its result; raises `Failure`, `Released` or `Lost`. It may be cancelled.
    room : callable
        Returns how many tasks it may run at a time.
    call : callable
        Calls a function that blocks, in a thread.
    """

    def __init__(
        self,
        queue: TaskQueue,
        config: TaskProcessorConfig,
        owner: str,
        handlers: Collection[str],
        run: Callable[[Task], Awaitable[bytes]],
        room: Callable[[], int],
        *,
        clock: Clock,
        rng: random.Random,
        call: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        self._queue, self._config, self._owner = queue, config, owner
        self._handlers, self._run, self._room = handlers, run, room
        self._clock, self._rng, self._call = clock, rng, call
        #: The tasks that run, or whose end is not yet written.
        self._held: dict[Key, LeasedTask] = {}
        self._ended: dict[Key, Task] = {}
        #: When leases were last renewed; an error does not postpone the next renewal.
        self._renewed_at = clock.now()
        self._has_ended, self._has_room = asyncio.Event(), asyncio.Event()
        self._loops = TaskSet(logger)
        self._runs = TaskSet(logger)
        self._closing = asyncio.Event()
        self._claiming: asyncio.Task[None] | None = None
        #: The number of tasks in the queue, as last counted.
        self.stats = QueueStats({})
        #: How many tasks ended here, by state.
        self.totals: dict[str, int] = {}

    @property
    def _name(self) -> str:
        return self._config.queue_name

    @property
    def _options(self) -> DurableOptions:
        options: DurableOptions = self._config.adapter_config
        return options

    @property
    def _rules(self) -> RetryRules:
        return self._config.rules()

    # ---- lifecycle

    def start(self) -> None:
        """Begin to take tasks."""
        self._claiming = self._loops.spawn(self._supervised(self._claim), "tasks-claim")
        for loop in (self._write, self._renew, self._keep_up):
            self._loops.spawn(self._supervised(loop), f"tasks-{loop.__name__.strip('_')}")
        for name, schedule in self._config.schedules.items():
            make = partial(self._follow, name, schedule)
            self._loops.spawn(self._supervised(make), f"tasks-schedule-{name}")

    def pause(self) -> None:
        """Take no more tasks."""
        self._closing.set()
        self._has_room.set()

    @property
    def running(self) -> int:
        """How many tasks run."""
        return len(self._held) - len(self._ended)

    async def drained(self) -> None:
        """Return when no task runs, and all ends are written."""
        while self._held:
            await self._clock.sleep(0.01)

    async def close(self, grace_s: float = 5.0) -> None:
        """Cancel running tasks, return them to the queue, write the ended ones, and stop."""
        self.pause()
        try:
            async with asyncio.timeout(grace_s):
                if self._claiming is not None:
                    await asyncio.wait([self._claiming])  # tasks that were claimed just now are also returned
                self._runs.cancel()
                await self.drained()
        except TimeoutError:
            logger.warning(
                "Queue %r: %d tasks did not end in time; they run again when their leases expire",
                self._name,
                len(self._held),
            )
        await self._loops.close(grace_s)

    async def _supervised(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        pause_s, failures = self._options.poll_interval_s, 0
        while True:
            began = self._clock.now()
            try:
                await loop()
                return
            except Exception as error:
                if self._clock.now() - began > 2 * MAX_PAUSE_S:
                    pause_s, failures = self._options.poll_interval_s, 0
                failures += 1
                if not isinstance(error, TaskQueueError):
                    logger.exception("Queue %r: the consumer failed, and goes on", self._name)
                # A single failure may be the end of the instance, which also stops this consumer.
                elif failures == 2:
                    logger.warning("%s", error)
            await _elapsed(self._clock, self._closing, pause_s)
            if self._closing.is_set():
                await self._clock.sleep(self._options.poll_interval_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    # ---- taking

    async def _claim(self) -> None:
        interval_s, is_woken = self._options.poll_interval_s, False
        while not self._closing.is_set():
            room = self._room() - len(self._held)
            if room > 0:
                now, lease_s = self._clock.wall(), self._options.lease_s
                tasks = await self._call(self._queue.claim, self._name, self._owner, room, now, lease_s)
                for task in tasks:
                    self._begin(task)
                if not tasks and is_woken:  # another consumer was faster, or clocks differ
                    await _elapsed(self._clock, self._closing, interval_s)
                elif not tasks:
                    await _tasks_come(self._queue, self._name, interval_s, self._clock, self._closing)
                elif len(tasks) < room:  # there were no more
                    await _elapsed(self._clock, self._closing, min(interval_s, GATHER_S))
                is_woken = not tasks and not is_woken
                continue
            self._has_room.clear()
            # Not longer, because the number of slots of the replica may have increased.
            await _elapsed(self._clock, self._has_room, interval_s)

    def _begin(self, task: Task) -> None:
        key = task.id, task.revision
        if not self._held:
            self._renewed_at = self._clock.now()
        held = self._held[key] = LeasedTask(task)
        if self._closing.is_set():
            self._end(key, states.released(task, self._clock.wall(), self._rules))
            return
        held.run = self._runs.spawn(self._carry(key, task), f"task-{task.id}")

    async def _carry(self, key: Key, task: Task) -> None:
        rules, now = self._rules, self._clock.wall
        try:
            if task.name not in self._handlers:
                names = ", ".join(sorted(self._handlers))
                text = f"No handler has the name {task.name!r}; there are: {names}."
                after = states.unprocessable(task, text, now(), rules)
            else:
                result = await self._run(task)
                after = states.done(task, result, now(), rules)
        except Failure as error:
            chance = self._rng.random()
            after = states.failed(task, str(error), now(), chance, rules, is_final=error.is_final)
        except Lost:
            after = states.lost(task, now(), rules)
        except Released:
            after = states.released(task, now(), rules)
        except asyncio.CancelledError:
            # Not raised again, because nothing awaits this asyncio task.
            after = states.released(self._held[key].task, now(), rules)
        except Exception as error:  # raised by the replica, or by a result that cannot be kept
            logger.exception("Queue %r: the end of task %r could not be determined", self._name, task.id)
            after = _without_end(task, error, now(), rules)
        if self._held[key].is_dropped:
            self._forget(key)
            _log_discarded(task)
        else:
            self._end(key, after)

    def _end(self, key: Key, after: Task) -> None:
        self._ended[key] = after
        self._has_ended.set()

    def _letter(self, task: Task) -> Task | None:
        """Return the dead letter of a task that has failed permanently, if the queue has dead letters."""
        config = self._config
        names = {
            TaskState.FAILED: ("failed", config.failed_task_queue_name),
            TaskState.DEAD: ("unprocessable", config.unprocessable_task_queue_name),
        }
        kind, queue = names.get(task.state, ("", None))
        if queue is None:
            return None
        payload = dead_letter(kind, task.id, task.name, task.payload, task.error)
        now = task.ended_at
        # A retried task may fail permanently a second time, and other queues may have a task with this
        # id.
        id = f"{task.id}#{self._rng.getrandbits(64):016x}"
        return Task(id, queue, task.name, payload, now, now)

    # ---- writing

    async def _write(self) -> None:
        while True:
            if not self._ended:
                self._has_ended.clear()
                await self._has_ended.wait()
            batch = list(islice(self._ended.items(), BATCH))
            try:
                await self._write_batch(batch)
            except TaskQueueError:
                raise
            except Exception:
                # One of them can never be written, so write them individually.
                for each in batch:
                    await self._write_alone(*each)

    async def _write_batch(self, batch: Sequence[tuple[Key, Task]]) -> None:
        changes = [Change(task, self._letter(task)) for _, task in batch]
        written = await self._call(self._queue.write, changes)
        changed = []
        for (key, task), is_written in zip(batch, written, strict=True):
            if is_written:
                self._forget(key)
                self.totals[task.state] = self.totals.get(task.state, 0) + 1
            else:
                changed.append((key, task))
        for key, task in changed:
            await self._end_changed(key, task)

    async def _write_alone(self, key: Key, after: Task) -> None:
        held = self._held.get(key)
        if held is None or key not in self._ended:
            return  # the task was written before the error
        try:
            await self._write_batch([(key, self._ended[key])])
        except TaskQueueError:
            raise
        except Exception as error:
            logger.exception("Queue %r: the end of task %r cannot be written", self._name, after.id)
            if held.is_replaced:
                self._forget(key)  # the task waits until its lease ends
            else:
                held.is_replaced = True
                self._ended[key] = _without_end(held.task, error, self._clock.wall(), self._rules)

    def _forget(self, key: Key) -> None:
        """Drop a task whose end is written, or which another consumer has taken over; there is room for
        another one."""
        self._ended.pop(key, None)
        self._held.pop(key, None)
        self._has_room.set()

    async def _end_changed(self, key: Key, after: Task) -> None:
        """End a task that has changed in the queue: as cancelled if it was cancelled; otherwise drop it."""
        (kept,) = await self._call(self._queue.get, self._name, [after.id])
        if kept is None or not self._is_held(key, kept) or kept.state is not TaskState.RUNNING:
            _log_discarded(after)
            self._forget(key)
            return
        # The task was cancelled, so this ends it, without the result.
        self._ended[key] = states.released(kept, self._clock.wall(), self._rules)

    def _is_held(self, key: Key, kept: Task) -> bool:
        """Return whether the queue's copy of a task belongs to the same run as this consumer's copy."""
        # A task that was returned and claimed here again has changed twice, whereas a cancellation is one
        # change.
        return key in self._held and kept.owner == self._owner and kept.revision <= key[1] + 1

    # ---- leases

    async def _renew(self) -> None:
        interval_s = self._options.lease_s / 3
        while True:
            now = self._clock.now()
            if self._held and now - self._renewed_at >= interval_s:
                until = self._clock.wall() + self._options.lease_s
                await self._call(
                    self._queue.renew, self._name, self._owner, [id for id, _ in self._held], until
                )
                self._renewed_at = now
            await self._clock.sleep(min(CANCEL_POLL_S, interval_s))
            if not self._held:
                continue
            before = list(self._held)
            held = await self._call(self._queue.held, self._name, self._owner)
            leases = {(each.id, each.attempts): each for each in held}
            for key in before:
                found = self._held.get(key)
                if found is None or found.run is None or found.run.done():
                    continue  # the task has ended in the meantime
                lease = leases.get((key[0], found.task.attempts))
                if lease is None:
                    found.is_dropped = True
                    found.run.cancel()
                elif lease.is_cancelled and not found.task.is_cancelled:
                    await self._cancel(key)

    async def _cancel(self, key: Key) -> None:
        (kept,) = await self._call(self._queue.get, self._name, [key[0]])
        held = self._held.get(key)
        if kept is not None and held is not None and held.run is not None and self._is_held(key, kept):
            held.task = kept
            held.run.cancel()

    # ---- upkeep

    async def _keep_up(self) -> None:
        while True:
            now = self._clock.wall()
            lost = await self._call(self._queue.expired, self._name, now, BATCH)
            if lost:
                after = [states.lost(task, now, self._rules) for task in lost]
                changes = [Change(task, self._letter(task)) for task in after]
                written = await self._call(self._queue.write, changes)
                if any(written):  # otherwise another consumer was faster
                    returned = counted(sum(written), "task")
                    logger.warning("Queue %r: %s had lost the consumer", self._name, returned)
                if len(lost) >= BATCH and any(written):
                    continue
            while await self._call(self._queue.purge, self._name, now, BATCH) >= BATCH:
                pass  # more tasks ended in a second than one step removes
            self.stats = await self._call(self._queue.stats, self._name, now)
            await self._clock.sleep(UPKEEP_S)

    async def _follow(self, name: str, schedule: Any) -> None:
        """Create the tasks of a schedule; their ids contain their times, so each is created only once."""
        at = last_time(schedule, self._clock.wall() - schedule.catch_up_s, self._clock.wall())
        while True:
            now = self._clock.wall()
            following = next_time(schedule, at)
            if following <= now:  # this consumer was suspended in the meantime
                at = last_time(schedule, at, now)
                continue
            if at > now:
                await self._clock.sleep(min(at - now, 60.0))
                continue
            task = due_task(self._name, name, schedule, at, self._options)
            try:
                await self._call(self._queue.add, [task], self._options.max_queue_length, now)
            except TaskConflictError:
                logger.info("Queue %r: another version of schedule %r has created its task", self._name, name)
            at = following


async def _tasks_come(
    queue: TaskQueue, name: str, interval_s: float, clock: Clock, closing: asyncio.Event
) -> None:
    """Wait until there may be tasks, or the consumer stops."""
    if not isinstance(queue, WaitingQueue):
        await _elapsed(clock, closing, interval_s)
        return
    waits = [asyncio.ensure_future(each) for each in (queue.wait(name, interval_s), closing.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if waits[0].done():
            waits[0].result()
    finally:
        for each in waits:
            each.cancel()


async def _elapsed(clock: Clock, event: asyncio.Event, time_s: float) -> None:
    """Wait for some time, or until an event is set."""
    try:
        await clock.wait_for(event.wait(), time_s)
    except TimeoutError:
        pass


def _without_end(task: Task, error: Exception, now: float, rules: RetryRules) -> Task:
    """Return a task whose end cannot be kept, without any values from user code."""
    text = f"The end of the task cannot be kept: {type(error).__name__}."
    return states.unprocessable(replace(task, result_ttl_s=None), text, now, rules)


def _log_discarded(task: Task) -> None:
    logger.warning("Queue %r: the end of task %r is discarded: it has another consumer", task.queue, task.id)
