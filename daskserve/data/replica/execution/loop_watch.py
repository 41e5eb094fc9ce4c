"""Detects that user code blocks an event loop."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sized
from types import FrameType
from typing import TypeAlias

from daskserve.data.replica.execution.evidence import BLOCKED_AFTER_S, WATCH_INTERVAL_S, Evidence, starved_s
from daskserve.data.replica.execution.user_loop import UserLoop
from daskserve.loops.thread_calls import ThreadCalls
from daskserve.loops.threads import RunningThread

logger = logging.getLogger("daskserve.replica")

#: Returns the innermost frame of each thread, by the thread's ident.
StackFrames: TypeAlias = Callable[[], Mapping[int, FrameType]]


class _Watch:
    """The common parts of both watches: the count, the evidence and the timer of the next check."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: Sized, frames: StackFrames) -> None:
        #: How many times user code has blocked its event loop.
        self.blocked_count = 0
        #: The timer of the next check; None while the watch is not armed.
        self.timer: asyncio.TimerHandle | None = None
        self._loop = loop
        self._runs = runs
        self._frames = frames
        self._is_closed = False
        self._evidence = Evidence()
        self._sampled_at = 0.0
        self._logged_places: set[str] = set()

    def _log(self, text: str, *values: object) -> None:
        """Count a block, and log the first one at each place."""
        self.blocked_count += 1
        place = str(self._evidence.place)
        if place not in self._logged_places:
            self._logged_places.add(place)
            logger.warning("%s Later blocks at this place are only counted.", text % values)

    def _sample(self, thread: threading.Thread | RunningThread, now: float) -> None:
        frame = self._frames().get(thread.ident or 0)
        self._evidence.add(frame, now - self._sampled_at, starved_s(thread.native_id))


class LoopWatch(_Watch):
    """Logs and counts blocks of a user-code loop. It runs on the worker's loop while calls run.

    It always detects a block of one and a half times `BLOCKED_AFTER_S`, even if the block is over at the next
    check. It also runs the callbacks that the user-code loop posted before it was blocked.

    Parameters
    ----------
    is_silent : bool
        Whether blocks are neither logged nor counted: plain functions may block the loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runs: Sized,
        to_worker: ThreadCalls,
        user_loop: UserLoop,
        *,
        is_silent: bool = False,
        frames: StackFrames = sys._current_frames,
    ) -> None:
        super().__init__(loop, runs, frames)
        self._to_worker = to_worker
        self._user_loop = user_loop
        self._is_silent = is_silent
        self._asked_at = self._took_s = 0.0
        self._is_answered = self._is_reported = True

    def arm(self) -> None:
        if self.timer is None and not self._is_closed:
            self.timer = self._loop.call_later(WATCH_INTERVAL_S, self._tick)

    def close(self) -> None:
        """End the watch."""
        self._is_closed = True

    def _tick(self) -> None:
        self.timer = None
        self._to_worker.drain()
        now = self._loop.time()
        if not self._is_reported:
            is_answered = self._is_answered
            if not is_answered:  # sample already now, because the block may end before the next check
                self._sample(self._user_loop.thread, now)
                self._sampled_at = now
            if self._evidence.explains(self._took_s if is_answered else now - self._asked_at):
                self._report()
        if self._is_answered:
            self._evidence = Evidence()
            if not self._runs:
                return
            self._is_answered = self._is_reported = False
            self._asked_at = self._sampled_at = now
            self._user_loop.thread_calls.post(self._answer)
        self.arm()

    def _answer(self) -> None:
        self._took_s = self._user_loop.loop.time() - self._asked_at
        self._is_answered = True

    def _report(self) -> None:
        self._is_reported = True
        if self._is_silent:
            return
        self._log(
            "User code blocks the event loop of %s for more than %d ms, at %s; its other requests wait. "
            "Make it a plain function, or await asyncio.to_thread(...) for the blocking part.",
            self._user_loop.thread.name,
            BLOCKED_AFTER_S * 1000,
            self._evidence.place,
        )


class SharedLoopWatch(_Watch):
    """Logs and counts blocks of the worker's own loop while calls run on it.

    A thread takes samples while the loop is late; the loop reports the block afterwards.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runs: Sized,
        name: str,
        frames: StackFrames = sys._current_frames,
    ) -> None:
        super().__init__(loop, runs, frames)
        self._name = name
        self._loop_thread = threading.current_thread()
        self._periodic = PeriodicThread(self.check, f"daskserve-{name}-watch")

    def arm(self) -> None:
        if self.timer is None and not self._is_closed:
            self._evidence = Evidence()
            self._sampled_at = self._loop.time()
            self.timer = self._loop.call_later(WATCH_INTERVAL_S, self._tick)
            self._periodic.resume()

    def close(self) -> None:
        """End the watch and its thread."""
        self._is_closed = True
        self._periodic.close()

    def check(self) -> None:
        """Sample the stack of the worker's loop if the loop is late; runs in the thread of the watch."""
        timer, now = self.timer, self._loop.time()
        if timer is not None and now > timer.when():
            self._sample(self._loop_thread, now)
        self._sampled_at = now

    def _tick(self) -> None:
        assert self.timer is not None
        late_s = self._loop.time() - self.timer.when()
        self.timer = None
        if self._evidence.explains(late_s):
            self._log(
                "User code blocked the worker's event loop for %d ms, at %s, while requests of %s ran there; "
                "everything in the process waited. With event_loop='own' only the replica would wait.",
                late_s * 1000,
                self._evidence.place,
                self._name,
            )
        if self._runs:
            self.arm()
        else:
            self._periodic.pause()


class PeriodicThread:
    """A thread that calls a function once per interval between `resume` and `pause`."""

    def __init__(self, check: Callable[[], None], name: str) -> None:
        self._check = check
        self._name = name
        self._thread: threading.Thread | None = None
        self._is_wanted = threading.Event()
        self._is_closed = threading.Event()

    def resume(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._is_wanted.set()

    def pause(self) -> None:
        self._is_wanted.clear()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._is_closed.set()
        self._is_wanted.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._is_wanted.wait() and not self._is_closed.wait(WATCH_INTERVAL_S):
            self._check()
