"""The Dask task that makes a call, as the layers above see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class PresentTask(Protocol):
    """The Dask task that the present code belongs to, in a thread of its worker or on its event loop."""

    #: Its key, as text.
    key: str
    #: Whether Dask released the task while it ran: its result is not needed any more.
    is_released: bool

    def leave(self, limit: int | None = None) -> bool:
        """Give its place in the worker to another task while it waits; return whether it did.

        With a ``limit``, no more tasks than that leave, unless more urgent ones wait for a thread. Without
        one it always leaves.
        """

    def come_back(self) -> None:
        """Take a place again; blocks until there is one. Call this in the thread that has left."""

    def on_release(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call back, on any thread, if Dask releases the task; return a function that ends this."""

    def reschedule(self) -> Exception:
        """Return the error with which a released task ends: if it is wanted after all, it runs again."""
