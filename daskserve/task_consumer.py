"""Ray Serve's module of the decorators of tasks; the module itself is called as `daskserve.task_consumer`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from daskserve.client.functions.task_queues import instantiate_adapter_from_config
from daskserve.data.tasks.decorator import task_consumer, task_handler

__all__ = ["instantiate_adapter_from_config", "task_consumer", "task_handler"]


class _CallableModule(ModuleType):
    """``serve.task_consumer`` is the decorator; Python sets that name to this module once it is imported."""

    def __call__(self, **options: Any) -> Any:
        return task_consumer(**options)


sys.modules[__name__].__class__ = _CallableModule
