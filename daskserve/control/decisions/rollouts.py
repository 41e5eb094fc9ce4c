"""Pausing, promoting and aborting a rollout. Pure: each function returns the change, or raises."""

from __future__ import annotations

from daskserve.common.copying import replace
from daskserve.common.formatting import capitalized
from daskserve.control.decisions import goals
from daskserve.control.decisions.rollout_plan import A_PROGRAM, paused, promoted
from daskserve.control.records.records import BackendRecord, Change, GoalRecord
from daskserve.control.records.rollout import RolloutState
from daskserve.control.records.state import State
from daskserve.errors import NotFoundError, RolloutError


def _going_on(backend: BackendRecord, doing: str) -> RolloutState:
    if backend.canary is not None:
        return backend.canary
    ended = backend.rollout
    why = "" if ended is None else f": it is {ended.phase}, {ended.why.rstrip('.')}"
    raise NotFoundError(f"There is no rollout of {backend.display_name} to {doing}{why}.")


def pause(backend: BackendRecord, wall: float, *, by: str = "") -> Change:
    """Keep a rollout at its current step until it is promoted or aborted; its gates still apply."""
    rollout = _going_on(backend, "pause")
    return {backend.key: replace(backend, rollout=paused(rollout, wall, by))}


def promote(backend: BackendRecord, wall: float, *, full: bool, request_id: str = "", by: str = "") -> Change:
    """Continue a rollout with its next step, even if it is paused; with ``full``, complete it.

    The retry of a call changes nothing.
    """
    if request_id and backend.rollout is not None and backend.rollout.promoted_by == request_id:
        return {}
    rollout, plan = _going_on(backend, "promote"), backend.config.rollout
    assert plan is not None
    after = promoted(rollout, plan, wall, full=full, by=by or A_PROGRAM)
    if after is rollout:
        return {}
    return {backend.key: replace(backend, rollout=replace(after, promoted_by=request_id))}


def abort(state: State, backend: BackendRecord, wall: float, by: str) -> Change:
    """Roll back the change of a rollout: the old version gets all traffic, and the new one stops.

    Aborting a rollout that was rolled back changes nothing.
    """
    ended = backend.rollout
    if ended is not None and ended.phase.is_undone:
        return {}
    rollout, goal = _going_on(backend, "abort"), _goal_of(state, backend)
    if goal is None:
        raise NotFoundError(
            f"The rollout of {backend.display_name} cannot be aborted, because the record from before it is "
            "lost; promote the rollout instead."
        )
    new, old = rollout.names
    error = RolloutError(
        f"{capitalized(backend.display_name)}: the rollout of version '{new}' was aborted by "
        f"{by or A_PROGRAM}; version '{old}' has all traffic.",
        by=by or A_PROGRAM,
    )
    return goals.rolled_back(state, goal, error, backend, wall)


def _goal_of(state: State, backend: BackendRecord) -> GoalRecord | None:
    goal = state.goals.get(backend.goal or "")
    app = state.apps.of(backend)
    if goal is None and app is not None:
        goal = state.goals.get(app.goal or "")
    return goal if goal is not None and goal.is_pending else None
