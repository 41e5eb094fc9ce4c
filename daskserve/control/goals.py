"""Goals: requested changes that are still in progress.

A backend has at most one pending goal. A newer goal supersedes it, which completes it for its callers.
Finished goals are kept for a while, so that a caller that lost its connection can still read the outcome.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from daskserve.control.records import (
    BackendRecord,
    Change,
    GoalRecord,
    GoalState,
    ReplicaRecord,
    to_plain,
)
from daskserve.control.state import State
from daskserve.errors import ServeError
from daskserve.payload import dump_error
from daskserve.types import GoalId, ReplicaState

#: Finished goals kept for callers that ask late. They are dropped by the hundred, so that hardly any change
#: pays for it.
KEPT_GOALS = 100
SWEEP_AT = 2 * KEPT_GOALS


def open_goal(
    state: State,
    change: Change,
    backend: BackendRecord,
    *,
    goal_id: GoalId,
    timeout_s: float | None,
) -> BackendRecord:
    """Add a pending goal for a backend to ``change``; return the backend's record with it.

    The previous goal is superseded. On failure, the backend returns to the last completed state.
    """
    current = state.backends.get(backend.tag)
    previous = None if current is None else to_plain(current)
    endpoint = state.endpoints.get(backend.tag) if backend.is_deployment else None
    previous_endpoint = None if endpoint is None or endpoint.is_legacy else to_plain(endpoint)
    if current is not None and current.goal in state.goals:
        old = state.goals[current.goal]
        change[old.key] = finish(old)
        previous = dict(old.previous) if old.previous is not None else None
        previous_endpoint = dict(old.previous_endpoint) if old.previous_endpoint is not None else None
    if current is not None and current.is_deleting:
        previous = previous_endpoint = None  # a backend that was being deleted must not return
    if previous is not None:
        previous["goal"] = None
    goal = GoalRecord(
        goal_id=goal_id,
        backend=backend.tag,
        state=GoalState.PENDING,
        number=1 + max((each.number for each in state.goals.values()), default=0),
        timeout_s=timeout_s,
        previous=previous,
        previous_endpoint=previous_endpoint,
    )
    change[goal.key] = goal
    _sweep(state.goals.values(), change)
    opened = replace(backend, goal=goal_id, last_error="")
    change[opened.key] = opened
    return opened


def finish(goal: GoalRecord, error: ServeError | None = None) -> GoalRecord:
    """Return the goal as done, or as failed with a reason."""
    if error is None:
        return replace(goal, state=GoalState.DONE, previous=None, previous_endpoint=None)
    return replace(
        goal, state=GoalState.FAILED, previous=None, previous_endpoint=None, error=dump_error(error)
    )


def is_reached(backend: BackendRecord, replicas: Iterable[ReplicaRecord]) -> bool:
    """Return whether what runs is what is wanted, and nothing else is left.

    The autoscaler may be on its way to more replicas or fewer: those do not count.
    """
    known = list(replicas)
    running = [each for each in known if each.state is ReplicaState.RUNNING]
    others = len(known) - len(running)
    if backend.scaled_to is not None and not backend.is_deleting:
        is_there = len(running) >= backend.needed_replicas
        others = sum(each.version != backend.version for each in known)
    else:
        is_there = len(running) == backend.num_replicas
    return (
        is_there
        and not others
        and all(each.version == backend.version and each.config_id == backend.config_id for each in running)
    )


def _sweep(goals: Iterable[GoalRecord], change: Change) -> None:
    finished = [each for each in goals if each.state is not GoalState.PENDING and each.key not in change]
    if len(finished) > SWEEP_AT:
        for each in sorted(finished, key=lambda goal: goal.number)[: len(finished) - KEPT_GOALS]:
            change[each.key] = None
