"""A queue of tasks that the instance itself keeps, in the process that has its store.

Each call is one message to that process. It works on any machine from which programs, replicas and Dask tasks
reach the scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

from daskserve.cluster.protocols.base import ClientConnection
from daskserve.common.types import InstanceName
from daskserve.context import current_replica
from daskserve.data.tasks.errors import TaskQueueError
from daskserve.data.tasks.queues.plain import plain_change, plain_task, task_of
from daskserve.data.tasks.queues.protocol import Change, Lease, QueueStats
from daskserve.data.tasks.states import Task, TaskState
from daskserve.errors import ClosedError, InstanceError, NotRunningError, UnavailableError

#: Timeout of the scheduler's answer; it is long because the scheduler may just be replaced.
REPLY_S = 5.0
#: How long an idle consumer waits for a task before it calls again.
WAIT_S = 10.0
#: Errors after which the instance may come back.
_UNREACHABLE = (OSError, InstanceError, ClosedError, UnavailableError)


class InstancePlace(NamedTuple):
    """A process's connection to an instance."""

    connection: ClientConnection
    instance: InstanceName


class InstanceQueue:
    """A `daskserve.data.tasks.queues.protocol.TaskQueue` at an instance.

    By default, it is the instance of the replica that has created this object; `join` selects another one.
    """

    def __init__(self, *, synchronous: bool) -> None:
        self._synchronous = synchronous
        self._replica = current_replica.get()
        self._place: InstancePlace | None = None

    def join(self, connection: ClientConnection, instance: InstanceName) -> None:
        """Use this instance from now on."""
        self._place = InstancePlace(connection, instance)

    def _found(self) -> InstancePlace:
        if self._place is None:
            replica = self._replica
            if replica is None or replica.cluster is None:
                raise NotRunningError(
                    "The queue is stored in an instance, but this code does not run in one of its "
                    "replicas; create the adapter with serve.tasks.instantiate_adapter_from_config(config, "
                    "client=serve.connect())"
                )
            # In a child process, this connects the process's own client.
            self._place = InstancePlace(replica.cluster.connection, replica.instance)
        return self._place

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            connection, instance = self._found()
            return connection.sync(_answered(connection, instance, method, arguments))
        except TaskQueueError:
            raise
        except (*_UNREACHABLE, CancelledError) as error:
            raise _unreachable(error) from error

    def open(self) -> None:
        self._call("open")

    def close(self) -> None:
        """Do nothing: the connection belongs to the process."""

    def add(self, tasks: Sequence[Task], max_waiting: int, now: float) -> list[tuple[Task, bool]]:
        kept = self._call("add", self._synchronous, [plain_task(each) for each in tasks], max_waiting, now)
        return [
            (given, True) if found is None else (task_of(found), False)
            for given, found in zip(tasks, kept, strict=True)
        ]

    def claim(self, queue: str, owner: str, limit: int, now: float, lease_s: float) -> list[Task]:
        return [task_of(each) for each in self._call("claim", queue, owner, limit, now, lease_s)]

    async def wait(self, queue: str, interval_s: float) -> None:
        connection, instance = self._found()
        try:
            arguments = [queue, interval_s, WAIT_S]
            await connection.wait(_answered(connection, instance, "wait", arguments, WAIT_S + REPLY_S))
        except _UNREACHABLE as error:
            raise _unreachable(error) from error

    def renew(self, queue: str, owner: str, ids: Iterable[str], until: float) -> None:
        self._call("renew", queue, owner, list(ids), until)

    def held(self, queue: str, owner: str) -> list[Lease]:
        return [Lease(*each) for each in self._call("held", queue, owner)]

    def write(self, changes: Sequence[Change]) -> list[bool]:
        return list(self._call("write", self._synchronous, [plain_change(each) for each in changes]))

    def get(self, queue: str, ids: Sequence[str]) -> list[Task | None]:
        return [None if each is None else task_of(each) for each in self._call("get", queue, list(ids))]

    def expired(self, queue: str, now: float, limit: int) -> list[Task]:
        return [task_of(each) for each in self._call("expired", queue, now, limit)]

    def purge(self, queue: str, now: float, limit: int) -> int:
        found: int = self._call("purge", queue, now, limit)
        return found

    def note(self, queue: str, id: str, attempts: int, progress: bytes) -> None:
        self._call("note", queue, id, attempts, progress)

    def tasks(self, queue: str, state: TaskState, limit: int) -> list[Task]:
        return [task_of(each) for each in self._call("tasks", queue, state.value, limit)]

    def names(self) -> list[str]:
        """Return the names of the queues of the instance that have tasks."""
        return list(self._call("names"))

    def stats(self, queue: str, now: float) -> QueueStats:
        counts, oldest_s = self._call("stats", queue, now)
        return QueueStats(counts, oldest_s)


def _unreachable(error: BaseException) -> TaskQueueError:
    return TaskQueueError(
        f"The queues of tasks of the instance cannot be reached: {type(error).__name__}: "
        f"{str(error).rstrip('.')}. "
        "Try again once its scheduler runs."
    )


async def _answered(
    connection: ClientConnection,
    instance: InstanceName,
    method: str,
    arguments: Sequence[Any],
    timeout_s: float = REPLY_S,
) -> Any:
    async with asyncio.timeout(timeout_s):
        return await connection.cluster(instance).tasks.call(method, arguments)
