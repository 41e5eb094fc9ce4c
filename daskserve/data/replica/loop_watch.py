"""Detects blocked event loops that run user code."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sized
from types import FrameType
from typing import Protocol

from daskserve.data.replica.user_loop import UserLoop
from daskserve.loops.hops import Hop

logger = logging.getLogger("daskserve.replica")

#: The interval of the checks of a loop that runs user code, and the delay from which it counts as blocked.
WATCH_INTERVAL_S = 0.03
BLOCKED_AFTER_S = 0.1


class Watched(Protocol):
    """The parts of a `daskserve.data.replica.wall.Wall` that the watch needs."""

    blocked_count: int
    to_worker: Hop

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def runs(self) -> Sized: ...
    @property
    def is_closed(self) -> bool: ...


class LoopWatch:
    """Logs and counts blocks of a user's loop; it checks from the worker's loop while calls run.

    A block of one and a half times `BLOCKED_AFTER_S` is always detected, even if it is over when the watch
    looks. The watch also fetches what a user's loop posted before it was blocked, and so has not announced.
    """

    def __init__(self, wall: Watched, user_loop: UserLoop) -> None:
        self._wall = wall
        self._user_loop = user_loop
        #: The timer of the next check; None while the watch is not armed.
        self.timer: asyncio.TimerHandle | None = None
        self._asked_at = self._took_s = 0.0
        self._is_answered = self._is_reported = True
        self._place = ""

    def arm(self) -> None:
        if self.timer is None and not self._wall.is_closed:
            self.timer = self._wall.loop.call_later(WATCH_INTERVAL_S, self._tick)

    def _tick(self) -> None:
        self.timer = None
        self._wall.to_worker.drain()
        now = self._wall.loop.time()
        if not self._is_reported:
            is_answered = self._is_answered
            if not is_answered:  # the block may be over before it counts as one
                frame = sys._current_frames().get(self._user_loop.thread.ident or 0)
                self._place = describe_stack(frame)
            if (self._took_s if is_answered else now - self._asked_at) >= BLOCKED_AFTER_S:
                self._report()
        if self._is_answered:
            if not self._wall.runs:
                return
            self._is_answered = self._is_reported = False
            self._asked_at = now
            self._user_loop.hop.post(self._answer)
        self.arm()

    def _answer(self) -> None:
        self._took_s = self._user_loop.loop.time() - self._asked_at
        self._is_answered = True

    def _report(self) -> None:
        self._is_reported = True
        self._wall.blocked_count += 1
        logger.warning(
            "User code blocks the event loop of %s for more than %d ms, at %s; its other requests wait. "
            "Make it a plain function, or move what blocks to a thread.",
            self._user_loop.thread.name,
            BLOCKED_AFTER_S * 1000,
            self._place or "an unknown place",
        )


class SharedLoopWatch:
    """Logs and counts blocks of the worker's own loop while calls run on it.

    Nothing can look while that loop is blocked; a late timer shows it afterwards, without the place.
    """

    def __init__(self, wall: Watched, name: str) -> None:
        self._wall = wall
        self._name = name
        #: The timer of the next check; None while the watch is not armed.
        self.timer: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        if self.timer is None and not self._wall.is_closed:
            self.timer = self._wall.loop.call_later(WATCH_INTERVAL_S, self._tick)

    def _tick(self) -> None:
        assert self.timer is not None
        late_s = self._wall.loop.time() - self.timer.when()
        self.timer = None
        if late_s >= BLOCKED_AFTER_S:
            self._wall.blocked_count += 1
            logger.warning(
                "The worker's event loop was blocked for %d ms while code of %s ran on it; everything in the "
                "process waited. With event_loop='own' only this replica would wait.",
                late_s * 1000,
                self._name,
            )
        if self._wall.runs:
            self.arm()


def describe_stack(frame: FrameType | None) -> str:
    """Return the innermost frames of a stack as ``file:line function``, up to the first of daskserve."""
    places: list[str] = []
    while frame is not None and len(places) < 5 and frame.f_code.co_filename != __file__:
        places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(places) or "an unknown place"
