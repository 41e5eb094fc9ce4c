"""Which replica, and which request, the current code runs for.

Context variables, so that each request sees its own values whatever thread or loop its code runs on. The
replica sets them in a copy of its actor's context before user code runs.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from daskserve.errors import ServeError
from daskserve.types import BackendTag, InstanceName, ReplicaTag


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    """The replica that the current code belongs to."""

    instance: InstanceName
    backend_tag: BackendTag
    replica_tag: ReplicaTag
    servable_object: Any = None
    # The process's seam to the cluster, typed loosely because this module is below it.
    cluster: Any = None


class ChildCalls:
    """The calls through handles that a request's code has made and that are not answered yet.

    When the request is cancelled, so are they. Async code is told of its cancellation, and may make further
    calls to clean up. A plain function is not told, and cannot be stopped; its later calls are cancelled too.
    """

    __slots__ = ("_is_cancelled", "_pending")

    def __init__(self) -> None:
        self._pending: set[Future[Any]] | None = None  # most requests call nobody
        self._is_cancelled = False

    def add(self, future: Future[Any]) -> None:
        """Take note of a call, from whatever thread it is made."""
        if self._pending is None:
            self._pending = set()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        # Looked at last, as `cancel` looks at the calls last: one of the two sees the other.
        if self._is_cancelled and asyncio._get_running_loop() is None:
            future.cancel()

    def cancel(self) -> None:
        """Cancel what is not answered yet."""
        self._is_cancelled = True
        for future in list(self._pending or ()):
            future.cancel()


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The request that the current code answers."""

    request_id: str = ""
    route: str = ""
    #: When it must have been answered, on the clock of the replica's event loop; None: whenever.
    deadline: float | None = None
    calls: ChildCalls = field(default_factory=ChildCalls, compare=False, repr=False)


current_replica: ContextVar[ReplicaContext | None] = ContextVar("daskserve_replica", default=None)
current_request: ContextVar[RequestContext | None] = ContextVar("daskserve_request", default=None)


def get_replica_context() -> ReplicaContext:
    """Return the replica this code runs in.

    Raises
    ------
    ServeError
        Outside a replica.
    """
    replica = current_replica.get()
    if replica is None:
        raise ServeError(
            "This code does not run in a daskserve replica; call it from a backend's constructor or methods."
        )
    return replica


def get_current_backend_tag() -> BackendTag:
    """Return the tag of the backend this code runs in; raises `ServeError` outside a replica."""
    return get_replica_context().backend_tag


def get_current_replica_tag() -> ReplicaTag:
    """Return the tag (``backend#SUFFIX``) of the replica this code runs in; `ServeError` outside one."""
    return get_replica_context().replica_tag
