"""Time and randomness, passed as arguments.

Code that waits or reads the time takes a `Clock`; code that needs random numbers takes a `random.Random`. The
clock reads the running event loop, so the same code runs in real time and on the virtual-time loop of
`daskserve.testing`. No other module may call ``time.time``, ``asyncio.sleep`` or ``random.*``; a test checks
this.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

#: Seconds from an arbitrary start, for measuring durations in metrics. It is not for decisions. The event
#: loop's clock is too coarse for this, because uvloop's counts whole milliseconds.
stopwatch = time.perf_counter
#: The time of log records, in seconds since the epoch.
time_of_day = time.time
#: Nanoseconds since the epoch, for spans.
wall_ns = time.time_ns
#: Seconds that the current thread has spent on a processor.
processor_time = time.thread_time


class Clock(Protocol):
    """The source of time."""

    def now(self) -> float:
        """Return seconds on a monotonic clock."""

    def wall(self) -> float:
        """Return seconds since the epoch, for display."""

    async def sleep(self, delay_s: float) -> None:
        """Return after ``delay_s`` seconds."""

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        """Return the awaitable's result, or raise `TimeoutError` and cancel it after ``timeout_s``."""


class LoopClock:
    """The clock of the running event loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        async with asyncio.timeout(timeout_s):
            return await awaitable


class OneLoopClock(LoopClock):
    """The clock of one event loop, which takes an eighth of the time of `LoopClock` for each reading."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = loop.time  # type: ignore[method-assign]


def seeded_rng(seed: int) -> random.Random:
    """Return a generator with the same numbers in every run, for simulations."""
    return random.Random(seed)


def system_rng() -> random.Random:
    """Return a generator seeded by the operating system."""
    return random.Random(random.SystemRandom().getrandbits(64))


_BITS = 48
_MASK = (1 << _BITS) - 1


class RequestIds:
    """Generates unique UUIDs (version 4); any thread may use it.

    The first digits are random and fixed. The last digits are a counter times an odd number, modulo a power
    of two, so that no id repeats. This takes a fifth of the time of `uuid.uuid4`.
    """

    def __init__(self, rng: random.Random) -> None:
        bits = rng.getrandbits(128) & ~(0xF << 76 | 0x3 << 62) | (0x4 << 76 | 0x2 << 62)
        digits = f"{bits >> _BITS:020x}"
        text = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:]}-%012x"
        # next() of a count is atomic in Python, so no two threads get the same number.
        numbers = map(_MASK.__and__, itertools.count(bits & _MASK, rng.getrandbits(_BITS) | 1))
        #: Returns a new id.
        self.next: Callable[[], str] = map(text.__mod__, numbers).__next__
