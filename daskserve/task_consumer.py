"""The decorators for tasks, in a module with Ray Serve's name; they are also in `daskserve.tasks`.

``serve.task_consumer`` is the decorator of this name as well as this module, so the module can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from daskserve.data.tasks.decorator import task_consumer, task_handler
from daskserve.options.fields.lazy_names import LazyNames

if TYPE_CHECKING:
    from daskserve.client.functions.task_queues import instantiate_adapter_from_config

__all__ = ["instantiate_adapter_from_config", "task_consumer", "task_handler"]

__getattr__ = LazyNames(globals(), {"client.functions.task_queues": "instantiate_adapter_from_config"})


class _CallableModule(ModuleType):
    def __call__(self, **options: Any) -> Any:
        return task_consumer(**options)


sys.modules[__name__].__class__ = _CallableModule
