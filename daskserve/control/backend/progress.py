"""The time limits of changes, and the progress of a change. Pure.

A change with ``timeout_s`` must be complete within that time. Any other change fails after
``progress_timeout_s`` without progress. Progress is:

1. A replica was placed, became ready, applied the config, began to drain or has stopped.
2. A replica is at work: its environment is installed, its constructor or ``reconfigure`` runs, or its last
   requests end. Each of these has its own time limit.

The second rule does not apply while replicas wait for room, because other replicas' work does not make room
for them. A change whose replicas keep failing ends after ``max_constructor_retry_count``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from daskserve.common.formatting import capitalized, counted, shown
from daskserve.common.types import BackendTag, ReplicaState, ReplicaTag, short_tag
from daskserve.control.backend import application as app_state
from daskserve.control.backend.inputs import Step, StepInputs
from daskserve.control.decisions import goals
from daskserve.control.observed.lifecycle import PLACED_STATES
from daskserve.control.observed.observed import Activity, Observed
from daskserve.control.records.config_ids import is_outdated
from daskserve.control.records.records import BackendRecord, Change, GoalRecord, ReplicaRecord
from daskserve.control.records.state import State
from daskserve.errors import NoCapacityError, RequestTimeoutError, ServeError

Replicas: TypeAlias = Mapping[ReplicaTag, ReplicaRecord]

#: Minimum time of a new controller to observe the progress of a change that it takes over.
SETTLE_S = 10.0
#: Interval at which a slow change logs what it waits for.
LOG_S = 30.0
#: States in which a replica may be at work.
_TRANSIENT = frozenset({ReplicaState.STARTING, ReplicaState.SHOULD_STOP, ReplicaState.STOPPING})


def is_overdue(
    inputs: StepInputs, step: Step, goal: GoalRecord, backend: BackendRecord, replicas: Replicas
) -> bool:
    """Return whether a change has taken too long, given what the step has changed so far."""
    limit_s, deadline = goal.limit_s, inputs.observed.deadlines.get(goal.goal_id)
    full_from = step.notes.full_from
    if limit_s is None or deadline is None or is_holding(backend, replicas.values()):
        return False
    if goal.timeout_s is not None:
        return inputs.now >= deadline
    if full_from is not None:
        return inputs.now >= full_from + limit_s and not makes_room(inputs.observed, backend, replicas)
    return (
        inputs.now >= deadline
        and not makes_progress(inputs.state, backend, step.change)
        and not is_at_work(inputs.state, inputs.observed, goal, backend)
    )


def note(
    inputs: StepInputs, step: Step, goal: GoalRecord, backend: BackendRecord, replicas: Replicas
) -> None:
    """Set the deadline of a change at the end of a step, and periodically log what it waits for."""
    limit_s, deadline, notes = goal.limit_s, inputs.observed.deadlines.get(goal.goal_id), step.notes
    if limit_s is not None:
        if deadline is None:
            tags = _tags(inputs.state, goal, backend)
            members = [each for tag in tags for each in inputs.state.replicas_of(tag)]
            deadline = inputs.now + _left_s(inputs, goal, limit_s, members)
            notes.deadlines[goal.goal_id] = deadline
        elif goal.timeout_s is None and (
            makes_progress(inputs.state, backend, step.change)
            or (inputs.now >= deadline and is_at_work(inputs.state, inputs.observed, goal, backend))
        ):
            deadline = notes.deadlines[goal.goal_id] = inputs.now + limit_s
        if is_holding(backend, replicas.values()):
            deadline = notes.deadlines[goal.goal_id] = inputs.now + limit_s
        if goal.timeout_s is None and notes.full_from is not None:
            if makes_room(inputs.observed, backend, replicas):
                notes.full_from = inputs.now
            deadline = notes.full_from + limit_s
        if deadline > inputs.now:  # otherwise the change waits for another deployment
            step.wake(deadline)
    _log_waiting(inputs, step, backend, replicas.values())


def _log_waiting(
    inputs: StepInputs, step: Step, backend: BackendRecord, replicas: Iterable[ReplicaRecord]
) -> None:
    notes, replicas = step.notes, list(replicas)
    if is_holding(backend, replicas):
        return
    is_due = notes.logged_at is not None and inputs.now >= notes.logged_at + LOG_S
    if is_due and app_state.is_late(inputs.state, inputs.observed, backend, replicas):
        parts = (notes.waiting, busy_text(inputs.observed, backend, replicas, step_s=1.0))
        wanted = counted(backend.needed_replicas, "replica runs", "replicas run")
        count = f"{running(backend, replicas)} of {wanted}"
        step.messages.append(
            f"A change of {backend.display_name} takes long: {'; '.join([count, *filter(None, parts)])}"
        )
    if is_due or notes.logged_at is None:
        notes.logged_at = inputs.now
    step.wake(notes.logged_at + LOG_S)


def full_from(inputs: StepInputs, goal: GoalRecord | None, replicas: Iterable[ReplicaRecord]) -> float:
    """Return since when replicas have waited for room, if a controller has just noticed it."""
    limit_s = None if goal is None else goal.limit_s
    if goal is None or limit_s is None:
        return inputs.now
    return inputs.now + _left_s(inputs, goal, limit_s, replicas) - limit_s


def _left_s(inputs: StepInputs, goal: GoalRecord, limit_s: float, replicas: Iterable[ReplicaRecord]) -> float:
    """Return how much of a time limit is left when a new controller takes over a change.

    This is the whole limit unless the change began under an earlier controller.
    """
    began_at = goal.opened_at
    if goal.timeout_s is None:
        began_at = max([began_at, *(each.moved_at for each in replicas)])
    # older versions of daskserve did not record times
    if goal.goal_id not in inputs.observed.inherited or not began_at:
        return limit_s
    # The controllers' clocks may differ.
    return max(limit_s - max(0.0, inputs.wall - began_at), min(limit_s, SETTLE_S))


def _tags(state: State, goal: GoalRecord, backend: BackendRecord) -> Sequence[BackendTag]:
    app = state.apps.get(goal.application)
    return (backend.tag,) if app is None else [tag for tag in app.tags if tag in state.backends]


def makes_progress(state: State, backend: BackendRecord, change: Change) -> bool:
    """Return whether a step of a backend makes progress with its change.

    Replicas beyond the needed number, such as those that the autoscaler added, do not count.
    """
    if goals.is_reached(backend, state.replicas_of(backend.tag)):
        return False
    return any(
        _moves(backend, state.replicas.get(key.removeprefix("replica/")), record)
        for key, record in change.items()
        if key.startswith("replica/") and (record is None or isinstance(record, ReplicaRecord))
    )


def _moves(backend: BackendRecord, before: ReplicaRecord | None, after: ReplicaRecord | None) -> bool:
    state = None if before is None else before.state
    if after is None:
        return state is not ReplicaState.SHOULD_START
    if after.state is ReplicaState.SHOULD_START:
        return False
    return after.state is not state or (before is not None and before.config_id != after.config_id)


def is_at_work(state: State, observed: Observed, goal: GoalRecord, backend: BackendRecord) -> bool:
    """Return whether a replica of any deployment of a change is at work."""
    members = (state.backends[tag] for tag in _tags(state, goal, backend))
    return any(
        _busy(observed, each, replicas := state.replicas_of(each.tag))
        and not goals.is_reached(each, replicas)
        for each in members
    )


def _busy(
    observed: Observed, backend: BackendRecord, replicas: Iterable[ReplicaRecord]
) -> dict[str, Activity]:
    """Return the activities of a backend's replicas, by their tags."""
    return {
        each.tag: observed.busy[each.tag]
        for each in replicas
        if each.tag in observed.busy and (each.state in _TRANSIENT or is_outdated(backend, each))
    }


def makes_room(observed: Observed, backend: BackendRecord, replicas: Replicas) -> bool:
    """Return whether replicas of a backend will soon make room for its other replicas.

    Draining replicas make room, and so do the new replicas of a rollout, because old ones drain after them.
    """
    busy = [replicas[tag] for tag in _busy(observed, backend, replicas.values())]
    is_rollout = any(each.version != backend.version for each in replicas.values())
    return bool(busy) and (is_rollout or any(each.state not in PLACED_STATES for each in busy))


# ---- messages


def busy_text(
    observed: Observed, backend: BackendRecord, replicas: Iterable[ReplicaRecord], *, step_s: float = LOG_S
) -> str:
    """Describe the activity of the replica that has been busy longest; empty if it has not been busy for
    long."""
    busy = _busy(observed, backend, replicas)
    tag = max(busy, key=lambda tag: busy[tag].for_s, default="")
    return f"{short_tag(tag)} has been {text}" if tag and (text := work_text(busy[tag], step_s)) else ""


def work_text(busy: Activity, step_s: float = LOG_S) -> str:
    """Describe the activity of a replica and its duration; empty if it does not take long yet.

    The time is rounded down to a multiple of ``step_s``, because watchers get each change of a status.
    """
    for_s = busy.for_s // step_s * step_s
    return f"{busy.what} for {shown(for_s)} s" if for_s else ""


def running(backend: BackendRecord, replicas: Iterable[ReplicaRecord]) -> int:
    """Return how many replicas run with a backend's version and config."""
    return sum(
        each.state is ReplicaState.RUNNING
        and each.version == backend.version
        and each.config_id == backend.config_id
        for each in replicas
    )


def is_holding(backend: BackendRecord, replicas: Iterable[ReplicaRecord]) -> bool:
    """Return whether a rollout has all replicas of its step, so that it is not late."""
    return backend.canary is not None and running(backend, replicas) >= backend.version_replicas


def progress_text(
    state: State, goal: GoalRecord, backend: BackendRecord, replicas: Iterable[ReplicaRecord]
) -> str:
    """Return the progress of a change as text; empty if none of its replicas have run."""
    wanted, done = backend.needed_replicas, running(backend, replicas)
    is_update = goal.previous.get(backend.key) is not None
    tags = _tags(state, goal, backend)
    up = sum(app_state.is_up(state, state.backends[tag]) for tag in tags)
    if not (is_update or done or up):
        return ""
    text = (
        f"{done} of {counted(wanted, 'replica was', 'replicas were')} {'updated' if is_update else 'started'}"
    )
    return (
        text
        if len(tags) == 1
        else f"{text}, and {up} of {counted(len(tags), 'deployment was', 'deployments were')} up"
    )


def with_note(error: ServeError, far: str) -> ServeError:
    """Return an error with a sentence added."""
    if not far:
        return error
    text = str(error).rstrip(".")
    noted = copy.copy(error)
    noted.args = (f"{text}\n{far}." if "\n" in text else f"{text}. {far}.",)
    return noted


def late_error(goal: GoalRecord, backend: BackendRecord, why: str | None) -> ServeError:
    """Return the error of a change that took too long; ``why`` says why replicas have no room."""
    what, limit = backend.display_name, shown(goal.limit_s or 0.0)
    if why is not None:
        where = "placement_group_bundles" if backend.bundles else "actor_options"
        return NoCapacityError(
            f"Cannot scale {what} to {counted(backend.needed_replicas, 'replica')} within {limit} s: {why}. "
            f"Add workers, reduce the resources in {where}, or delete other deployments."
        )
    if goal.timeout_s is None:
        return RequestTimeoutError(
            f"The change of {what} made no progress for {limit} s (daskserve.timeouts.change-s)."
        )
    return RequestTimeoutError(
        f"{capitalized(what)} did not reach {counted(backend.needed_replicas, 'running replica')} within "
        f"{limit} s. Pass a larger timeout_s, or omit it to wait as long as the change makes progress."
    )
