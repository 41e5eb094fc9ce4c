"""The task that the current code runs, and its progress."""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from daskserve.context import current_replica, current_request
from daskserve.data.tasks.adapter import made_adapter
from daskserve.data.tasks.durable import DurableAdapter
from daskserve.data.tasks.errors import TaskQueueError
from daskserve.data.tasks.marks import CONSUMER
from daskserve.data.tasks.payloads import joined
from daskserve.errors import NotInReplicaError
from daskserve.payload.pickling import dump

logger = logging.getLogger("daskserve.tasks")

#: The attribute of a consumer's object with its `ProgressWriter`.
WRITER = "__daskserve_task_progress__"
#: Minimum time between two writes of progress.
INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class TaskContext:
    """The task that the current code runs.

    Attributes
    ----------
    id : str
        A key that makes external writes idempotent, because a task may run again.
    attempt : int
        1 for the first run.
    """

    id: str
    name: str
    queue_name: str
    attempt: int
    _writer: ProgressWriter | None = field(default=None, repr=False, compare=False)

    def report_progress(self, value: Any) -> None:
        """Publish the progress of the task, such as a number or a dict; returns at once.

        If values follow each other within a tenth of a second, only the last one is published.
        """
        if self._writer is not None:
            self._writer.report(self.id, self.attempt, value)


def get_task_context() -> TaskContext:
    """Return the task that the current code runs.

    Raises
    ------
    NotInReplicaError
        It runs no task of a `task_consumer`.
    """
    request = current_request.get()
    facts: Any = None if request is None else request.task
    if facts is None:
        raise NotInReplicaError(
            "This code does not run a task; call it from a method with @serve.tasks.task_handler, in a task."
        )
    id, name, queue, attempt = facts
    replica = current_replica.get()
    target = None if replica is None else replica.servable_object
    return TaskContext(id, name, queue, attempt, _writer_of(target))


def _writer_of(target: Any) -> ProgressWriter | None:
    spec = getattr(type(target), CONSUMER, None)
    if spec is None:
        return None
    writer: ProgressWriter | None = vars(target).get(WRITER)
    if writer is None:
        adapter = made_adapter(spec.config)
        if not isinstance(adapter, DurableAdapter):
            return None
        writer = vars(target).setdefault(WRITER, ProgressWriter(adapter))
        weakref.finalize(target, adapter.queue.close)
    return writer


class ProgressWriter:
    """Writes progress in a thread, so that code that reports it does not wait."""

    def __init__(self, adapter: DurableAdapter) -> None:
        self._adapter = adapter
        self._lock = threading.Lock()
        self._values: dict[tuple[str, int], Any] = {}
        self._is_writing = False
        self._pause = threading.Event()

    def report(self, id: str, attempt: int, value: Any) -> None:
        """Write a value soon."""
        with self._lock:
            self._values[id, attempt] = value
            if self._is_writing:
                return
            self._is_writing = True
        threading.Thread(target=self._write, name="daskserve-task-progress", daemon=True).start()

    def _write(self) -> None:
        while True:
            with self._lock:
                values, self._values = self._values, {}
                if not values:
                    self._is_writing = False
                    return
            name, queue = self._adapter.config.queue_name, self._adapter.queue
            for (id, attempt), value in values.items():
                try:
                    queue.note(name, id, attempt, joined(dump(value, is_final=True)))
                except TaskQueueError as error:
                    logger.warning("The progress of task %r is not kept: %s", id, error)
                except Exception:  # a value that cannot be pickled may raise anything
                    logger.exception("The progress of task %r is not kept", id)
            self._pause.wait(INTERVAL_S)
