"""Finds the workers of a process, or sets the worker that Dask finds there, without importing Dask.

Importing distributed takes half a second of CPU time, and most processes that run user code never use it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = "distributed"
#: The context variables with the current worker and the current client, by their modules.
#: `daskserve.cluster.distributed_internals` checks that they exist.
_VARIABLES: Mapping[str, str] = {
    "distributed.worker": "_worker_cvar",
    "distributed.client": "_current_client",
}


def answer_get_worker(worker: Any, client: Any) -> None:
    """Set the results of `distributed.get_worker` and `default_client` for the whole process.

    Tasks of workers that user code starts in this process still get their own worker.
    """

    def give() -> None:
        for (module, name), value in zip(_VARIABLES.items(), (worker, client), strict=True):
            setattr(sys.modules[module], name, ContextVar(name, default=value))

    if _PACKAGE in sys.modules:
        give()
    else:
        sys.meta_path.insert(0, _AfterImport(_PACKAGE, give))


def workers_here() -> list[Any]:
    """Return the workers that exist in this process."""
    module = sys.modules.get("distributed.worker")
    return [] if module is None else list(module.Worker._instances)


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
