"""When an instance that takes over from another one, on the same store, may begin to listen. Pure."""

from __future__ import annotations

import enum

from daskserve.control.observed import Observed
from daskserve.control.state import State
from daskserve.types import ReplicaState


class Listening(enum.Enum):
    """Whether an instance has proxies: once all replicas run, now, or no more because it ends."""

    LATER = enum.auto()
    NOW = enum.auto()
    NO_MORE = enum.auto()


def all_run(state: State, observed: Observed) -> bool:
    """Return whether this controller has seen the replicas that every settled backend needs.

    A backend whose change is under way may never get there, and did not serve before either.
    """
    for tag, backend in state.backends.items():
        if backend.goal is None and not backend.is_deleting:
            seen = [
                each
                for each in state.replicas_of(tag)
                if each.state is ReplicaState.RUNNING and each.tag in observed.ready
            ]
            if len(seen) < backend.needed_replicas:
                return False
    return True
