"""Waiting for an answer in a thread that may block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from daskserve.cluster.protocols.base import ClusterConnection, CurrentTask
from daskserve.errors import RequestCancelledError
from daskserve.internals.ipython import in_cell
from daskserve.loops.event_loop import running_loop

#: Blocks this thread for at most the given seconds (None: no limit); returns False at the timeout.
Wait: TypeAlias = Callable[[float | None], bool]

#: How long a Dask task waits before it frees its thread for others. Freeing costs more than a short call.
BRIEF_S = 0.005
#: Interval at which a task that may not free its thread yet tries to do so again.
ASK_S = 0.05


def refuse_in_loop(connection: ClusterConnection, name: str, remedy: str) -> None:
    """Raise `RuntimeError` in an event loop, because a blocking call would stop it.

    Notebooks run each cell in an event loop that has nothing else to do, so they may block it.
    """
    if connection.runs_here():
        raise RuntimeError(f"{name} would block the event loop that has to produce the answer; {remedy}.")
    if running_loop() is not None and not in_cell():
        raise RuntimeError(
            f"{name} would block the running event loop; {remedy}, or call it in a thread "
            "(asyncio.to_thread)."
        )


def wait_in_thread(
    connection: ClusterConnection, wait: Wait, timeout_s: float | None, cancel: Callable[[], object]
) -> bool:
    """Wait in a thread; a Dask task frees its thread for other tasks while it waits.

    ``cancel`` is called if Dask releases the task.
    """
    task = connection.current_task()
    if task is None:
        return wait(timeout_s)
    brief_s = BRIEF_S if timeout_s is None else min(timeout_s, BRIEF_S)
    if wait(brief_s):
        return True
    stop = task.on_release(cancel)
    task.secede()
    try:
        return wait(None if timeout_s is None else timeout_s - brief_s)
    finally:
        stop()
        task.rejoin()


class TaskSlot:
    """The slot of a Dask task in its worker's thread pool, for a task that reads results one after another.

    Parameters
    ----------
    limit : int, optional
        Maximum number of tasks of a worker that free their slot; see `CurrentTask.secede`.
    """

    def __init__(self, task: CurrentTask, limit: Callable[[], int | None]) -> None:
        self._task = task
        self._limit = limit
        self._has_left = False
        self._stop: Callable[[], None] | None = None

    def on_release(self, cancel: Callable[[], object]) -> None:
        """Call ``cancel`` if Dask releases the task before `end`."""
        self._stop = self._task.on_release(cancel)

    def check(self) -> None:
        """Raise `RequestCancelledError` if Dask has released the task."""
        if self._task.is_released:
            raise RequestCancelledError(
                f"Dask has released the task {self._task.key}, which makes this call."
            )

    def wait(self, wait: Wait, timeout_s: float | None) -> None:
        """Wait in the thread of the task; the first long wait frees its slot until `end`."""
        if self._has_left:
            wait(timeout_s)
        elif not wait(BRIEF_S if timeout_s is None else min(timeout_s, BRIEF_S)):
            self._has_left = self._task.secede(self._limit())
            longest_s = None if self._has_left else ASK_S
            wait(longest_s if timeout_s is None else min(timeout_s, longest_s or timeout_s))

    def end(self) -> None:
        """Take a slot again."""
        if self._stop is not None:
            self._stop()
            self._stop = None
        if self._has_left:
            self._has_left = False
            self._task.rejoin()
