"""A timer that can be set repeatedly."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """Calls a function at the earliest of the times that were set; after the call, it can be set again.

    It stores its time itself, because uvloop returns a handle without ``when()`` for times less than a
    millisecond away.
    """

    __slots__ = ("_at", "_callback", "_timer")

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._at = math.inf
        self._timer: asyncio.Handle | None = None

    @property
    def is_set(self) -> bool:
        """Whether the alarm will fire."""
        return self._timer is not None

    def set(self, at: float) -> None:
        """Fire at a time of the running loop's clock, or earlier if an earlier time was set before."""
        if at >= self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at = at
        self._timer = asyncio.get_running_loop().call_at(at, self._fire)

    def cancel(self) -> None:
        """Forget all times. Idempotent."""
        self._at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._at = math.inf
        self._timer = None
        self._callback()
