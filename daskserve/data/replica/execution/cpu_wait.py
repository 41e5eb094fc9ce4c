"""How long a thread was ready to run without a processor, as the system counts it."""

from __future__ import annotations


def starved_s(thread: int | None) -> float:
    """Return the total time that a thread of this process waited for a processor, in seconds.

    Parameters
    ----------
    thread : int or None
        The thread's native id.

    Returns
    -------
    float
        0 where the system does not count this, or the thread does not run.
    """
    try:
        # Of Linux: the time on a processor and the time in its queue, in nanoseconds.
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
