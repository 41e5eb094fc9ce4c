"""Takes tasks from a queue, runs them, and writes how they ended.

A consumer runs in one event loop; the queue blocks, so it works in a thread. Its loops are independent of
each other, and each survives that the queue cannot be reached:

- one takes as many tasks as there is room for;
- one writes how tasks ended, all that have ended meanwhile in one step;
- one renews leases, and finds tasks that were cancelled, or taken for lost;
- one finds tasks of consumers that were lost, and forgets those that ended long ago;
- one makes the tasks of schedules.

A task counts as ended once that is written. If a consumer is killed before, the task runs again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any, TypeAlias, TypeVar

from daskserve.common.clock import Clock
from daskserve.data.tasks import states
from daskserve.data.tasks.config import DurableOptions, TaskProcessorConfig
from daskserve.data.tasks.errors import TaskConflictError, TaskQueueError
from daskserve.data.tasks.payloads import dead_letter
from daskserve.data.tasks.queue import Change, QueueStats, TaskQueue
from daskserve.data.tasks.schedules import due_task, next_time
from daskserve.data.tasks.states import RetryRules, Task, TaskState
from daskserve.loops.tasks import TaskSet

logger = logging.getLogger("daskserve.tasks")

T = TypeVar("T")

#: How often a consumer looks whether its tasks were cancelled.
CANCEL_POLL_S = 0.5
#: How often a consumer looks for lost tasks and counts the tasks of the queue.
UPKEEP_S = 1.0
#: How many tasks are found lost, or forgotten, in one step.
BATCH = 500
#: The longest wait before a queue that cannot be reached is tried again.
MAX_PAUSE_S = 5.0


#: The id of a task, and the number of the attempt.
Key: TypeAlias = tuple[str, int]


class Released(Exception):
    """A task was not begun, or its replica stops: another consumer should have it."""


class Lost(Exception):
    """What ran a task was killed."""


class Failure(Exception):
    """A task failed; its text is that of `daskserve.data.tasks.payloads.error_text`."""

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
        #: The tasks that run, or whose end is not yet written, and what runs them.
        self._held: dict[Key, tuple[Task, asyncio.Task[None]]] = {}
        #: Those that have another consumer: their end is not written.
        self._dropped: set[Key] = set()
        self._ended: list[tuple[Key, Task]] = []
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
        loops = (self._write, self._renew, self._keep_up)
        for loop in loops:
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
            runs = [each for _, each in self._held.values() if not each.done()]
            if runs:
                await asyncio.wait(runs)
            else:
                await self._clock.sleep(0.01)

    async def close(self, grace_s: float = 5.0) -> None:
        """Cancel what runs, give it back to the queue, write what has ended, and stop."""
        self.pause()
        try:
            async with asyncio.timeout(grace_s):
                if self._claiming is not None:
                    await asyncio.wait([self._claiming])  # what it has claimed just now is given back, too
                self._runs.cancel()
                await self.drained()
        except TimeoutError:
            logger.warning("Queue %r: %d tasks are left to their leases", self._name, len(self._held))
        await self._loops.close(grace_s)

    async def _supervised(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        pause_s, has_failed = self._options.poll_interval_s, False
        while True:
            began = self._clock.now()
            try:
                await loop()
                return
            except TaskQueueError as error:
                if not has_failed:
                    logger.warning("%s", error)
            except Exception:
                logger.exception("Queue %r: the consumer failed, and goes on", self._name)
            if self._clock.now() - began > 2 * MAX_PAUSE_S:
                pause_s = self._options.poll_interval_s
            has_failed = pause_s >= MAX_PAUSE_S
            await self._elapsed(self._closing, pause_s)
            if self._closing.is_set():
                await self._clock.sleep(self._options.poll_interval_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    # ---- taking

    async def _claim(self) -> None:
        interval_s = self._options.poll_interval_s
        while not self._closing.is_set():
            room = self._room() - len(self._held)
            if room > 0:
                now, lease_s = self._clock.wall(), self._options.lease_s
                tasks = await self._call(self._queue.claim, self._name, self._owner, room, now, lease_s)
                for task in tasks:
                    self._begin(task)
                if not tasks:
                    await self._elapsed(self._closing, interval_s)
                continue
            self._has_room.clear()
            # Not longer: the replica may have been given more room.
            await self._elapsed(self._has_room, interval_s)

    async def _elapsed(self, event: asyncio.Event, time_s: float) -> None:
        """Return after some time, or once an event is set."""
        try:
            await self._clock.wait_for(event.wait(), time_s)
        except TimeoutError:
            pass

    def _begin(self, task: Task) -> None:
        key = task.id, task.attempts
        self._held[key] = task, self._runs.spawn(self._carry(key, task), f"task-{task.id}")

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
            # Nothing waits for this run, so it may end in its own way.
            after = states.released(self._held[key][0], now(), rules)
        if key in self._dropped:
            self._dropped.discard(key)
            del self._held[key]
            self._has_room.set()
            self._discard(task.id)
            return
        self._ended.append((key, after))
        self._has_ended.set()

    def _discard(self, id: str) -> None:
        logger.warning("Queue %r: the end of task %r is discarded: it has another consumer", self._name, id)

    def _letter(self, task: Task) -> Task | None:
        """Return the dead letter of a task that has failed for good, if it is to have one."""
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
        # A task that is retried may fail for good again, and other queues may have a task with this id.
        id = f"{task.id}#{self._rng.getrandbits(64):016x}"
        return Task(id, queue, task.name, payload, now, now)

    # ---- writing

    async def _write(self) -> None:
        while True:
            if not self._ended:
                self._has_ended.clear()
                await self._has_ended.wait()
            batch = self._ended[:BATCH]
            changes = [Change(task, self._letter(task)) for _, task in batch]
            written = await self._call(self._queue.write, changes)
            # Only now, so that nothing is lost if the queue could not be reached.
            del self._ended[: len(batch)]
            for (key, task), is_written in zip(batch, written, strict=True):
                if not is_written and await self._end_changed(key, task):
                    continue
                del self._held[key]
                if is_written:
                    self.totals[task.state] = self.totals.get(task.state, 0) + 1
            self._has_room.set()

    async def _end_changed(self, key: Key, after: Task) -> bool:
        """End a task that has changed meanwhile, if it was only cancelled; return whether that is to do."""
        (kept,) = await self._call(self._queue.get, self._name, [after.id])
        has_it = kept is not None and kept.owner == self._owner and kept.attempts == key[1]
        if not has_it or kept.state is not TaskState.RUNNING:
            self._discard(after.id)
            return False
        now = self._clock.wall()
        if after.state is TaskState.DONE:
            again = states.done(kept, after.result or b"", now, self._rules)
        else:
            again = states.released(kept, now, self._rules)
        self._ended.append((key, again))
        return True

    # ---- leases

    async def _renew(self) -> None:
        renewed_at = self._clock.now()
        interval_s = self._options.lease_s / 3
        while True:
            await self._clock.sleep(min(CANCEL_POLL_S, interval_s))
            if not self._held:
                renewed_at = self._clock.now()
                continue
            if self._clock.now() - renewed_at >= interval_s:
                until = self._clock.wall() + self._options.lease_s
                await self._call(
                    self._queue.renew, self._name, self._owner, [id for id, _ in self._held], until
                )
                renewed_at = self._clock.now()
            before = list(self._held)
            held = await self._call(self._queue.held, self._name, self._owner)
            leases = {(each.id, each.attempts): each for each in held}
            for key in before:
                task, run = self._held.get(key, (None, None))
                if task is None or run is None or run.done():
                    continue  # it has ended meanwhile
                if key not in leases:
                    self._dropped.add(key)
                    run.cancel()
                elif leases[key].is_cancelled and not task.is_cancelled:
                    await self._cancel(key)

    async def _cancel(self, key: Key) -> None:
        (kept,) = await self._call(self._queue.get, self._name, [key[0]])
        _, run = self._held.get(key, (None, None))
        if kept is not None and run is not None and kept.owner == self._owner and kept.attempts == key[1]:
            self._held[key] = kept, run
            run.cancel()

    # ---- upkeep

    async def _keep_up(self) -> None:
        while True:
            now = self._clock.wall()
            lost = await self._call(self._queue.expired, self._name, now, BATCH)
            if lost:
                after = [states.lost(task, now, self._rules) for task in lost]
                changes = [Change(task, self._letter(task)) for task in after]
                written = await self._call(self._queue.write, changes)
                logger.warning("Queue %r: %d tasks had lost their consumer", self._name, sum(written))
                if len(lost) >= BATCH and any(written):
                    continue
            while await self._call(self._queue.purge, self._name, now, BATCH) >= BATCH:
                pass  # more ends in a second than one step forgets
            self.stats = await self._call(self._queue.stats, self._name, now)
            await self._clock.sleep(UPKEEP_S)

    async def _follow(self, name: str, schedule: Any) -> None:
        """Make the tasks of a schedule, each of which has an id of its own, so that it is made once."""
        at = next_time(schedule, self._clock.wall() - schedule.catch_up_s)
        while True:
            now = self._clock.wall()
            following = next_time(schedule, at)
            if following <= now:  # only the last one is caught up
                at = following
                continue
            if at > now:
                await self._clock.sleep(min(at - now, 60.0))
                continue
            task = due_task(self._name, name, schedule, at, self._options)
            try:
                await self._call(self._queue.add, [task], self._options.max_queue_length, now)
            except TaskConflictError:
                logger.info("Queue %r: another version of schedule %r has made its task", self._name, name)
            at = following
