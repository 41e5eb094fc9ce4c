"""The Dask task that makes a call, in a thread of its worker or on the worker's event loop.

Problem: a task that waits for an answer holds one of the worker's threads, or one of the event loop's slots
for tasks. If the called code submits Dask tasks itself, this is a deadlock once all slots are taken. Choice:
a task that waits secedes, as Dask calls it. Of the tasks with large inputs, only as many secede as needed to
keep the replicas busy, because each task that secedes lets another task load its input. One more task secedes
when a more urgent task waits for a thread, or when no task has returned for a long time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

from daskserve.common.clock import stopwatch
from daskserve.internals.checking import needs
from daskserve.loops.event_loop import running_loop

with needs("distributed", ">=2025.1,<2026.9") as check:
    from distributed import Reschedule, Worker, WorkerPlugin, get_worker, rejoin, secede
    from distributed.threadpoolexecutor import thread_state as pool_state
    from distributed.worker import thread_state
    from distributed.worker_state_machine import SecedeEvent, TaskState, WorkerState

    check.fields(WorkerState, "executing", "ready", "tasks")
    check.fields(TaskState, "key", "priority", "state")

_NAME = "daskserve-calls"
#: A task may secede although the limit is reached if no task of this worker has come back for a long time:
#: this multiple of the longest wait so far, and at least this many seconds.
STALL_FACTOR = 4
STALL_S = 5.0
#: If a task of another program waits for a thread, this time suffices, or one longest wait if that is longer.
FOREIGN_STALL_S = 0.2


class TaskWatch(WorkerPlugin):
    """Notifies the calls of a worker's tasks when Dask releases their task.

    It is one of the worker's plugins for as long as tasks there make calls. Dask iterates over them on its
    event loop, so only that loop adds and removes it.
    """

    name = _NAME

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        #: The tasks that make calls; None once there are none left, and a new watch is needed.
        self._tasks: set[Hashable] | None = set()
        self.callbacks: dict[Hashable, list[Callable[[], object]]] = {}
        #: The tasks that have seceded, and since when each of them has waited.
        self.away: dict[Hashable, float] = {}
        #: When a task last returned or ended.
        self.last_back = stopwatch()
        self.longest_s = 0.0
        #: How many tasks may secede beyond the limit, because other tasks waited for threads.
        self.extra = 0

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Forget a task that has ended; call its callback if it was released while it ran."""
        if finish in ("executing", "long-running"):
            return
        callbacks = self.callbacks.pop(key, ())
        if finish == "released" and start in ("executing", "long-running"):
            for callback in callbacks:
                callback()
        if self.away:
            self.note_back(key)
        self._forget(key)

    def watches(self, key: Hashable) -> bool:
        """Watch a task; return False if this watch has ended."""
        with self._lock:
            if self._tasks is None:
                return False
            if not self._tasks:
                self._worker.loop.add_callback(self._enter)
            self._tasks.add(key)
            return True

    def _forget(self, key: Hashable) -> None:
        with self._lock:
            if not self._tasks:
                return
            self._tasks.discard(key)
            if not self._tasks:
                self._tasks = None
                vars(self._worker).pop(_NAME, None)
                self._worker.loop.add_callback(self._leave)

    def _enter(self) -> None:
        self._worker.plugins[_NAME] = self

    def _leave(self) -> None:
        if self._worker.plugins.get(_NAME) is self:
            del self._worker.plugins[_NAME]

    def note_back(self, key: Hashable) -> None:
        """Record that a task no longer waits."""
        since = self.away.pop(key, None)
        if since is not None:
            self.last_back = now = stopwatch()
            self.longest_s = max(self.longest_s, now - since)
            if not self.away:
                self.extra = 0


class DaskTask:
    """A `daskserve.cluster.protocols.tasks.CurrentTask`."""

    def __init__(self, worker: Any, key: Any, *, is_in_thread: bool) -> None:
        self.key = str(key)
        self.is_released = False
        self._worker = worker
        self._key = key
        self._is_in_thread = is_in_thread
        self._watch = _watch_of(worker, key)
        self._since = stopwatch()
        self._has_left = False
        self._thread = threading.get_ident()

    def secede(self, limit: int | None = None) -> bool:
        """Secede so that another task can run; see `CurrentTask.secede`."""
        if limit is not None and not self._may_leave(limit):
            return False
        self._watch.away[self._key] = self._since
        if not self._is_in_thread:
            self._secede_on_loop()
        elif getattr(pool_state, "proceed", False):  # otherwise user code has already seceded
            self._has_left = True
            secede()
        return True

    def _may_leave(self, limit: int) -> bool:
        watch = self._watch
        if len(watch.away) < limit + watch.extra:
            return True
        state = self._worker.state
        own = state.tasks.get(self._key)
        with suppress(KeyError, IndexError, TypeError):  # the worker's thread may change it at the same time
            if own is not None and state.ready.peek().priority < own.priority:
                return True
        is_blocking = own is not None and self._is_blocking(own)
        if is_blocking:
            stall_s = max(FOREIGN_STALL_S * (watch.extra + 1), watch.longest_s)
        else:
            stall_s = max(STALL_S, STALL_FACTOR * watch.longest_s)
        if stopwatch() - max(watch.last_back, self._since) < stall_s:
            return False
        watch.last_back = stopwatch()  # resets the stall time, so that tasks secede one at a time
        if is_blocking:  # similar tasks replace the ones that secede, so several must secede
            watch.extra = 2 * watch.extra + 1
        return True

    def _is_blocking(self, own: TaskState) -> bool:
        """Return whether a task of another program waits for a thread, perhaps a task of the called code."""
        with suppress(RuntimeError, TypeError):  # the worker's thread may change it at the same time
            submission = own.priority[:2]  # type: ignore[index]
            return any(each.priority[:2] != submission for each in self._worker.state.ready)
        return False

    def _secede_on_loop(self) -> None:
        self._worker.handle_stimulus(
            SecedeEvent(
                key=self._key,
                compute_duration=stopwatch() - self._since,
                stimulus_id=f"daskserve-secede-{self.key}",
            )
        )

    def rejoin(self) -> None:
        """Take a slot again; see `CurrentTask.rejoin`."""
        self._watch.note_back(self._key)
        self._since = stopwatch()
        if self._has_left and threading.get_ident() == self._thread:
            self._has_left = False
            with suppress(RuntimeError):  # the worker closes its threads
                rejoin()

    def on_release(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call a function if Dask releases the task; see `CurrentTask.on_release`."""

        def released() -> None:
            self.is_released = True
            callback()

        found = self._watch.callbacks.setdefault(self._key, [])
        found.append(released)

        def stop() -> None:
            with suppress(ValueError):
                found.remove(released)
            if not found:
                self._watch.callbacks.pop(self._key, None)

        return stop

    def reschedule(self) -> Exception:
        """Return the error that makes Dask run a task again if its result is still needed."""
        return Reschedule()


def current_task() -> DaskTask | None:
    """Return the Dask task that this code belongs to; None elsewhere."""
    loop = running_loop()
    if loop is None:
        state = getattr(thread_state, "execution_state", None)
        if state is None or getattr(thread_state, "actor", False):
            return None
        return DaskTask(state["worker"], thread_state.key, is_in_thread=True)
    running = asyncio.current_task(loop)
    name = "" if running is None else running.get_name()
    if not name.startswith("execute("):
        return None
    try:
        worker: Any = get_worker()
    except ValueError:
        return None
    if not issubclass(type(worker), Worker):  # a replica's code, even if it sets task names
        return None
    found = next((each for each in worker.state.executing if f"execute({each.key!r})" == name), None)
    return None if found is None else DaskTask(worker, found.key, is_in_thread=False)


def _watch_of(worker: Any, key: Hashable) -> TaskWatch:
    while True:
        watch: TaskWatch = vars(worker).get(_NAME) or vars(worker).setdefault(_NAME, TaskWatch(worker))
        if watch.watches(key):
            return watch
