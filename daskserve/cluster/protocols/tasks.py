"""The Dask task that makes a call, and the host of task queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class CurrentTask(Protocol):
    """The Dask task that the current code belongs to, in a thread of its worker or on its event loop."""

    #: The task's key, as a string.
    key: str
    #: Whether Dask released the task while it ran: its result is no longer needed.
    is_released: bool

    def secede(self, limit: int | None = None) -> bool:
        """Secede so that another task can run while this one waits; return whether it seceded.

        With a ``limit``, at most that many tasks secede, unless more urgent tasks wait for a thread. Without
        a limit, the task always secedes.
        """

    def rejoin(self) -> None:
        """Take a slot again; blocks until one is free. Call this in the thread that seceded."""

    def on_release(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call a function, on any thread, if Dask releases the task; return a function that unregisters
        it."""

    def reschedule(self) -> Exception:
        """Return the error that ends a released task; if its result is needed again, the task reruns."""


class TaskQueueHost(Protocol):
    """Queues of tasks in a file; any thread may call the methods, one at a time."""

    def answer(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of the queues with plain values."""

    def close(self) -> None:
        """Close the file."""
