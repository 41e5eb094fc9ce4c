"""The errors of queues of tasks."""

from __future__ import annotations

from daskserve.errors import BadRequestError, ServeError, UnavailableError


class TaskConflictError(BadRequestError):
    """A task is in a state that does not allow the change, or its id belongs to another task."""

    http_status = 409


class TaskQueueFullError(ServeError):
    """A queue of tasks has as many waiting tasks as ``max_queue_length`` allows; submit later."""

    http_status = 429
    is_retryable = True


class TaskQueueError(UnavailableError):
    """A queue of tasks cannot be reached, or its file cannot be read or written."""

    public_reason = "a queue of tasks cannot be reached"
