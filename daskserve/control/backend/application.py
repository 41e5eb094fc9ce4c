"""Applications: the order in which their deployments start and stop, and the end of their changes. Pure.

The step of a deployment checks here whether it may start or stop replicas. The answer depends on records
only, so the order survives a crash. A change of an application ends in the step of its last deployment to
come up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from daskserve.common.copying import replace
from daskserve.common.types import BackendTag, ReplicaState
from daskserve.control.backend.ranks import all_ranks_known
from daskserve.control.decisions import endpoints as endpoint_state
from daskserve.control.decisions import goals
from daskserve.control.observed.observed import Observed
from daskserve.control.records.records import (
    AppRecord,
    BackendRecord,
    Change,
    EndpointRecord,
    GoalRecord,
    GoalState,
    ReplicaRecord,
)
from daskserve.control.records.state import State


def awaited(
    state: State, observed: Observed, backend: BackendRecord, undone: Change | None = None
) -> list[BackendTag]:
    """Return the deployments that must be up before a deployment starts replicas.

    1. During a change, all deployments that it needs must be up in their new versions.
    2. Without a change, as after the loss of workers, one running replica of each is enough. A deployment
       that cannot start then does not delay the others, because its callers may work without it.

    ``undone`` holds changes that will be written in the same transaction.
    """
    undone = undone or {}
    needs = [each for tag in backend.needs if (each := _backend(state, undone, tag)) is not None]
    app = state.apps.of(backend)
    if app is not None and app.goal is not None and backend.goal == app.goal:
        return [each.tag for each in needs if not each.is_deleting and not is_up(state, each, undone)]
    return [
        each.tag
        for each in needs
        if each.num_replicas
        and not _running(state, undone, each.tag)
        and not (notes := observed.notes_of(each.tag)).failures
        and notes.waiting is None
    ]


def is_up(state: State, backend: BackendRecord, undone: Change | None = None) -> bool:
    """Return whether enough replicas run with a backend's version and config. Older ones may still drain."""
    if backend.canary is not None:
        return False
    running = sum(
        each.version == backend.version and each.config_id == backend.config_id
        for each in _running(state, undone or {}, backend.tag)
    )
    return running >= backend.needed_replicas


def _backend(state: State, undone: Change, tag: BackendTag) -> BackendRecord | None:
    found = undone.get(f"backend/{tag}") or state.backends.get(tag)
    return found if isinstance(found, BackendRecord) else None


def _running(state: State, undone: Change, tag: BackendTag) -> list[ReplicaRecord]:
    found = (undone.get(each.key, each) for each in state.replicas_of(tag))
    return [each for each in found if isinstance(each, ReplicaRecord) and each.state is ReplicaState.RUNNING]


def released(state: State, backend: BackendRecord, change: Change) -> Iterable[BackendTag]:
    """Return the backends that may have waited for a replica that starts running with this change."""
    has_started = any(
        isinstance(each, ReplicaRecord) and each.state is ReplicaState.RUNNING for each in change.values()
    )
    return state.apps.needed_by(backend.tag) if has_started else ()


def is_late(
    state: State, observed: Observed, backend: BackendRecord, replicas: Iterable[ReplicaRecord]
) -> bool:
    """Return whether a change of an application waits for this deployment, not for one that it needs.

    The change also waits until all replicas have received their ranks, which may take long if user code
    handles them.
    """
    return not _is_up(observed, backend, replicas) and not awaited(state, observed, backend)


def may_stop(state: State, backend: BackendRecord) -> bool:
    """Return whether a backend that is being deleted may stop: no backend that calls it is being deleted."""
    if backend.is_forced:
        return True
    callers = (state.backends[tag] for tag in state.apps.needed_by(backend.tag))
    return not any(each.is_deleting for each in callers)


def neighbours(
    state: State, backend: BackendRecord, change: Change, informed: Collection[BackendTag] = ()
) -> list[BackendTag]:
    """Return the backends to step after an applied change of this one.

    The ingress is among them because its step checks whether a change of the application is complete, in case
    several deployments came up together. The start of a replica does not affect other backends. Callers of
    this backend are included unless they are ``informed``: their steps have already seen the change.
    """
    starts = (
        isinstance(each, ReplicaRecord) and each.state is ReplicaState.STARTING for each in change.values()
    )
    if not backend.application or all(starts):
        return []
    found = [tag for tag in state.apps.needed_by(backend.tag) if tag not in informed]
    app = state.apps.get(backend.application)
    ingress = None if app is None or app.goal is None else state.backends.get(app.ingress)
    if ingress is not None and is_up(state, ingress):
        found.append(ingress.tag)
    return [*found, *backend.needs] if backend.is_deleting else found


def is_unused(state: State, backend: BackendRecord) -> bool:
    """Return whether a backend is no longer used after a completed change."""
    app = state.apps.get(backend.application) if backend.application else None
    if app is None or app.goal is not None or backend.is_deleting or backend.tag in app.tags:
        return False
    return not is_used(state, backend.tag)


def is_used(state: State, tag: BackendTag) -> bool:
    """Return whether any endpoint besides the deployment's own sends requests to it."""
    return any(each != tag for each in state.endpoints_of(tag))


def _is_up(observed: Observed, backend: BackendRecord, replicas: Iterable[ReplicaRecord]) -> bool:
    replicas = list(replicas)
    return goals.is_reached(backend, replicas) and all_ranks_known(backend, replicas, observed)


def is_complete(
    state: State,
    observed: Observed,
    app: AppRecord,
    backend: BackendRecord,
    replicas: Iterable[ReplicaRecord],
) -> bool:
    """Return whether all deployments are up, given the current records of one of them.

    Applications that swap their routes are complete together.
    """
    if app.is_deleting or not _is_up(observed, backend, replicas):
        return False
    apps = (app, *endpoint_state.swapping(state, app))
    # The ingress comes up last, so check it first.
    tags = (tag for each in apps for tag in reversed(each.tags))
    others = (state.backends.get(tag) for tag in tags if tag != backend.tag)
    return all(each is not None and _is_up(observed, each, state.replicas_of(each.tag)) for each in others)


def completed(state: State, app: AppRecord, backend: BackendRecord) -> Change:
    """Return the change that completes a deploy: it sets the new route and deletes dropped deployments.

    ``backend`` is the current record of one of its deployments. Applications that swap their routes with it
    complete in the same change.
    """
    change: Change = {}
    for each in (app, *endpoint_state.swapping(state, app)):
        change.update(_completed(state, each, backend))
    return change


def _completed(state: State, app: AppRecord, backend: BackendRecord) -> Change:
    change: Change = {app.key: replace(app, goal=None), **_finished(state, app)}
    for tag in state.apps.members(app.name):
        member = backend if tag == backend.tag else state.backends[tag]
        settled = replace(member, goal=None) if member.goal == app.goal else member
        if tag in app.tags:
            if settled.goal is None:
                change.update(old_codes(state, settled, change))
        elif not member.is_deleting and not is_used(state, tag):
            change.update(goals.ended(state, member, app.goal, None))
            settled = replace(settled, is_deleting=True, goal=None)
        if settled is not member:
            change[member.key] = settled
        change.update(_routed(state, tag, app.route if tag == app.ingress else None))
    return change


def completes(backend: BackendRecord, change: Change) -> bool:
    """Return whether the change of a step completes a deploy of the backend's application, and only that."""
    app = change.get(f"app/{backend.application}") if backend.application else None
    ended = [each for each in change.values() if isinstance(each, GoalRecord)]
    return (
        isinstance(app, AppRecord)
        and app.goal is None
        and not app.is_deleting
        and bool(ended)
        and all(each.application == app.name and each.state is GoalState.DONE for each in ended)
    )


def old_codes(state: State, backend: BackendRecord, change: Change) -> Change:
    """Return the change that removes the code of a backend's older versions.

    A pending change keeps the code that a rollback would need, even of a backend that has no goal because
    the new version of its application leaves it out. ``change`` is written in the same transaction; goals
    that end in it keep no code.
    """
    old = [code for code in state.codes.of(backend.tag) if code.name != backend.code_key]
    if not old:
        return {}
    goals_after = (change.get(each.key, each) for each in state.goals.values())
    kept = {
        (goal.previous.get(backend.key) or {}).get("code_key")
        for goal in goals_after
        if isinstance(goal, GoalRecord) and goal.is_pending
    }
    return {code.key: None for code in old if code.name not in kept and not state.revisions.need(code.name)}


def _routed(state: State, tag: BackendTag, route: str | None) -> Change:
    endpoint = state.endpoints.get(tag)
    if endpoint is None or endpoint.is_legacy or endpoint.route == route:
        return {}
    changed: EndpointRecord = replace(endpoint, route=route)
    return {changed.key: changed}


def removed(state: State, backend: BackendRecord) -> Change:
    """Return the change that removes an application with the last of its backends."""
    app = state.apps.get(backend.application) if backend.application else None
    if app is None or not app.is_deleting or len(state.apps.members(app.name)) > 1:
        return {}
    return {app.key: None, **_finished(state, app)}


def _finished(state: State, app: AppRecord) -> Change:
    """Return the change that completes the pending goal of an application, if it has one."""
    goal = state.goals.get(app.goal or "")
    return {goal.key: goals.finish(goal)} if goal is not None and goal.is_pending else {}
