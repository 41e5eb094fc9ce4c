"""Detects event loops that user code blocks."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sized
from types import FrameType
from typing import Protocol, TypeAlias

from daskserve.data.replica.execution.cpu_wait import starved_s
from daskserve.data.replica.execution.evidence import BLOCKED_AFTER_S, WATCH_INTERVAL_S, Evidence
from daskserve.data.replica.execution.user_loop import UserLoop
from daskserve.loops.thread_calls import ThreadCalls

logger = logging.getLogger("daskserve.replica")

#: Returns the innermost frame of each thread, by the thread's ident.
StackFrames: TypeAlias = Callable[[], Mapping[int, FrameType]]


class Watched(Protocol):
    """The parts of a `daskserve.data.replica.execution.executor.UserExecutor` that the watch needs."""

    blocked_count: int
    to_worker: ThreadCalls
    #: Whether plain functions may block the loop.
    is_loop_shared: bool

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

    def __init__(
        self, executor: Watched, user_loop: UserLoop, frames: StackFrames = sys._current_frames
    ) -> None:
        self._executor = executor
        self._user_loop = user_loop
        self._frames = frames
        #: The timer of the next check; None while the watch is not armed.
        self.timer: asyncio.TimerHandle | None = None
        self._asked_at = self._took_s = self._sampled_at = 0.0
        self._is_answered = self._is_reported = True
        self._evidence = Evidence()

    def arm(self) -> None:
        if self.timer is None and not self._executor.is_closed:
            self.timer = self._executor.loop.call_later(WATCH_INTERVAL_S, self._tick)

    def close(self) -> None:
        """End the watch; the executor is closed, so its timer is not set again."""

    def _tick(self) -> None:
        self.timer = None
        self._executor.to_worker.drain()
        now = self._executor.loop.time()
        if not self._is_reported:
            is_answered = self._is_answered
            if not is_answered:  # the block may be over before it counts as one
                thread = self._user_loop.thread
                frame = self._frames().get(thread.ident or 0)
                self._evidence.add(frame, now - self._sampled_at, starved_s(thread.native_id))
                self._sampled_at = now
            if self._evidence.explains(self._took_s if is_answered else now - self._asked_at):
                self._report()
        if self._is_answered:
            self._evidence = Evidence()
            if not self._executor.runs:
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
        if self._executor.is_loop_shared:
            return
        self._executor.blocked_count += 1
        logger.warning(
            "User code blocks the event loop of %s for more than %d ms, at %s; its other requests wait. "
            "Make it a plain function, or move what blocks to a thread.",
            self._user_loop.thread.name,
            BLOCKED_AFTER_S * 1000,
            self._evidence.place,
        )


class SharedLoopWatch:
    """Logs and counts blocks of the worker's own loop while calls run on it.

    A thread looks while that loop is late; the loop reports it afterwards.
    """

    def __init__(self, executor: Watched, name: str, frames: StackFrames = sys._current_frames) -> None:
        self._executor = executor
        self._name = name
        self._frames = frames
        self._loop_thread = threading.current_thread()
        self._periodic = PeriodicThread(self.look, f"daskserve-{name}-watch")
        #: The timer of the next check; None while the watch is not armed.
        self.timer: asyncio.TimerHandle | None = None
        self._evidence = Evidence()
        self._sampled_at = 0.0

    def arm(self) -> None:
        if self.timer is None and not self._executor.is_closed:
            self._evidence = Evidence()
            self._sampled_at = self._executor.loop.time()
            self.timer = self._executor.loop.call_later(WATCH_INTERVAL_S, self._tick)
            self._periodic.resume()

    def close(self) -> None:
        """End the thread."""
        self._periodic.close()

    def look(self) -> None:
        """Sample the stack of the worker's loop; in the thread of the lookout."""
        timer, evidence, now = self.timer, self._evidence, self._executor.loop.time()
        if timer is not None and now > timer.when():
            thread = self._loop_thread
            frame = self._frames().get(thread.ident or 0)
            evidence.add(frame, now - self._sampled_at, starved_s(thread.native_id))
        self._sampled_at = now

    def _tick(self) -> None:
        assert self.timer is not None
        late_s = self._executor.loop.time() - self.timer.when()
        self.timer = None
        if self._evidence.explains(late_s):
            self._executor.blocked_count += 1
            logger.warning(
                "User code blocked the worker's event loop for %d ms, at %s, while requests of %s ran there; "
                "everything in the process waited. With event_loop='own' only the replica would wait.",
                late_s * 1000,
                self._evidence.place,
                self._name,
            )
        if self._executor.runs:
            self.arm()
        else:
            self._periodic.pause()


class PeriodicThread:
    """A thread that calls a function once per interval between `resume` and `pause`."""

    def __init__(self, look: Callable[[], None], name: str) -> None:
        self._look = look
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
            self._look()
