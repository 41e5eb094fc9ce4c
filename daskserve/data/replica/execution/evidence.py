"""Decides from stack samples whether user code blocks the event loop.

A loop may be late because user code blocks it, because the machine is busy, or because another thread holds
the interpreter lock. Only a call of user code that stays on the loop's stack in consecutive samples counts as
the cause. Each sample counts for at most one interval, and for less if the thread waited for a processor. So
late samples, and calls that wait for a processor, count little.
"""

from __future__ import annotations

from types import FrameType

from daskserve.telemetry.profiling.frames import is_users, user_call
from daskserve.telemetry.profiling.threads import processor_times

#: The sampling interval of a loop that runs user code, and the minimum delay that counts as blocked.
WATCH_INTERVAL_S = 0.03
BLOCKED_AFTER_S = 0.1
#: The share of a delay during which samples must show the same call.
SEEN_PART = 0.5
#: Maximum number of frames of a stack in a message.
SHOWN_FRAMES = 5


class Evidence:
    """The samples of one loop since it last answered."""

    def __init__(self) -> None:
        self._call: FrameType | None = None
        self._seen_s = 0.0
        self._starved_s: float | None = None
        #: The position in the code of the call at the last sample.
        self.place = ""

    def add(self, frame: FrameType | None, elapsed_s: float, starved_s: float = 0.0) -> None:
        """Add a sample of the loop's stack, taken ``elapsed_s`` after the one before.

        ``starved_s`` is the total time that the thread has waited for a processor.
        """
        waited_s = 0.0 if self._starved_s is None else starved_s - self._starved_s
        self._starved_s = starved_s
        call = user_call(frame)
        if call is not self._call:
            self._seen_s = 0.0
        self._call = call
        if call is not None:
            self._seen_s += max(0.0, min(elapsed_s, WATCH_INTERVAL_S) - waited_s)
            self.place = describe(frame, call)

    def explains(self, delay_s: float) -> bool:
        """Return whether one call of user code has blocked the loop for most of a delay."""
        return delay_s >= BLOCKED_AFTER_S and self._seen_s >= SEEN_PART * delay_s


def describe(frame: FrameType | None, call: FrameType) -> str:
    """Return the frames of a stack that belong to a call of user code, innermost first."""
    innermost = frame
    places: list[str] = []
    while frame is not None and len(places) < SHOWN_FRAMES:
        if is_users(frame):
            places.append(_place(frame))
        if frame is call:
            break
        frame = frame.f_back
    shown = " < ".join(places)
    if innermost is None or is_users(innermost):
        return shown
    return f"{shown} (in {_place(innermost)})"


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


def starved_s(thread: int | None) -> float:
    """Return the total time that a thread of this process waited for a processor; 0 if that is unknown."""
    times = processor_times(thread)
    return 0.0 if times is None else times[1]
