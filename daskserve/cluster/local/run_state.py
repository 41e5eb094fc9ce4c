"""The state of a simulated process: running, suspended as by SIGSTOP, or dead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from daskserve.common.clock import Clock

T = TypeVar("T")


class RunState:
    """The state of one process, and the messages held back while it is suspended.

    Attributes
    ----------
    clock : Clock
        The given clock, except that no timer fires while the process is suspended.
    is_alive : bool
        False once the process was killed.
    """

    def __init__(self, clock: Clock) -> None:
        self.is_alive = True
        self._awake = asyncio.Event()
        self._awake.set()
        self.clock: Clock = _ProcessClock(clock, self._awake)
        #: Incoming and outgoing messages from the time when the process was suspended.
        self._held_back: list[tuple[Callable[[Any], None], Any]] = []

    def __repr__(self) -> str:
        return "dead" if not self.is_alive else "alive" if self._awake.is_set() else "suspended"

    @property
    def is_running(self) -> bool:
        """Whether the process is alive and not suspended."""
        return self.is_alive and self._awake.is_set()

    async def wait_until_running(self) -> None:
        """Return when the process runs: immediately, when it resumes, or never if it is dead."""
        await self._awake.wait()
        if not self.is_alive:
            await asyncio.get_running_loop().create_future()

    def when_awake(self, handler: Callable[[Any], None], message: Any) -> None:
        """Call a handler now, or when the process resumes; never if it is killed before that."""
        if self._awake.is_set():
            handler(message)
        else:
            self._held_back.append((handler, message))

    def suspend(self) -> None:
        """Suspend the process."""
        self._awake.clear()

    def resume(self) -> None:
        """Resume the process and handle the messages that were held back."""
        self._awake.set()
        held_back, self._held_back = self._held_back, []
        for handler, message in held_back:
            handler(message)

    def kill(self) -> None:
        """Mark the process as dead and drop the messages that were held back."""
        self.is_alive = False
        self._held_back.clear()
        self._awake.set()  # cleanup in this process must not wait


class _ProcessClock:
    """The clock of a process that may be suspended: timers that are due fire when it resumes."""

    def __init__(self, clock: Clock, awake: asyncio.Event) -> None:
        self._clock = clock
        self._awake = awake

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> float:
        return self._clock.wall()

    async def sleep(self, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        await self._awake.wait()

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        try:
            result = await self._clock.wait_for(awaitable, timeout_s)
        except TimeoutError:
            await self._awake.wait()
            raise
        await self._awake.wait()
        return result
