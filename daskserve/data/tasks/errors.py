"""The errors of queues of tasks."""

from __future__ import annotations

from daskserve.errors import BadRequestError, ServeError


class TaskConflictError(BadRequestError):
    """A task is in a state that does not allow the change, or its id belongs to another task."""

    http_status = 409


class TaskQueueFullError(ServeError):
    """A queue of tasks has as many waiting tasks as ``max_queue_length`` allows; submit later."""

    http_status = 429
    is_retryable = True


class TaskQueueError(ServeError):
    """A queue of tasks cannot be reached, or its file cannot be read or written."""

    http_status = 503
    is_retryable = True
