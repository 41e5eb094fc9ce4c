"""What daskserve changes in the Python interpreter of a process that serves; `close` takes it back.

Two things in CPython hold up requests for tens of milliseconds, whatever the code that answers them:

- A thread that computes keeps the interpreter lock for the switch interval (5 ms) whenever another one wants
  it, and a request wants it several times.
- A full garbage collection walks over every object there is, 20 ms with nothing but a Dask worker in the
  process, and much more once a model's libraries are loaded; under load one is due several times a second.
  So what is there once things have settled is set aside (`gc.freeze`). When actors start or stop, everything
  is looked through again, so that what a stopped replica leaves behind is freed.
"""

from __future__ import annotations

import asyncio
import gc
import sys

from daskserve import settings

#: Garbage is collected, and the rest set aside, when no actor has started or stopped for so long.
SETTLE_S = 0.5


class InterpreterTuning:
    """Applies `daskserve.settings.ProcessSettings` to this process; runs on one event loop."""

    def __init__(self) -> None:
        self._settings = settings.process()
        self._old_switch_interval_s = sys.getswitchinterval()
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = False

    def open(self) -> None:
        """Begin; `close` undoes it."""
        self._is_open = True
        if self._settings.switch_interval_s is not None:
            sys.setswitchinterval(self._settings.switch_interval_s)
        self.objects_changed()

    def objects_changed(self) -> None:
        """Note that much has been made or dropped: look through all objects again when that is over."""
        if not self._is_open or not self._settings.gc_freeze:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)

    def close(self) -> None:
        """Leave the interpreter as it was found; idempotent."""
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
