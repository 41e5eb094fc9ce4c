"""The queues of an instance where they are kept: in the process that has its store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from daskserve.common.clock import time_of_day
from daskserve.data.tasks.queues.plain import change_of, plain_task, task_of
from daskserve.data.tasks.queues.sqlite import SqliteQueue
from daskserve.data.tasks.states import TaskState

#: How long consumers that have outlived a scheduler have to renew their leases at the next one.
GRACE_S = 15.0


class HostedQueues:
    """Answers the calls of `daskserve.data.tasks.queues.instance.InstanceQueue`, with plain values."""

    def __init__(self, path: Path) -> None:
        self._queue = SqliteQueue(path, synchronous=False)
        self._queue.open()
        self._queue.spare(time_of_day() + GRACE_S)

    def answer(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of `ANSWERS`."""
        return ANSWERS[method](self._queue, *arguments)

    def close(self) -> None:
        """Close the file."""
        self._queue.close()


def _open(queue: SqliteQueue) -> None:
    """Do nothing: the first call opens the file."""


def _add(queue: SqliteQueue, synchronous: bool, tasks: Sequence[Any], max_waiting: int, now: float) -> Any:
    queue.sync(synchronous)
    added = queue.add([task_of(each) for each in tasks], max_waiting, now)
    # The caller has those that are new.
    return [None if is_new else plain_task(task) for task, is_new in added]


def _claim(queue: SqliteQueue, *arguments: Any) -> Any:
    return [plain_task(each) for each in queue.claim(*arguments)]


def _held(queue: SqliteQueue, name: str, owner: str) -> Any:
    return [tuple(each) for each in queue.held(name, owner)]


def _write(queue: SqliteQueue, synchronous: bool, changes: Sequence[Any]) -> Any:
    queue.sync(synchronous)
    return queue.write([change_of(each) for each in changes])


def _get(queue: SqliteQueue, name: str, ids: Sequence[str]) -> Any:
    return [None if each is None else plain_task(each) for each in queue.get(name, ids)]


def _expired(queue: SqliteQueue, *arguments: Any) -> Any:
    return [plain_task(each) for each in queue.expired(*arguments)]


def _tasks(queue: SqliteQueue, name: str, state: str, limit: int) -> Any:
    return [plain_task(each) for each in queue.tasks(name, TaskState(state), limit)]


def _stats(queue: SqliteQueue, name: str, now: float) -> Any:
    found = queue.stats(name, now)
    return [dict(found.counts), found.oldest_s]


def _ready(queue: SqliteQueue, name: str) -> Any:
    return queue.ready(name, time_of_day())


ANSWERS: Mapping[str, Callable[..., Any]] = {
    "open": _open,
    "add": _add,
    "claim": _claim,
    "renew": SqliteQueue.renew,
    "held": _held,
    "write": _write,
    "get": _get,
    "expired": _expired,
    "purge": SqliteQueue.purge,
    "note": SqliteQueue.note,
    "tasks": _tasks,
    "stats": _stats,
    "ready": _ready,
    "names": SqliteQueue.names,
}
