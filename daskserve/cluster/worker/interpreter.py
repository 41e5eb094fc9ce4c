"""Interpreter settings of a process that serves requests; `close` restores the previous ones.

Two things in CPython delay requests by tens of milliseconds, regardless of the code that answers them:

- A thread that computes keeps the interpreter lock for the switch interval (5 ms) when another one waits for
  it, and a request waits for it several times.
- A full garbage collection visits every object: 20 ms with only a Dask worker in the process, and much more
  once a model's libraries are loaded. Under load, one is due several times a second. So `gc.freeze` excludes
  the objects that exist once no actor has started or stopped for a while. When actors start or stop, a full
  collection runs again, which frees what a stopped replica leaves behind.
"""

from __future__ import annotations

import asyncio
import gc
import sys

from daskserve import settings

#: Time without starts and stops of actors after which a collection and `gc.freeze` run.
SETTLE_S = 0.5


class InterpreterTuning:
    """Applies `daskserve.settings.ProcessSettings` to this process; runs on one event loop."""

    def __init__(self) -> None:
        self._settings = settings.process()
        self._old_switch_interval_s = sys.getswitchinterval()
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = False

    def open(self) -> None:
        """Apply the settings; `close` undoes this."""
        self._is_open = True
        if self._settings.switch_interval_s is not None:
            sys.setswitchinterval(self._settings.switch_interval_s)
        self.objects_changed()

    def objects_changed(self) -> None:
        """Schedule a new collection and freeze, because an actor has started or stopped."""
        if not self._is_open or not self._settings.gc_freeze:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)

    def close(self) -> None:
        """Restore the interpreter's previous settings; idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._settings.gc_freeze:
            gc.unfreeze()
        sys.setswitchinterval(self._old_switch_interval_s)

    def _settle(self) -> None:
        self._timer = None
        gc.unfreeze()
        gc.collect()
        gc.freeze()
