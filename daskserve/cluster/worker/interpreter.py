"""Interpreter settings of a process that serves requests; `close` restores the previous ones.

Four things in Python cost requests time, regardless of the code that answers them. Three of them delay single
requests by tens of milliseconds. The other one, collections of young objects, delays all requests by
microseconds:

- A thread that computes keeps the interpreter lock for the switch interval (5 ms) when another one waits for
  it, and a request waits for it several times.
- A full garbage collection visits every object: 20 ms with only a Dask worker in the process, and much more
  once a model's libraries are loaded. Under load, a collection is due several times a second. So `gc.freeze`
  excludes the objects that exist once no actor has started or stopped for a while. When actors start or stop,
  a full collection runs again, which frees the objects of a stopped replica.
- A collection of young objects is due once 700 more of them exist. A hundred requests in flight are more than
  that, so a collection runs at each turn of the event loop and finds nothing. This takes a tenth of the time
  of a small request. While such collections find nothing, they become rarer; see `CollectionPace`.
- The first use of a function such as ``serve.get_app_handle`` imports the client, in 0.1 s, and blocks the
  event loop of the user code that calls it. So a process with replicas imports the client in advance, in a
  thread.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType

from daskserve.common import settings

logger = logging.getLogger("daskserve.host")

#: Time without starts and stops of actors after which a collection and `gc.freeze` run.
SETTLE_S = 0.5
#: The module of the functions that user code calls, which imports the rest of the client.
CLIENT = "daskserve.client.functions.applications"


class CollectionPace:
    """Makes collections of young objects rarer while they find no garbage.

    A collection that finds nothing doubles the threshold, up to a limit. If one finds garbage, it restores
    Python's own threshold, so user code that leaves cycles of large objects needs no more memory than in any
    Python process. A threshold that other code sets is kept.

    Parameters
    ----------
    limit : int or None
        The highest threshold; None changes nothing.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._given = self._present = gc.get_threshold()

    def open(self) -> None:
        """Begin; `close` undoes this."""
        self._given = self._present = gc.get_threshold()
        if self._limit is not None and 0 < self._given[0] < self._limit:
            gc.callbacks.append(self._note)

    def close(self) -> None:
        """Restore the threshold; idempotent."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)
            self._use(self._given[0])

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            assert self._limit is not None
            self._use(self._given[0] if info["collected"] else min(self._limit, 2 * self._present[0]))

    def _use(self, threshold: int) -> None:
        if threshold != self._present[0] and gc.get_threshold() == self._present:
            self._present = (threshold, *self._given[1:])
            gc.set_threshold(*self._present)


class InterpreterTuning:
    """Applies `daskserve.common.settings.ProcessSettings` to this process; runs on one event loop.

    Parameters
    ----------
    has_replicas
        Returns whether the process runs user code.
    """

    def __init__(self, has_replicas: Callable[[], bool] = lambda: False) -> None:
        self._has_replicas = has_replicas
        self._settings = settings.process()
        self._old_switch_interval_s = sys.getswitchinterval()
        self._collections = CollectionPace(self._settings.gc_threshold)
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = False

    def open(self) -> None:
        """Apply the settings; `close` undoes this."""
        self._is_open = True
        self._collections.open()
        if self._settings.switch_interval_s is not None:
            sys.setswitchinterval(self._settings.switch_interval_s)
        self.objects_changed()

    def objects_changed(self) -> None:
        """Schedule the import, a collection and a freeze, because an actor has started or stopped."""
        if not self._is_open:
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
        self._collections.close()
        sys.setswitchinterval(self._old_switch_interval_s)

    def _settle(self) -> None:
        self._timer = None
        if CLIENT in sys.modules or not self._has_replicas():
            self._freeze()
        else:
            imported = asyncio.get_running_loop().run_in_executor(None, importlib.import_module, CLIENT)
            imported.add_done_callback(self._imported)

    def _imported(self, imported: asyncio.Future[ModuleType]) -> None:
        if not imported.cancelled() and (error := imported.exception()):
            logger.warning("Cannot import %s in advance of user code: %r.", CLIENT, error)
        self._freeze()

    def _freeze(self) -> None:
        if self._is_open and self._settings.gc_freeze:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
