"""Handles of a deployment's actors, for the code of its replicas."""

from __future__ import annotations

from daskserve.common.formatting import capitalized
from daskserve.context import get_replica_context
from daskserve.data.caller.calls.bound import bound_handle
from daskserve.data.caller.calls.handle import Handle
from daskserve.errors import BadRequestError


def get_deployment_actor(name: str) -> Handle:
    """Return the handle of one of the actors that the replicas of this deployment share.

    Call its methods as with any handle: ``await actor.method.remote(...)``, or in plain functions
    ``actor.method.remote(...).result()``.

    Raises
    ------
    BadRequestError
        A `ValueError`: the deployment has no actor of this name.
    ServeError
        The code does not run in a replica.
    """
    replica = get_replica_context()
    tag = replica.actors.get(name)
    if tag is None:
        known = ", ".join(map(repr, replica.actors)) or "none"
        raise BadRequestError(
            f"{capitalized(replica.display_name)} has no actor {name!r}; it has: {known}. Add it "
            "to the option deployment_actors."
        )
    return bound_handle(tag)
