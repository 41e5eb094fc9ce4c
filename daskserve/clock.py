"""Time and chance, as arguments.

Everything that waits or stamps takes a `Clock`, everything that draws takes a `random.Random`. The clock
reads the running event loop, so the same code runs in real time and on the virtual-time loop of
`daskserve.testing`. No other module may call ``time.time``, ``asyncio.sleep`` or ``random.*`` (a test
holds that).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable
from typing import Protocol, TypeVar

T = TypeVar("T")

#: Seconds from an arbitrary start, for figures: how long something took, which nothing is decided by. An
#: event loop's own clock will not do for that, because uvloop's counts whole milliseconds.
stopwatch = time.perf_counter


class Clock(Protocol):
    """What daskserve asks of time."""

    def now(self) -> float:
        """Return seconds on a clock that never goes back."""

    def wall(self) -> float:
        """Return seconds since the epoch, for people to read."""

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
    """The clock of one event loop; asked several times a request, it takes an eighth of the time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = loop.time  # type: ignore[method-assign]


def seeded_rng(seed: int) -> random.Random:
    """Return a generator that draws the same in every run, for simulations."""
    return random.Random(seed)


def system_rng() -> random.Random:
    """Return a generator seeded by the operating system."""
    return random.Random(random.SystemRandom().getrandbits(64))


_BITS = 48
_MASK = (1 << _BITS) - 1


class RequestIds:
    """Makes UUIDs (version 4), no two alike; for use from any thread.

    The first digits are drawn once. The last are a count in disguise: times an odd number, modulo a power of
    two, so that none comes twice. That takes a fifth of the time of `uuid.uuid4`.
    """

    def __init__(self, rng: random.Random) -> None:
        bits = rng.getrandbits(128) & ~(0xF << 76 | 0x3 << 62) | (0x4 << 76 | 0x2 << 62)
        digits = f"{bits >> _BITS:020x}"
        self._first = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:]}-"
        # Taking the next of a count is one step for Python, so no two threads get the same.
        self._numbers = itertools.count(bits & _MASK, rng.getrandbits(_BITS) | 1)

    def next(self) -> str:
        """Return a new id."""
        return f"{self._first}{next(self._numbers) & _MASK:012x}"
