"""Task queues and message sources: decorators, options, and programs' access to queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskserve.options.fields.lazy_names import LazyNames

if TYPE_CHECKING:
    from daskserve.client.functions.task_queues import instantiate_adapter_from_config
    from daskserve.data.tasks.adapter import TaskProcessorAdapter
    from daskserve.data.tasks.config import (
        CeleryAdapterConfig,
        InstanceAdapterConfig,
        RedisAdapterConfig,
        SQLiteAdapterConfig,
        TaskProcessorConfig,
        TaskResult,
        TaskSchedule,
    )
    from daskserve.data.tasks.current import TaskContext, get_task_context
    from daskserve.data.tasks.decorator import task_consumer, task_handler
    from daskserve.data.tasks.http import task_api
    from daskserve.data.tasks.sources import SourceItem, source

__all__ = [
    "CeleryAdapterConfig",
    "InstanceAdapterConfig",
    "RedisAdapterConfig",
    "SQLiteAdapterConfig",
    "SourceItem",
    "TaskContext",
    "TaskProcessorAdapter",
    "TaskProcessorConfig",
    "TaskResult",
    "TaskSchedule",
    "get_task_context",
    "instantiate_adapter_from_config",
    "source",
    "task_api",
    "task_consumer",
    "task_handler",
]

#: Loaded on use, because a consumer's replica does not need the client, which would delay its start by a
#: second.
__getattr__ = LazyNames(
    globals(),
    {
        "client.functions.task_queues": "instantiate_adapter_from_config",
        "data.tasks.adapter": "TaskProcessorAdapter",
        "data.tasks.config": "CeleryAdapterConfig InstanceAdapterConfig RedisAdapterConfig "
        "SQLiteAdapterConfig TaskProcessorConfig TaskResult TaskSchedule",
        "data.tasks.current": "TaskContext get_task_context",
        "data.tasks.decorator": "task_consumer task_handler",
        "data.tasks.http": "task_api",
        "data.tasks.sources": "SourceItem source",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
