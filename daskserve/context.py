"""Which replica, and which request, the current code runs for.

Context variables, so that each request sees its own values whatever thread or loop its code runs on. The
replica sets them in a copy of its actor's context before user code runs.
"""

from __future__ import annotations

from collections.abc import Set
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from daskserve.errors import ServeError
from daskserve.figures.replica import ReplicaFigures
from daskserve.loops.event_loop import running_loop
from daskserve.loops.pending_call import PendingCall
from daskserve.types import BackendTag, InstanceName, ReplicaTag


class HasLink(Protocol):
    """A view of the cluster, as far as this module knows it; see `daskserve.cluster.base.Process`."""

    @property
    def link(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    """The replica that the current code belongs to."""

    instance: InstanceName
    backend_tag: BackendTag
    replica_tag: ReplicaTag
    servable_object: Any = None
    #: The process's view of the cluster; None in what only pretends to be a replica.
    cluster: HasLink | None = None
    #: How many requests the replica runs at a time; 0 if that is not known.
    max_concurrent_queries: int = 0
    #: What the replica counts; None in what only pretends to be one.
    figures: ReplicaFigures | None = None


@dataclass
class RequestContext:
    """The request that the current code answers, and the calls through handles that this code has made.

    When the request is cancelled, so are those calls that are not answered yet. Async code is told of its
    cancellation, and may make further calls to clean up. A plain function is not told, and cannot be stopped;
    its later calls are cancelled too.
    """

    # One is made for each request, so it is not frozen, nor has it a set before there are calls.
    request_id: str = ""
    route: str = ""
    #: When it must have been answered, on the clock of the replica's event loop; None: whenever.
    deadline: float | None = None
    # Of the class, until they change.
    _calls: ClassVar[Set[PendingCall[Any]]] = frozenset()
    _is_cancelled: ClassVar[bool] = False

    def add_call(self, call: PendingCall[Any]) -> None:
        """Take note of a call, from whatever thread it is made."""
        calls: Any = self._calls
        if not calls:  # a set of its own, made in one step for all threads
            calls = vars(self).setdefault("_calls", set())
        calls.add(call)
        call.add_done_callback(calls.discard)
        # Looked at last, as `cancel_calls` looks at the calls last: one of the two sees the other.
        if self._is_cancelled and running_loop() is None:
            call.cancel()

    def cancel_calls(self) -> None:
        """Cancel what is not answered yet."""
        vars(self)["_is_cancelled"] = True
        for call in list(self._calls):
            call.cancel()


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
