"""The interface of queues of tasks, independent of where the tasks are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from daskserve.data.tasks.errors import TaskConflictError, TaskQueueFullError
from daskserve.data.tasks.states import WAITING, Task, TaskState


class Change(NamedTuple):
    """A task after a transition; it is written only if the stored revision is the one from before the
    transition.

    ``letter`` is added to its own queue, without a limit, in the same step and only if the change is written.
    """

    task: Task
    letter: Task | None = None

    @property
    def revision(self) -> int:
        return self.task.revision - 1


class Lease(NamedTuple):
    """The right of a consumer to run a task, until the lease ends."""

    id: str
    attempts: int
    is_cancelled: bool


@dataclass(frozen=True, slots=True)
class QueueStats:
    """How many tasks a queue has in each state, and the age of the oldest that could run, in seconds."""

    counts: Mapping[str, int]
    oldest_s: float = 0.0

    @property
    def waiting(self) -> int:
        return sum(self.counts.get(state, 0) for state in WAITING)

    @property
    def running(self) -> int:
        return self.counts.get(TaskState.RUNNING, 0)


class TaskQueue(Protocol):
    """Stores tasks durably. All methods block; any thread may call them.

    Raises
    ------
    TaskQueueError
        Raised by any method: the queue cannot be reached, read or written.
    """

    def open(self) -> None:
        """Connect, and create missing parts of the queue."""

    def close(self) -> None:
        """Disconnect."""

    def add(self, tasks: Sequence[Task], max_waiting: int, now: float) -> list[tuple[Task, bool]]:
        """Add tasks in one step; return each as it is stored, and whether its id is new.

        Raises
        ------
        TaskQueueFullError
            More than ``max_waiting`` would wait; none is added.
        TaskConflictError
            The id belongs to a task with another handler or other arguments; none is added.
        """

    def claim(self, queue: str, owner: str, limit: int, now: float, lease_s: float) -> list[Task]:
        """Assign up to ``limit`` due tasks to a consumer, ordered by priority and due time."""

    def renew(self, queue: str, owner: str, ids: Iterable[str], until: float) -> None:
        """Renew the leases that the consumer still has."""

    def held(self, queue: str, owner: str) -> list[Lease]:
        """Return the tasks that a consumer still has."""

    def write(self, changes: Sequence[Change]) -> list[bool]:
        """Write changes in one step; return which of them were written."""

    def get(self, queue: str, ids: Sequence[str]) -> list[Task | None]:
        """Return tasks by id."""

    def expired(self, queue: str, now: float, limit: int) -> list[Task]:
        """Return running tasks whose lease has ended."""

    def purge(self, queue: str, now: float, limit: int) -> int:
        """Remove tasks whose time to live has ended; return their number."""

    def note(self, queue: str, id: str, attempts: int, progress: bytes) -> None:
        """Store the progress of a task if this attempt still runs."""

    def tasks(self, queue: str, state: TaskState, limit: int) -> list[Task]:
        """Return tasks in a state, without order."""

    def stats(self, queue: str, now: float) -> QueueStats:
        """Return how many tasks there are."""


@runtime_checkable
class WaitingQueue(Protocol):
    """A queue that wakes idle consumers, which otherwise poll."""

    async def wait(self, queue: str, interval_s: float) -> None:
        """Return once there may be a task; checks every ``interval_s`` for tasks that become due.

        Raises
        ------
        TaskQueueError
            The queue cannot be reached.
        """


def check_same(kept: Task, given: Task) -> None:
    """Raise `TaskConflictError` if a known id is used for a different task."""
    if (kept.name, kept.digest) != (given.name, given.digest):
        raise TaskConflictError(
            f"Queue {given.queue!r} has a task with the id {given.id!r}, with another handler or other "
            "arguments; give this one a different id."
        )


def check_room(queue: str, waiting: int, more: int, limit: int) -> None:
    """Raise `TaskQueueFullError` if more tasks would wait than are allowed."""
    if waiting + more > limit:
        raise TaskQueueFullError(
            f"{waiting} tasks wait in queue {queue!r}, and {more} more would exceed "
            f"max_queue_length={limit}; submit later, or add consumers."
        )
