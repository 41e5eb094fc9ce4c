"""The runner for plain functions that share the thread of the user's event loop."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import Any

from daskserve.data.replica.execution.runner import RunListener, Runs
from daskserve.data.replica.execution.user_threads import ThreadRun, UserThreads
from daskserve.internals.python import without_running_loop
from daskserve.loops.thread_calls import ThreadCalls


class LoopThread(UserThreads):
    """Runs plain functions one at a time, which blocks the loop while they run.

    The functions do not see a running event loop, so they may start loops, as in other threads.

    Parameters
    ----------
    post : callable
        Calls a function on the user-code loop.
    """

    def __init__(self, post: Callable[..., None], to_worker: ThreadCalls, runs: Runs) -> None:
        super().__init__("", 1, to_worker, runs)
        self._post = post

    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], context: Context, on_end: RunListener
    ) -> ThreadRun:
        run = ThreadRun(self, function, args, context, on_end)
        self.runs.add(run)
        self.unfinished += 1
        self._post(_run, run)
        return run


def _run(run: ThreadRun) -> None:
    with without_running_loop():
        run.run()
