"""The interface of adapters to task queues, with Ray Serve's names.

daskserve's own queues implement it in `daskserve.data.tasks.durable`. A custom adapter gets the config in its
constructor, and calls the registered functions, each of which runs a handler in the replica.
"""

from __future__ import annotations

import asyncio
import enum
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from daskserve.common.clock import LoopClock, stopwatch
from daskserve.data.tasks.config import TaskProcessorConfig, TaskResult
from daskserve.data.tasks.states import ENDED
from daskserve.payload.importing import import_definition

P = ParamSpec("P")
T = TypeVar("T")

#: Interval at which the status of an awaited task is read.
POLL_S = 0.1


class AsyncCapability(enum.Enum):
    """The operations that an adapter supports without blocking the event loop."""

    ENQUEUE_TASK = enum.auto()
    GET_TASK_STATUS = enum.auto()
    CANCEL_TASK = enum.auto()
    GET_METRICS = enum.auto()
    HEALTH_CHECK = enum.auto()


class TaskProcessorAdapter(ABC):
    """Submits tasks, reads their status and, in a replica, consumes them."""

    def __init__(self) -> None:
        self._async_capabilities: set[AsyncCapability] = set()

    @property
    def async_capabilities(self) -> set[AsyncCapability]:
        """The capabilities that do not block the event loop."""
        return set(self._async_capabilities)

    def supports_async_capability(self, capability: AsyncCapability) -> bool:
        """Return whether this capability does not block the event loop."""
        return capability in self._async_capabilities

    def supports_any_async(self) -> bool:
        """Return whether there is any capability that does not block the event loop."""
        return bool(self._async_capabilities)

    @abstractmethod
    def initialize(self, consumer_concurrency: int = 1) -> None:
        """Connect. A consumer runs up to ``consumer_concurrency`` tasks at a time."""

    @abstractmethod
    def register_task_handle(self, func: Callable[..., Any], name: str | None = None) -> None:
        """Add a handler, which runs the tasks with its name."""

    @abstractmethod
    def enqueue_task_sync(
        self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any
    ) -> TaskResult:
        """Submit a task."""

    @abstractmethod
    def get_task_status_sync(self, task_id: str) -> TaskResult:
        """Return the status of a task."""

    @abstractmethod
    def cancel_task_sync(self, task_id: str) -> bool:
        """Cancel a task; return whether that stops the task from completing."""

    @abstractmethod
    def start_consumer(self, **kwargs: Any) -> None:
        """Begin to consume tasks."""

    def pause_consumer(self) -> None:  # noqa: B027 - most need none
        """Take no more tasks, and return at once, because the replica drains before it stops."""

    @abstractmethod
    def stop_consumer(self, timeout: float = 10.0) -> None:
        """Take no more tasks, and wait up to ``timeout`` seconds for running tasks."""

    @abstractmethod
    def shutdown(self) -> None:
        """Disconnect."""

    @abstractmethod
    def get_metrics_sync(self) -> dict[str, Any]:
        """Return metrics of the queue."""

    @abstractmethod
    def health_check_sync(self) -> list[dict[str, Any]]:
        """Return the health of the queue, or raise."""

    async def enqueue_task_async(
        self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any
    ) -> TaskResult:
        """Submit a task."""
        function = partial(self.enqueue_task_sync, task_name, args, kwargs, **options)
        return await _in_thread(self, AsyncCapability.ENQUEUE_TASK, function)

    async def get_task_status_async(self, task_id: str) -> TaskResult:
        """Return the status of a task."""
        return await _in_thread(self, AsyncCapability.GET_TASK_STATUS, self.get_task_status_sync, task_id)

    def wait_for_task_sync(self, task_id: str, timeout_s: float | None = None) -> TaskResult:
        """Return a task once it has ended, or in its current state after ``timeout_s`` seconds."""
        deadline = math.inf if timeout_s is None else stopwatch() + timeout_s
        pause = threading.Event()
        while True:
            found = self.get_task_status_sync(task_id)
            left_s = deadline - stopwatch()
            if found.status in ENDED or left_s <= 0:
                return found
            pause.wait(min(POLL_S, left_s))

    async def wait_for_task_async(self, task_id: str, timeout_s: float | None = None) -> TaskResult:
        """Return a task once it has ended, or in its current state after ``timeout_s`` seconds."""
        clock = LoopClock()
        deadline = math.inf if timeout_s is None else clock.now() + timeout_s
        while True:
            found = await self.get_task_status_async(task_id)
            left_s = deadline - clock.now()
            if found.status in ENDED or left_s <= 0:
                return found
            await clock.sleep(min(POLL_S, left_s))

    async def cancel_task_async(self, task_id: str) -> bool:
        """Cancel a task."""
        return await _in_thread(self, AsyncCapability.CANCEL_TASK, self.cancel_task_sync, task_id)

    async def get_metrics_async(self) -> dict[str, Any]:
        """Return metrics of the queue."""
        return await _in_thread(self, AsyncCapability.GET_METRICS, self.get_metrics_sync)

    async def health_check_async(self) -> list[dict[str, Any]]:
        """Return the health of the queue, or raise."""
        return await _in_thread(self, AsyncCapability.HEALTH_CHECK, self.health_check_sync)


async def _in_thread(
    adapter: TaskProcessorAdapter,
    capability: AsyncCapability,
    function: Callable[P, T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    if capability not in adapter.async_capabilities:
        raise NotImplementedError(
            f"{type(adapter).__name__} cannot {capability.name.lower().replace('_', ' ')} without blocking: "
            "it has no async capability for that. Call the _sync form in a thread."
        )
    return await asyncio.to_thread(function, *args, **kwargs)


def made_adapter(config: TaskProcessorConfig) -> TaskProcessorAdapter:
    """Return the adapter of a config, not initialized.

    Raises
    ------
    ValueError
        The class cannot be imported.
    TypeError
        The class is not an adapter.
    """
    path = config.adapter_path
    kind = import_definition(path) if isinstance(path, str) else path
    if not callable(kind):
        raise TypeError(f"adapter is {kind!r}; give a class, or its import path")
    adapter = kind(config)
    if not isinstance(adapter, TaskProcessorAdapter):
        raise TypeError(f"adapter is {kind!r}; it must return a TaskProcessorAdapter, not {adapter!r:.200}")
    return adapter
