"""The task queues of an instance, in the process that has the instance's store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from daskserve.cluster.protocols.base import TaskQueueHost
from daskserve.common.clock import time_of_day
from daskserve.data.tasks.queues.plain import change_of, plain_task, task_of
from daskserve.data.tasks.queues.protocol import Lease, QueueStats
from daskserve.data.tasks.queues.sqlite import SqliteQueue
from daskserve.data.tasks.states import Task

#: Time for consumers to renew their leases after the scheduler was replaced.
GRACE_S = 15.0


#: The methods whose arguments are plain values.
PASSED = frozenset(
    ("claim", "renew", "held", "get", "expired", "purge", "note", "tasks", "stats", "names"),
)


class HostedQueues(TaskQueueHost):
    """Answers the calls of `daskserve.data.tasks.queues.instance.InstanceQueue`, with plain values."""

    def __init__(self, path: Path) -> None:
        self._queue = SqliteQueue(path, synchronous=False)
        self._queue.open()
        self._queue.spare(time_of_day() + GRACE_S)

    def answer(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of the queue, or ``ready``: the number of tasks of a queue that could run now."""
        if method in PASSED:
            return _plain(getattr(self._queue, method)(*arguments))
        if method == "ready":
            return self._queue.ready(arguments[0], time_of_day())
        if method == "open":
            return None  # the first call opens the file
        synchronous, items, *others = arguments
        self._queue.sync(synchronous)
        if method == "write":
            return self._queue.write([change_of(each) for each in items])
        if method != "add":
            raise ValueError(f"queues of tasks have no method {method!r}")
        added = self._queue.add([task_of(each) for each in items], *others)
        # The caller already has the new tasks.
        return [None if is_new else plain_task(task) for task, is_new in added]

    def close(self) -> None:
        """Close the file."""
        self._queue.close()


def _plain(found: Any) -> Any:
    """Return the result of a method of the queue as plain values."""
    if isinstance(found, Task):
        return plain_task(found)
    if isinstance(found, QueueStats):
        return [dict(found.counts), found.oldest_s]
    if isinstance(found, Lease):
        return tuple(found)
    return [_plain(each) for each in found] if isinstance(found, list) else found
