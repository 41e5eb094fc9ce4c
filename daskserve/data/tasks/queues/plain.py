"""Tasks as plain values, for messages between a process and the queues of its instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from daskserve.data.tasks.queues.protocol import Change
from daskserve.data.tasks.states import Task, TaskState

NAMES = tuple(each.name for each in fields(Task))
STATE, PAYLOAD, PROGRESS = NAMES.index("state"), NAMES.index("payload"), NAMES.index("progress")


def plain_task(task: Task) -> list[Any]:
    """Return a task as plain values."""
    values = [getattr(task, name) for name in NAMES]
    values[STATE] = task.state.value
    return values


def task_of(values: Sequence[Any]) -> Task:
    """Return the task for plain values."""
    changed = list(values)
    changed[STATE] = TaskState(values[STATE])
    return Task(*changed)


def plain_change(change: Change) -> list[Any]:
    """Return a change as plain values, without large fields that no transition changes."""
    values = plain_task(change.task)
    values[PAYLOAD], values[PROGRESS] = b"", None
    return [values, None if change.letter is None else plain_task(change.letter)]


def change_of(values: Sequence[Any]) -> Change:
    """Return the change for plain values."""
    task, letter = values
    return Change(task_of(task), None if letter is None else task_of(letter))
