"""Returns the memory of large bodies to the operating system.

The allocator of glibc keeps freed memory for later allocations: after eight bodies of 10 MB, a process stayed
60 to 100 MB larger. `malloc_trim` returns this memory, which can take milliseconds. So a thread calls it
after some seconds without a large body.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

from daskserve.loops.threads import StartThread, start_daemon

#: Smaller bodies leave little memory behind.
LARGE_BYTES = 1 << 20
#: Number of ticks without a large body before the memory is returned; a tick is about a second.
QUIET_TICKS = 3


def malloc_trim() -> None:
    """Return free memory to the operating system, if the C library supports this."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class MemoryTrimmer:
    """Decides when to return the memory of large bodies.

    Parameters
    ----------
    trim : callable
        Returns the memory.
    """

    def __init__(
        self, trim: Callable[[], None] = malloc_trim, start_thread: StartThread = start_daemon
    ) -> None:
        self._trim = trim
        self._start_thread = start_thread
        self._ticks_left = 0

    def note(self, size_bytes: int) -> None:
        """Record the size of a body that was received or sent."""
        if size_bytes >= LARGE_BYTES:
            self._ticks_left = QUIET_TICKS

    def tick(self) -> None:
        """Return the memory if it is due. Call this about once a second."""
        if self._ticks_left:
            self._ticks_left -= 1
            if not self._ticks_left:
                self._start_thread("daskserve-trim-memory", self._trim)
