"""The threads of a process, as the operating system counts them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType


def stack_frames() -> Mapping[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's ident in Python."""
    return sys._current_frames()


def processor_times(thread: int | None) -> tuple[float, float] | None:
    """Return the seconds that a thread of this process has run on a processor, and has waited for one.

    Parameters
    ----------
    thread : int or None
        The thread's native id.

    Returns
    -------
    tuple of float or None
        None where the system does not count this, or the thread does not run.
    """
    try:
        # A file of Linux, in nanoseconds.
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
            ran, waited = file.read().split()[:2]
        return int(ran) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):
        return None
