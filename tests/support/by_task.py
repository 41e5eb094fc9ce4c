"""Turns a coroutine function into an actor's request, for the actors and clusters of tests."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from daskserve.cluster.protocols.base import TaskRequest
from daskserve.common.types import Load


def by_task(respond: Callable[..., Coroutine[Any, Any, Load]]) -> Callable[..., TaskRequest]:
    """Return a function that takes the arguments before ``receive`` and ``send``, and returns a request."""

    def request(*arguments: Any) -> TaskRequest:
        return TaskRequest(partial(respond, *arguments))

    return request
