"""What `distributed.get_worker` returns in a process that is no worker, without importing distributed.

Importing distributed takes half a second of CPU time, and most processes that run user code never use it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = "distributed"
_MODULE = "distributed.worker"
#: The context variable of `_MODULE` with the current worker. `daskserve.cluster.distributed_internals` checks
#: that it is there.
_VARIABLE = "_worker_cvar"


def answer_get_worker(stand_in: Any) -> None:
    """Make `distributed.get_worker` return an object everywhere in this process.

    Tasks of workers that user code starts in this process still get their own worker.
    """

    def give() -> None:
        setattr(sys.modules[_MODULE], _VARIABLE, ContextVar(_VARIABLE, default=stand_in))

    if _PACKAGE in sys.modules:
        give()
    else:
        sys.meta_path.insert(0, _AfterImport(_PACKAGE, give))


class _AfterImport(MetaPathFinder):
    """Calls a function once, directly after the first import of a module."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name = name
        self._function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self._function()

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
