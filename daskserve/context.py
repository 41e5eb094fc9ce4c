"""Which replica, and which request, the current code runs for.

Context variables, so that each request sees its own values whatever thread or loop its code runs on. The
replica sets them in a copy of its actor's context before user code runs.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The request that the current code answers."""

    request_id: str = ""
    route: str = ""


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
