"""The names of priorities in the options of handles; ``priority_config`` has their numbers."""

from __future__ import annotations

from daskserve.common.types import described
from daskserve.data.caller.request_routers.priorities import is_number
from daskserve.data.caller.routing.replica_set import ReplicaSet, priority_names
from daskserve.data.caller.routing.router import Router
from daskserve.errors import BadRequestError


def check_priority(priority: str, *candidates: ReplicaSet) -> None:
    """Raise `BadRequestError` unless one of the backends that a call may go to knows the name."""
    known = {name for each in candidates for name in priority_names(each)}
    if priority not in known and not is_number(priority):
        names = f"a name of its priority_config: {', '.join(map(repr, sorted(known)))}"
        remedy = names if known else "give it a priority_config that has this name in its classes"
        called = described(candidates[0].tag, "Deployment")
        raise BadRequestError(f"{called} has no priority {priority!r}. Use a number, or {remedy}.")


async def wait_and_check_priority(priority: str, router: Router) -> None:
    """Check a name as `check_priority` does, once the backends with traffic are known."""
    if candidates := router.replica_sets():
        for each in candidates:
            await each.wait_until_known()
        check_priority(priority, *candidates)
