"""Graceful SIGTERM: the process first shuts down its parts, then exits as it would have without this module.

Problem: systemd, Kubernetes and job schedulers send SIGTERM and wait before they kill; Python's and Dask's
handlers end the process at once. Choice: one handler per process, which later calls the previous one. On the
first SIGTERM it starts the registered shutdowns; when all of them are done, or on a second SIGTERM, it calls
the previous handler.

Some senders send the signal twice, to the process and to its group, so two within a moment count as one. A
forked child inherits the handler but does not need it: there, the signal ends the process. Python drops
signals that arrive in a child during the fork while the child has a handler, so SIGTERM is blocked until the
handler is removed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

from daskserve.common.clock import stopwatch
from daskserve.loops.at_fork import ActsAtFork, watch_forks

#: Two signals within this time count as one.
SAME_S = 0.3

#: Starts a shutdown. It runs in a signal handler, and calls its argument from any thread when the shutdown is
#: done.
Begin: TypeAlias = Callable[[Callable[[], None]], None]


class Termination(ActsAtFork):
    """The handler of SIGTERM; see the module. A process has one handler, which is stored in its table of
    signals."""

    #: Returns seconds. The clock of an event loop cannot be used, because a signal handler has no event loop.
    now: Callable[[], float] = staticmethod(stopwatch)

    def __init__(self, previous: Any) -> None:
        self._previous = previous
        self._pid = os.getpid()
        self._begins: list[Begin] = []
        self._waits_for: set[Begin] = set()
        self._began_at: float | None = None
        self._is_done = False
        #: The signals that threads blocked before they forked.
        self._masks: dict[int, set[signal.Signals]] = {}

    @classmethod
    def current(cls) -> Termination | None:
        """Return this process's handler, and install it if necessary; None if SIGTERM is ignored."""
        found: Any = signal.getsignal(signal.SIGTERM)
        if isinstance(found, cls) and found._pid == os.getpid():
            return found
        if found is None or found is signal.SIG_IGN:
            return None
        handler = cls(found)
        signal.signal(signal.SIGTERM, handler)
        watch_forks(handler)
        return handler

    def add(self, begin: Begin) -> Callable[[], None]:
        """Start a shutdown on SIGTERM; return a function that undoes this in the main thread."""
        self._begins.append(begin)

        def remove() -> None:
            if self._began_at is None and begin in self._begins:
                self._begins.remove(begin)
                if not self._begins and self._is_handler():
                    signal.signal(signal.SIGTERM, self._previous)

        return remove

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = self.now()
        if self._pid != os.getpid():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._is_done or not self._begins:
            self._hand_on(number, frame)
        elif self._began_at is None:
            self._began_at = now
            self._waits_for = set(self._begins)
            for begin in self._begins:
                begin(partial(self._note_done, begin))
        elif now - self._began_at > SAME_S:
            self._hand_on(number, frame)

    def before_fork(self) -> None:
        if self._is_handler():
            held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            self._masks[threading.get_ident()] = {signal.Signals(each) for each in held}

    def after_fork(self) -> None:
        held = self._masks.pop(threading.get_ident(), None)
        if held is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def after_fork_in_child(self) -> None:
        if self._is_handler():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.after_fork()

    def _is_handler(self) -> bool:
        return signal.getsignal(signal.SIGTERM) is self

    def _note_done(self, begin: Begin) -> None:
        self._waits_for.discard(begin)
        if not self._waits_for and not self._is_done:
            self._is_done = True
            # Only the main thread may change handlers, so the handler runs there. If the default handler is
            # installed again, Dask's program is already ending, with its own exit status.
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                os.kill(self._pid, signal.SIGTERM)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self._is_done = True
        signal.signal(number, self._previous)
        if callable(self._previous):
            self._previous(number, frame)
        else:
            os.kill(self._pid, number)


def on_sigterm(begin: Begin) -> Callable[[], None]:
    """Start a shutdown when SIGTERM arrives, before the process ends; return a function that undoes this.

    Call both in the main thread; elsewhere, and where SIGTERM is ignored, this does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = Termination.current() if is_main else None
    return (lambda: None) if handler is None else handler.add(begin)


def begin_on(loop: asyncio.AbstractEventLoop, start: Callable[[], asyncio.Future[Any]]) -> Begin:
    """Return a `Begin` that calls a function on an event loop, and is done when its future is."""

    def begin(done: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(lambda: start().add_done_callback(lambda _: done()))
        except RuntimeError:  # the loop is closed, because the process is already ending
            done()

    return begin
