"""Pickling of handles among the arguments of deployments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

from daskserve.cluster.protocols.base import Process
from daskserve.common.types import EndpointTag, InstanceName
from daskserve.context import current_replica
from daskserve.data.caller.calls.call_options import CallOptions
from daskserve.data.caller.calls.handle import Handle

#: The parts of an object that pickle stores; see `object.__reduce__`.
Reduced: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]


def reduce_handle(endpoint: EndpointTag, options: CallOptions) -> Reduced:
    """Return the reduced form of a handle that belongs to the instance of the process that unpickles it.

    It contains neither the instance nor the endpoint's state. So the same application always has the same
    pickle, and a new version of one deployment does not change its callers.
    """
    return bound_handle, (endpoint, options.differences())


def stand_in(handle: Handle, instance: InstanceName) -> Any:
    """Return `reduce_handle` of a handle of an instance; `NotImplemented` if it is of another instance."""
    if handle._instance not in ("", instance):
        return NotImplemented
    return reduce_handle(handle._endpoint, handle._options)


def bound_handle(endpoint: EndpointTag, changed: tuple[tuple[str, Any], ...] = ()) -> Handle:
    """Rebuild a handle from the arguments of `reduce_handle`.

    In a replica, it belongs to the replica's instance. Elsewhere it cannot make calls, but it can be
    deployed.
    """
    replica = current_replica.get()
    found = None if replica is None else replica.cluster
    # In a child process, the first call connects to the cluster.
    cluster = cast(Process, found) if hasattr(found, "listener") else None
    handle: Handle = Handle(
        "" if replica is None else replica.instance,
        endpoint,
        is_legacy=False,
        python_methods=None,
        cluster=cluster,
    ).options(**dict(changed))
    return handle
