"""The life cycle of a task, as a table of states and events.

A queue stores tasks, and consumers run them. All kinds of queues apply the functions of this module to a
`Task`, and write the result only if the task's ``revision`` is still the one that was read. So if two
consumers run the same task, because the first one seemed lost, only one of them ends it.

Times are seconds since the epoch, because tasks outlive processes; they are arguments.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from daskserve.data.tasks.errors import TaskConflictError

#: The longest delay before a retry, in seconds.
MAX_BACKOFF_S = 60.0


class TaskState(enum.StrEnum):
    """The state of a task, with the names of Celery, because programs for Ray Serve use these names."""

    #: Waits for a consumer, or for its time.
    QUEUED = "PENDING"
    RUNNING = "STARTED"
    #: Failed, and waits for the next attempt.
    RETRY = "RETRY"
    DONE = "SUCCESS"
    #: The task's last attempt failed.
    FAILED = "FAILURE"
    CANCELLED = "REVOKED"
    #: The task cannot run: no handler has its name, or its consumers were lost too often.
    DEAD = "REJECTED"


class TaskEvent(enum.StrEnum):
    """The events of a task."""

    CLAIMED = "claimed"
    DONE = "done"
    FAILED = "failed"
    EXHAUSTED = "exhausted"
    #: Returned by a consumer that stops; this does not count as an attempt.
    RELEASED = "released"
    #: The task's consumer has stopped renewing the lease.
    LOST = "lost"
    UNPROCESSABLE = "unprocessable"
    CANCELLED = "cancelled"
    #: A cancelled run has ended.
    STOPPED = "stopped"
    REQUEUED = "requeued"


_S, _E = TaskState, TaskEvent
TRANSITIONS: Mapping[tuple[TaskState, TaskEvent], TaskState] = {
    (_S.QUEUED, _E.CLAIMED): _S.RUNNING,
    (_S.RETRY, _E.CLAIMED): _S.RUNNING,
    (_S.QUEUED, _E.CANCELLED): _S.CANCELLED,
    (_S.RETRY, _E.CANCELLED): _S.CANCELLED,
    # The task's consumer sees the mark and cancels the run.
    (_S.RUNNING, _E.CANCELLED): _S.RUNNING,
    (_S.RUNNING, _E.DONE): _S.DONE,
    (_S.RUNNING, _E.FAILED): _S.RETRY,
    (_S.RUNNING, _E.EXHAUSTED): _S.FAILED,
    (_S.RUNNING, _E.RELEASED): _S.QUEUED,
    (_S.RUNNING, _E.LOST): _S.QUEUED,
    (_S.RUNNING, _E.UNPROCESSABLE): _S.DEAD,
    (_S.RUNNING, _E.STOPPED): _S.CANCELLED,
    (_S.FAILED, _E.REQUEUED): _S.QUEUED,
    (_S.DEAD, _E.REQUEUED): _S.QUEUED,
    (_S.CANCELLED, _E.REQUEUED): _S.QUEUED,
}
WAITING = frozenset({TaskState.QUEUED, TaskState.RETRY})
ENDED = frozenset({TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED, TaskState.DEAD})


@dataclass(frozen=True, slots=True)
class Task:
    """A task, as its queue keeps it.

    Attributes
    ----------
    payload : bytes
        The pickled arguments.
    digest : str
        A hash of the arguments, to compare tasks with the same id.
    revision : int
        Grows with each transition.
    attempts, retries, losses : int
        Number of runs, of failures, and of lost consumers.
    due_at : float
        When it may begin.
    owner : str
        The consumer that runs it; its lease ends at ``lease_until``.
    expires_at : float
        When a task that has ended is removed.
    """

    id: str
    queue: str
    name: str
    payload: bytes
    created_at: float
    due_at: float
    priority: int = 0
    digest: str = ""
    result_ttl_s: float | None = None
    state: TaskState = TaskState.QUEUED
    revision: int = 0
    attempts: int = 0
    retries: int = 0
    losses: int = 0
    owner: str = ""
    lease_until: float = 0.0
    is_cancelled: bool = False
    result: bytes | None = None
    error: str = ""
    ended_at: float = 0.0
    expires_at: float = 0.0
    progress: bytes | None = field(default=None, compare=False)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


#: The fields that never change, without the payload, and the fields that transitions change, without the
#: progress.
FIXED = ("id", "queue", "name", "created_at", "priority", "digest", "result_ttl_s")
CHANGED = tuple(each.name for each in fields(Task) if each.name not in {*FIXED, "payload", "progress"})


@dataclass(frozen=True, slots=True)
class RetryRules:
    """When failed tasks are retried, and how long tasks are kept after their end."""

    max_retries: int = 3
    backoff_s: float = 1.0
    max_backoff_s: float = MAX_BACKOFF_S
    #: The largest share that is subtracted from a delay at random, so that tasks that failed together are not
    #: retried together.
    jitter: float = 0.5
    max_losses: int = 10
    result_ttl_s: float = 86_400.0

    def delay_s(self, retries: int, chance: float) -> float:
        """Return the delay after a number of retries; ``chance`` is a random number in [0, 1)."""
        longest = min(self.max_backoff_s, self.backoff_s * 2.0 ** min(retries, 60))
        return longest * (1.0 - self.jitter * chance)


def move(task: Task, event: TaskEvent, now: float, **changes: object) -> Task:
    """Return the task after an event.

    Raises
    ------
    TaskConflictError
        The event does not fit the state of the task: it has ended, or no consumer runs it.
    """
    state = TRANSITIONS.get((task.state, event))
    if state is None:
        raise TaskConflictError(f"Task {task.id!r} is {task.state}, so it cannot be {event}.")
    if state is not TaskState.RUNNING:
        changes |= {"owner": "", "lease_until": 0.0}
    if state in ENDED:
        changes.setdefault("ended_at", now)
    return replace(task, state=state, revision=task.revision + 1, **changes)  # type: ignore[arg-type]


def claimed(task: Task, owner: str, now: float, lease_s: float) -> Task:
    """Return the task after a consumer has claimed it."""
    return move(
        task,
        TaskEvent.CLAIMED,
        now,
        owner=owner,
        lease_until=now + lease_s,
        attempts=task.attempts + 1,
        progress=None,
    )


def done(task: Task, result: bytes, now: float, rules: RetryRules) -> Task:
    """Return the task with its result."""
    return move(task, TaskEvent.DONE, now, result=result, error="", expires_at=_expiry(task, now, rules))


def failed(
    task: Task, error: str, now: float, chance: float, rules: RetryRules, *, is_final: bool = False
) -> Task:
    """Return the task after a failed attempt: waiting for a retry, or failed permanently."""
    if task.is_cancelled:
        return stopped(task, now, rules)
    retries = task.retries + 1
    if is_final or retries > rules.max_retries:
        expiry = _expiry(task, now, rules)
        return move(task, TaskEvent.EXHAUSTED, now, retries=retries, error=error, expires_at=expiry)
    due_at = now + rules.delay_s(task.retries, chance)
    return move(task, TaskEvent.FAILED, now, retries=retries, error=error, due_at=due_at)


def released(task: Task, now: float, rules: RetryRules) -> Task:
    """Return the task after its consumer has returned it, as if it had not begun."""
    if task.is_cancelled:
        return stopped(task, now, rules)
    return move(task, TaskEvent.RELEASED, now, attempts=task.attempts - 1)


def lost(task: Task, now: float, rules: RetryRules) -> Task:
    """Return the task after its consumer was lost: queued again, or dead if that happens too often."""
    if task.is_cancelled:
        return stopped(task, now, rules)
    losses = task.losses + 1
    if losses > rules.max_losses:
        text = f"Its consumer was lost {losses} times while it ran the task."
        return replace(unprocessable(task, text, now, rules), losses=losses)
    return move(task, TaskEvent.LOST, now, losses=losses)


def unprocessable(task: Task, error: str, now: float, rules: RetryRules) -> Task:
    """Return the task as dead, because no consumer can run it."""
    expiry = _expiry(task, now, rules)
    return move(task, TaskEvent.UNPROCESSABLE, now, error=error, expires_at=expiry)


def cancelled(task: Task, now: float, rules: RetryRules) -> Task:
    """Return the task as cancelled; a running task is only marked, and its consumer cancels the run."""
    expiry = 0.0 if task.state is TaskState.RUNNING else _expiry(task, now, rules)
    return move(task, TaskEvent.CANCELLED, now, is_cancelled=True, expires_at=expiry)


def stopped(task: Task, now: float, rules: RetryRules) -> Task:
    """Return a task that was cancelled while it ran, after its run has ended."""
    return move(task, TaskEvent.STOPPED, now, expires_at=_expiry(task, now, rules))


def requeued(task: Task, now: float) -> Task:
    """Return a task that has ended without success, queued again with all its retries."""
    return move(
        task,
        TaskEvent.REQUEUED,
        now,
        due_at=now,
        retries=0,
        losses=0,
        is_cancelled=False,
        error="",
        ended_at=0.0,
        expires_at=0.0,
    )


def _expiry(task: Task, now: float, rules: RetryRules) -> float:
    return now + (rules.result_ttl_s if task.result_ttl_s is None else task.result_ttl_s)
