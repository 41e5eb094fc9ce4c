"""The adapters to queues of tasks, and their errors, under Ray Serve's names."""

from __future__ import annotations

from daskserve.data.tasks.adapter import AsyncCapability, TaskProcessorAdapter
from daskserve.data.tasks.celery_adapter import CeleryTaskProcessorAdapter
from daskserve.data.tasks.consumer import Lost, Released
from daskserve.data.tasks.durable import (
    InstanceTaskProcessorAdapter,
    RedisTaskProcessorAdapter,
    SQLiteTaskProcessorAdapter,
)
from daskserve.data.tasks.errors import TaskConflictError, TaskQueueError, TaskQueueFullError

__all__ = [
    "AsyncCapability",
    "CeleryTaskProcessorAdapter",
    "InstanceTaskProcessorAdapter",
    "Lost",
    "RedisTaskProcessorAdapter",
    "Released",
    "SQLiteTaskProcessorAdapter",
    "TaskConflictError",
    "TaskProcessorAdapter",
    "TaskQueueError",
    "TaskQueueFullError",
]
