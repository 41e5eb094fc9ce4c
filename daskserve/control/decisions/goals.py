"""Goals: requested changes that are still in progress.

A goal covers one backend or one application. It holds the records from before the change, so that a failure
rolls back all of it. A newer goal supersedes the pending goals of everything that it changes: they are DONE,
as in the classic system, with an error for callers that wait for them. Finished goals are kept for a while,
so that a caller that lost its connection can still read the outcome.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

from daskserve.common.copying import replace
from daskserve.common.formatting import capitalized
from daskserve.common.types import BackendTag, GoalId, ReplicaState, described
from daskserve.control.decisions import endpoints as endpoint_state
from daskserve.control.decisions.rollout_plan import begun, ended_rollout
from daskserve.control.records.records import (
    AppRecord,
    BackendRecord,
    Change,
    EndpointRecord,
    GoalRecord,
    GoalState,
    ReplicaRecord,
    to_plain,
)
from daskserve.control.records.state import State, display_name
from daskserve.control.records.storing.encoding import from_plain
from daskserve.control.records.versions import unmarked
from daskserve.control.scaling.recorded import restored
from daskserve.errors import DeletedError, DeployError, ReplicaStartError, ServeError, SupersededError
from daskserve.payload import error_text
from daskserve.payload.packed_errors import dump_error

#: Number of finished goals that are kept. They are removed a hundred at a time, so that few changes take
#: longer.
KEPT_GOALS = 100
SWEEP_AT = 2 * KEPT_GOALS


class TimeLimits(Protocol):
    """The time limits of a change, as in `GoalRecord`."""

    @property
    def timeout_s(self) -> float | None: ...
    @property
    def progress_timeout_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class ChangeLimits:
    """The time limits of a change that has no spec; without limits, it never fails."""

    timeout_s: float | None = None
    progress_timeout_s: float | None = None


NO_LIMITS = ChangeLimits()

#: The records before a change, by key.
Previous: TypeAlias = dict[str, Mapping[str, Any] | None]


def open_goal(
    state: State,
    change: Change,
    *wanted: BackendRecord | AppRecord,
    goal_id: GoalId,
    limits: TimeLimits = NO_LIMITS,
    now: float = 0.0,
    number: int | None = None,
    by: str = "",
) -> None:
    """Add a pending goal, and the wanted records of one backend or one application, to ``change``.

    ``by`` is the program that requests the change, ``now`` the time in seconds since the epoch.

    Pending goals of the replaced records are superseded. A change of one deployment while its application
    changes becomes part of that change. On failure, everything returns to the last completed state.

    A caller that opens several goals in one change passes the ``number`` of each, and calls `sweep` at the
    end.
    """
    app = next((each for each in wanted if isinstance(each, AppRecord)), None)
    superseded = _superseded(state, wanted)
    if app is None:
        app = next((state.apps.get(each.application) for each in superseded if each.application), None)
    previous: Previous = {}
    for each in wanted:
        previous |= _before(state, each)
    for old in superseded:
        change[old.key] = overtaken(state, old, goal_id, by, _named(state, wanted))
        previous |= old.previous
    for each in (*wanted, *([] if app is None else [app])):
        if isinstance(each, BackendRecord):
            each = replace(each, last_change=_kind_of(state.backends.get(each.tag), each))
        change[each.key] = replace(each, goal=goal_id, last_error="")
    _release(state, change, superseded, app, goal_id)
    for key in previous:
        if _is_leaving(state, key):
            previous[key] = None  # a backend that was being deleted must not return
    for key, record in change.items():
        if isinstance(record, BackendRecord):
            change[key] = begun(state, record, previous.get(key), goal_id, now)
    goal = GoalRecord(
        goal_id=goal_id,
        backend="" if app is not None else wanted[0].tag,  # type: ignore[union-attr]
        state=GoalState.PENDING,
        number=next_number(state) if number is None else number,
        timeout_s=limits.timeout_s,
        progress_timeout_s=limits.progress_timeout_s,
        opened_at=now,
        previous={} if any(each.is_deleting for each in wanted) else previous,
        application="" if app is None else app.name,
        by=by,
        request_id=_asked_by(state, wanted),
    )
    change[goal.key] = goal
    if number is None:
        sweep(state, change)


def _asked_by(state: State, wanted: Sequence[BackendRecord | AppRecord]) -> str:
    """Return the id of the call that requests a change; empty if the records keep an earlier id."""
    first = next((each for each in wanted if isinstance(each, AppRecord)), wanted[0])
    known = state.apps.get(first.name) if isinstance(first, AppRecord) else state.backends.get(first.tag)
    is_kept = known is not None and not known.is_deleting and known.request_id == first.request_id
    return "" if is_kept else first.request_id


def _kind_of(before: BackendRecord | None, after: BackendRecord) -> str:
    """Return the kind of the change between two records of a backend."""
    is_same = before is not None and (before.version, before.config_id) == (after.version, after.config_id)
    if before is None or not is_same or before.is_deleting or before.num_replicas == after.num_replicas:
        return "CONFIG_UPDATE"
    return "UPSCALE" if after.num_replicas > before.num_replicas else "DOWNSCALE"


def _superseded(state: State, wanted: Iterable[BackendRecord | AppRecord]) -> list[GoalRecord]:
    """Return the pending goals of the current records and of the applications that they belong to."""
    found: dict[GoalId, GoalRecord] = {}
    for each in wanted:
        current: BackendRecord | AppRecord | None
        if isinstance(each, AppRecord):
            owner = current = state.apps.get(each.name)
        else:
            current = state.backends.get(each.tag)
            owner = None if current is None else state.apps.of(current)
        for record in (current, owner):
            goal = None if record is None or record.goal is None else state.goals.get(record.goal)
            if goal is not None and goal.is_pending:
                found[goal.goal_id] = goal
    return sorted(found.values(), key=lambda goal: goal.number, reverse=True)


def _before(state: State, wanted: BackendRecord | AppRecord) -> Previous:
    """Return the current record of a backend or application, and of a deployment's endpoint."""
    if isinstance(wanted, AppRecord):
        app = state.apps.get(wanted.name)
        return {wanted.key: None if app is None else {**to_plain(app), "goal": None}}
    backend = state.backends.get(wanted.tag)
    found: Previous = {wanted.key: None if backend is None else {**to_plain(backend), "goal": None}}
    endpoint = state.endpoints.get(wanted.tag)
    if wanted.is_deployment and endpoint is not None and not endpoint.is_legacy:
        found[endpoint.key] = to_plain(endpoint)
    return found


def _release(
    state: State, change: Change, superseded: Iterable[GoalRecord], app: AppRecord | None, goal_id: GoalId
) -> None:
    """Move the other backends of superseded goals to the new goal; dropped backends get no goal."""
    for old in superseded:
        for tag in state.apps.members(old.application):
            current = state.backends[tag]
            if current.goal == old.goal_id and current.key not in change:
                stays = app is not None and not app.is_deleting and tag in app.tags
                change[current.key] = replace(current, goal=goal_id if stays else None)


def _is_leaving(state: State, key: str) -> bool:
    kind, _, name = key.partition("/")
    current = state.backends.get(name) if kind == "backend" else None
    owner = state.apps.get(name) if kind == "app" else None
    return (current is not None and current.is_deleting) or (owner is not None and owner.is_deleting)


def next_number(state: State) -> int:
    """Return the number of the next goal."""
    return 1 + max(map(attrgetter("number"), state.goals.values()), default=0)


def pending(state: State) -> frozenset[GoalId]:
    """Return the goals that are still in progress."""
    return frozenset(each.goal_id for each in state.goals.values() if each.is_pending)


def finish(goal: GoalRecord, error: ServeError | None = None) -> GoalRecord:
    """Return the goal as done, or as failed with a reason."""
    if error is None:
        return replace(goal, state=GoalState.DONE, previous={})
    return replace(goal, state=GoalState.FAILED, previous={}, error=dump_error(error))


def _named(state: State, wanted: Sequence[BackendRecord | AppRecord]) -> BackendRecord | None:
    """Return the record whose version names a change: the backend, or the ingress of the application.

    None for a deletion.
    """
    app = next((each for each in wanted if isinstance(each, AppRecord)), None)
    backends = {each.tag: each for each in wanted if isinstance(each, BackendRecord)}
    if app is None:
        (backend,) = backends.values()
        return None if backend.is_deleting else backend
    return None if app.is_deleting else backends.get(app.ingress) or state.backends[app.ingress]


def overtaken(
    state: State, goal: GoalRecord, successor: GoalId, by: str, now_wanted: BackendRecord | None
) -> GoalRecord:
    """Mark a pending goal as superseded by a later change.

    ``now_wanted`` names the version that the later change deploys; None for a deletion. A deletion that
    another deletion supersedes has no error, because its callers wait for the successor.
    """
    app, backend = state.apps.get(goal.application), state.backends.get(goal.backend)
    is_deletion = any(each is not None and each.is_deleting for each in (app, backend))
    name = f"application '{goal.application}'" if goal.application else display_name(state, goal.backend)
    what = capitalized(name)
    whom = by or "another program"
    error: ServeError | None = None
    if now_wanted is None and not is_deletion:
        error = DeletedError(f"{what} was deleted by {whom} before this change was complete.", by=by)
    elif now_wanted is not None:
        version = now_wanted.user_version or unmarked(now_wanted.version)
        error = SupersededError(
            f"{what} was changed by {whom} before this {'deletion' if is_deletion else 'change'} was "
            f"complete: version '{version}' of {now_wanted.display_name} is deployed instead.",
            by=by,
            version=version,
            goal=successor,
        )
    packed = None if error is None else dump_error(error)
    return replace(finish(goal), error=packed, successor=successor)


def ended(
    state: State, backend: BackendRecord, goal_id: GoalId | None, now_wanted: BackendRecord | None
) -> Change:
    """Return the change that ends a backend's own pending goal in favor of its application's goal."""
    own = None if backend.goal in (None, goal_id) else state.goals.get(backend.goal or "")
    if own is None or not own.is_pending:
        return {}
    deciding = state.goals.get(goal_id or "")
    return {
        own.key: overtaken(state, own, goal_id or "", "" if deciding is None else deciding.by, now_wanted)
    }


def rolled_back(
    state: State, goal: GoalRecord, error: ServeError, culprit: BackendRecord | None, wall: float
) -> Change:
    """Return the change that rolls back everything that a goal covers.

    ``culprit`` is the current record of the failed backend, which may be newer than the one in the state. It
    is None if the program withdraws the change. Applications that would have swapped routes keep their
    routes.
    """
    app, change = state.apps.get(goal.application), Change()
    for other in [] if app is None or app.goal != goal.goal_id else endpoint_state.swapping(state, app):
        why = DeployError(
            f"The swap of routes with application '{goal.application}' was canceled, because that "
            "application keeps its route."
        )
        change.update(_restored(state, state.goals[other.goal or ""], why, None, wall))
        back = change.get(other.key)
        if isinstance(back, AppRecord):
            change[back.key] = replace(back, last_error=str(why))
    return change | _restored(state, goal, error, culprit, wall)


def _restored(
    state: State, goal: GoalRecord, error: ServeError, culprit: BackendRecord | None, wall: float
) -> Change:
    text = "" if culprit is None else text_of(error)
    change: Change = {goal.key: finish(goal, error)}
    for key, plain in goal.previous.items():
        kind, _, name = key.partition("/")
        if kind == "backend":
            is_culprit = culprit is not None and name == culprit.tag
            current = culprit if is_culprit else state.backends.get(name)
            if current is not None:
                before: BackendRecord | None = None if plain is None else from_plain("backend", plain)
                change.update(ended(state, current, goal.goal_id, before))
                if before is not None:
                    previous = replace(
                        before,
                        last_error=text if is_culprit else "",
                        goal=None,
                        rollout=ended_rollout(current, error, wall),
                    )
                    change[current.key] = restored(previous, current, wall)
                else:
                    why = (
                        f"{error}"
                        if culprit is None
                        else f"{capitalized(culprit.display_name)} failed in the same change."
                    )
                    change.update(_removed(state, current, text if is_culprit else why))
        elif kind == "endpoint" and plain is not None:
            endpoint: EndpointRecord = from_plain(kind, plain)
            if f"backend/{name}" not in goal.previous or goal.previous[f"backend/{name}"] is not None:
                change.update(endpoint_state.routed_as_before(state, endpoint))
        elif kind == "app":
            change.update(_app_back(state, name, plain, "" if culprit is None else culprit.tag, error))
    return change


def remedy_of_failure(goal: GoalRecord) -> str:
    """Return a sentence with the version that still serves after a failure in user code, and the remedy."""
    if any(_served(key, plain) for key, plain in goal.previous.items()):
        return "The version from before keeps serving; correct the code, and deploy it again"
    return "It was removed; correct the code, and deploy it again"


def _served(key: str, plain: Mapping[str, Any] | None) -> bool:
    """Return whether the record before a change describes a backend or application that served."""
    if plain is None or plain.get("is_deleting"):
        return False
    # The record of an application whose first deploy failed has no deployments.
    return key.startswith("backend/") or (key.startswith("app/") and bool(plain.get("deployments")))


def withdrawn(state: State, requests: Collection[str], by: str, wall: float) -> Change:
    """Return the change that rolls back the pending changes of some calls.

    A change is kept if it is complete, or if a later call requested the same change. Repeating this changes
    nothing.
    """
    change: Change = {}
    for record in (*state.apps, *state.backends.values()):
        goal = state.goals.get(record.goal or "")
        is_whole = goal is not None and isinstance(record, AppRecord) == bool(goal.application)
        if goal is None or not is_whole or not goal.is_pending or record.is_deleting:
            continue
        if goal.request_id and goal.request_id in requests:
            error = DeployError(f"The change was undone: {by or 'its program'} was interrupted.")
            change.update(rolled_back(state, goal, error, None, wall))
    return change


def text_of(error: BaseException, before: str = "") -> str:
    """Return the text of an error, followed by the traceback of user code if there is one."""
    user_traceback = error.user_traceback if isinstance(error, ServeError) else ""
    return f"{before}{error_text.text_of(error)}\n{user_traceback}".strip()


def _removed(state: State, current: BackendRecord, why: str) -> Change:
    """Return the change that removes a backend that a failed change created."""
    removed = replace(current, is_deleting=True, is_forced=True, goal=None, last_error=why)
    change: Change = {current.key: removed}
    endpoint = state.endpoints.get(current.tag)
    if current.is_deployment and endpoint is not None and not endpoint.is_legacy:
        change[endpoint.key] = None
    return change


def _app_back(
    state: State,
    name: str,
    plain: Mapping[str, Any] | None,
    culprit: BackendTag,
    error: ServeError,
) -> Change:
    text = text_of(error)
    current = state.apps.get(name)
    if current is None:
        return {}
    empty = replace(current, route=None, deployments={}, request_id="")
    before: AppRecord = empty if plain is None else from_plain("app", plain)
    if not culprit and plain is None:
        # If it has deployments, the deletion of the last one removes the record.
        return {
            current.key: replace(empty, goal=None, is_deleting=True) if state.apps.members(name) else None
        }
    if not culprit:
        return {current.key: replace(before, goal=None)}
    failed = next((each for each, tag in current.deployments.items() if tag == culprit), culprit)
    if not isinstance(error, ReplicaStartError):  # the error's text already names the deployment
        text = f"{described(culprit.rpartition('/')[2], 'Deployment')} failed: {text}"
    tried = sorted(current.deployments)
    after = replace(before, goal=None, last_error=text, failed=failed, tried=tried)
    return {after.key: after}


def is_reached(backend: BackendRecord, replicas: Iterable[ReplicaRecord]) -> bool:
    """Return whether exactly the wanted replicas run.

    Replicas that the autoscaler adds or removes in the meantime do not count.
    """
    if backend.canary is not None:
        return False
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


def sweep(state: State, change: Change) -> None:
    """Add to a change the removal of the oldest finished goals, if there are many."""
    if len(state.goals) <= SWEEP_AT:
        return
    finished = [
        each
        for each in state.goals.values()
        if each.state is not GoalState.PENDING and each.key not in change
    ]
    if len(finished) > SWEEP_AT:
        for each in sorted(finished, key=lambda goal: goal.number)[: len(finished) - KEPT_GOALS]:
            change[each.key] = None
