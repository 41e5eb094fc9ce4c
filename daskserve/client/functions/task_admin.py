"""Operations on queues of tasks: list, show, cancel and retry tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

from daskserve.client.client import Client
from daskserve.client.functions.task_queues import instantiate_adapter_from_config
from daskserve.common.clock import time_of_day
from daskserve.data.tasks.config import InstanceAdapterConfig, TaskProcessorConfig
from daskserve.data.tasks.durable import DurableAdapter
from daskserve.data.tasks.errors import TaskConflictError
from daskserve.data.tasks.marks import CONSUMER
from daskserve.data.tasks.payloads import error_parts, load
from daskserve.data.tasks.queues.instance import InstanceQueue
from daskserve.data.tasks.states import Task, TaskState
from daskserve.errors import BadRequestError, NotFoundError
from daskserve.payload.importing import import_definition

#: The states of tasks that ended without a result, in the order in which they are queued again.
DEAD = (TaskState.FAILED, TaskState.DEAD)
#: Number of tasks that are read at a time.
BATCH = 500
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

#: Connects to the instance of a command, if it needs one.
Connect = Callable[[], AbstractContextManager[Client]]


class TaskAdmin:
    """The tasks of one queue."""

    def __init__(self, adapter: DurableAdapter) -> None:
        self._adapter = adapter
        self._name = adapter.config.queue_name

    def close(self) -> None:
        """Disconnect."""
        self._adapter.shutdown()

    def counts(self) -> dict[str, Any]:
        """Return the number of tasks by state, and the age of the oldest waiting task in seconds."""
        return {"queue": self._name, **self._adapter.get_metrics_sync()}

    def tasks(self, states: Sequence[str], limit: int) -> list[dict[str, Any]]:
        """Return tasks in these states; within each state, the oldest first."""
        found: list[Task] = []
        now = time_of_day()
        for state in map(TaskState, states):
            left = limit - len(found)
            if not left:
                break
            known = self._find(state, left, lambda each: not each.has_ended or each.expires_at > now)
            found += sorted(known, key=lambda each: each.due_at)
        return [_shown(each) for each in found]

    def _find(self, state: TaskState, limit: int, is_wanted: Callable[[Task], bool]) -> list[Task]:
        asked = limit
        while True:
            read = self._adapter.queue.tasks(self._name, state, asked)
            found = [each for each in read if is_wanted(each)]
            if len(found) >= limit or len(read) < asked:
                return found[:limit]
            asked *= 2  # matching tasks may follow those that were read

    def show(self, id: str) -> dict[str, Any]:
        """Return a task, with its result or error."""
        task = self._adapter.find(id)
        summary, traceback = error_parts(task.error)
        rest = {"result": _loaded(task.result), "error": summary, "traceback": traceback}
        return {**_shown(task), "progress": _loaded(task.progress), **rest}

    def cancel(self, id: str) -> bool:
        """Cancel a task; return False if it has already ended."""
        return self._adapter.cancel_task_sync(id)

    def retry(self, id: str) -> None:
        """Queue again a task that has failed, was cancelled, or could not be run."""
        self._adapter.retry_task_sync(id)

    def requeue(self) -> list[str]:
        """Queue again all tasks that failed permanently or could not be run; return their ids.

        Each task is queued once. Tasks that end after the call has begun are not queued again, even if they
        fail again. The same holds for tasks that other programs change during the call.
        """
        begun, ids, seen = time_of_day(), list[str](), set[str]()

        def is_wanted(task: Task) -> bool:
            # The clocks of the consumers may be behind.
            return task.ended_at <= begun and task.id not in seen

        for state in DEAD:
            while found := self._find(state, BATCH, is_wanted):
                seen.update(each.id for each in found)
                for each in found:
                    try:
                        self.retry(each.id)
                    # another program dropped it or queued it again
                    except (NotFoundError, TaskConflictError):
                        continue
                    ids.append(each.id)
        return ids


@contextmanager
def opened_queue(queue: str, connect: Connect) -> Iterator[TaskAdmin]:
    """Yield a queue: one that the instance keeps, by name, or one of a config, by its import path.

    Raises
    ------
    BadRequestError The queue belongs to an adapter that is not daskserve's own.
    """
    config = _config_of(queue)
    if isinstance(config.adapter_config, InstanceAdapterConfig):
        with connect() as client:
            yield _admin(config, client)
        return
    with closing(_admin(config, None)) as admin:
        yield admin


def queue_counts(connect: Connect) -> list[dict[str, Any]]:
    """Return how many tasks each queue of the instance has."""
    with connect() as client:
        connection = client._connection
        queue = InstanceQueue(synchronous=False)
        queue.join(connection.cluster_connection, connection.instance)
        return [_admin(TaskProcessorConfig(queue_name=name), client).counts() for name in queue.names()]


def _config_of(queue: str) -> TaskProcessorConfig:
    if _IMPORT_PATH.fullmatch(queue) is None:
        return TaskProcessorConfig(queue_name=queue)
    found: Any = import_definition(queue)
    found = getattr(getattr(found, CONSUMER, None), "config", found)
    if not isinstance(found, TaskProcessorConfig):
        raise BadRequestError(
            f"{queue} is a {type(found).__name__}; name a TaskProcessorConfig or the class of a task_consumer"
        )
    return found


def _admin(config: TaskProcessorConfig, client: Client | None) -> TaskAdmin:
    adapter = instantiate_adapter_from_config(config, client=client)
    if not isinstance(adapter, DurableAdapter):
        adapter.shutdown()
        raise BadRequestError(
            f"Queue {config.queue_name!r} has the adapter {type(adapter).__name__}; use its broker's tools"
        )
    return TaskAdmin(adapter)


def _shown(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "task": task.name,
        "status": task.state.value,
        "attempts": task.attempts,
        "priority": task.priority,
        "created_at": task.created_at,
        "due_at": task.due_at,
        "ended_at": task.ended_at or None,
        "owner": task.owner,
    }


def _loaded(data: bytes | None) -> Any:
    """Return a pickled value, or a string that says why it cannot be loaded here."""
    if not data:
        return None
    try:
        return load(data)
    except Exception as error:  # unpickling runs any code
        return f"<{len(data)} bytes that cannot be loaded here: {type(error).__name__}: {error}>"
