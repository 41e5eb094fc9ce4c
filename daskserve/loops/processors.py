"""Keeps a thread on the processor of the thread that waits for it.

Two threads that take turns, each waiting for the other, gain nothing from a second processor. The system must
wake the other processor for each turn, and the interpreter lock changes hands twice. So a turn of 7 µs takes
20 to 50 µs. The operating system puts both threads on one processor in about half of all cases, and leaves
them where they are for seconds.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable


def _find_present() -> Callable[[], int] | None:
    """Return a function that returns the calling thread's processor; None where threads cannot be moved."""
    if sys.platform != "linux":
        return None
    # `PyDLL` keeps the interpreter lock during the call, which takes less time than releasing the lock.
    found: Callable[[], int] | None = getattr(ctypes.PyDLL(None), "sched_getcpu", None)
    return found


class Follower:
    """A thread that can follow another one to its processor.

    Parameters
    ----------
    native_id : int
        The number of the thread in the operating system.
    """

    def __init__(self, native_id: int) -> None:
        self._native_id = native_id
        self._present = _find_present()
        #: The processor to which the thread is pinned; -1 while it may run anywhere.
        self._processor = -1

    def follow(self) -> None:
        """Pin the thread to the processor of the calling thread, if possible."""
        if self._present is not None and (processor := self._present()) != self._processor:
            self._move({processor})
            self._processor = processor

    def release(self) -> None:
        """Let the thread run on all processors that the calling thread may use."""
        if self._processor >= 0:
            self._processor = -1
            self._move(os.sched_getaffinity(0))

    def _move(self, processors: set[int]) -> None:
        try:
            os.sched_setaffinity(self._native_id, processors)
        except OSError:  # the thread has ended, or a sandbox forbids it
            self._present = None
