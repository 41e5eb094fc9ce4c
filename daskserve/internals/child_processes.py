"""Lets user code start processes with `multiprocessing` in a worker; they end with the worker.

Problem: Dask's nannies start workers as daemonic processes, and "daemonic processes are not allowed to have
children", because the children of a killed process keep running. Choice: the worker's process is marked as
not daemonic, and each child watches its parent, with every start method.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import connection, util

from daskserve.common.clock import stopwatch
from daskserve.internals.checking import PYTHON, needs

with needs(PYTHON, ">=3.11,<3.15") as check:
    check.attributes(multiprocessing.current_process(), "_config", "daemon")
    check.attributes(util, "Finalize", "register_after_fork")

#: The key of the `_EndsWithParent` in the data that a process passes to its children.
_KEY = "daskserve"
#: Interval at which a new child checks whether it has found its parent.
STARTING_S = 0.01
#: How long children may handle SIGTERM when their process ends, before they are killed.
TERMINATE_S = 1.0


class _EndsWithParent:
    """Ends the children of a process with it. Each child gets a copy, and passes it on to its own children.

    A forked child inherits the registry of its parent. Any other child unpickles this object.
    """

    def __init__(self, is_child: bool = False) -> None:
        self._pid = os.getpid()
        util.register_after_fork(self, _EndsWithParent._begin)
        if is_child:
            _watch_parent()

    def __reduce__(self) -> tuple[type[_EndsWithParent], tuple[bool]]:
        return _EndsWithParent, (True,)

    def _begin(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            _watch_parent()


def _watch_parent() -> None:
    threading.Thread(target=_end_with_parent, name="daskserve-lifeline", daemon=True).start()


def _end_with_parent() -> None:
    while (parent := multiprocessing.parent_process()) is None:
        threading.Event().wait(STARTING_S)  # the parent is set after the process has been unpickled
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


class ChildProcesses:
    """Lets this process have children, from `open` until `close`; all of them end with it."""

    def __init__(self) -> None:
        self._was_daemon: bool | None = None
        self._at_exit: util.Finalize | None = None

    def open(self) -> None:
        """Begin; idempotent."""
        if self._was_daemon is not None:
            return
        process = multiprocessing.current_process()
        self._was_daemon = process.daemon
        process.daemon = False
        process._config[_KEY] = _EndsWithParent()  # type: ignore[attr-defined]
        # Without this, an exiting process waits for its children.
        self._at_exit = util.Finalize(None, _end_children, args=(stopwatch,), exitpriority=0)

    def close(self) -> None:
        """Allow no more children; idempotent."""
        if self._was_daemon is not None:
            process = multiprocessing.current_process()
            process.daemon, self._was_daemon = self._was_daemon, None
            process._config.pop(_KEY, None)  # type: ignore[attr-defined]
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None


def _end_children(now: Callable[[], float]) -> None:
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    deadline = now() + TERMINATE_S
    # Without sentinels, `connection.wait` waits for the whole timeout; with several, it waits for the first
    # of them.
    waiting = {child.sentinel for child in children}
    while waiting and (left := deadline - now()) > 0:
        waiting.difference_update(connection.wait(list(waiting), left))
    for child in children:
        child.kill()
