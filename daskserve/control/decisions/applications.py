"""Changes of applications. Pure: each function returns the change to the state, or raises.

An application is one change: the records of all its deployments are written at once, under one goal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskserve.common.copying import replace
from daskserve.common.types import ALL_HTTP_METHODS, BackendTag, GoalId, described, split_deployment_tag
from daskserve.control.decisions import backends as backend_decisions
from daskserve.control.decisions import endpoints as endpoint_state
from daskserve.control.decisions import goals
from daskserve.control.decisions.backends import Outcome
from daskserve.control.decisions.declaring import NO_CONFIGS, declared
from daskserve.control.decisions.failed_deploys import application_not_found
from daskserve.control.records.declared import ConfigRecord
from daskserve.control.records.records import AppRecord, BackendRecord, Change
from daskserve.control.records.state import State
from daskserve.errors import AlreadyRegisteredError, BadRequestError
from daskserve.options.routing.route_variables import shape_of
from daskserve.options.specs import ApplicationSpec


@dataclass(slots=True)
class Deployed:
    """The change of a deploy; the goal of each application, and whether the deploy updates it."""

    change: Change = field(default_factory=dict)
    goals: dict[str, GoalId | None] = field(default_factory=dict)
    updating: dict[str, bool] = field(default_factory=dict)
    tags: list[BackendTag] = field(default_factory=list)


def deploy(
    state: State,
    specs: Sequence[ApplicationSpec],
    *,
    new_goal: Callable[[], GoalId],
    now: float,
    expected: Mapping[str, str] | None = None,
    by: str = "",
    unloadable: Collection[BackendTag] = (),
    configs: Mapping[str, ConfigRecord] = NO_CONFIGS,
) -> Deployed:
    """Deploy applications in one change. The change is empty if the call is repeated or changes nothing.

    Parameters
    ----------
    expected : dict, optional
        The id of the call whose application this one may replace, by application. An empty id means that
        there must be no such application.
    unloadable
        The backends whose code cannot be loaded. It is replaced even if the version is the same.
    configs : dict
        The declared configurations from which applications were built, by name. An application without a
        configuration is no longer declared.

    Raises
    ------
    AlreadyRegisteredError
        A route or a name belongs to something else.
    BadRequestError
        A spec is invalid.
    """
    _check_together(specs)
    for spec in specs:
        if expected is not None and spec.name in expected:
            _check_expected(state, spec, expected[spec.name])
    found = Deployed()
    routes = {each.name: each.route for each in specs}
    first = goals.next_number(state)
    for number, spec in enumerate(specs, first):
        outcome = _deploy(
            state,
            spec,
            found.change,
            goal_id=new_goal(),
            number=number,
            now=now,
            by=by,
            unloadable=unloadable,
            is_declared=spec.name in configs,
            leaving=endpoint_state.leaving(state, spec.name, routes),
        )
        found.change.update(outcome.change)
        found.goals[spec.name] = outcome.goal
        found.updating[spec.name] = outcome.is_update
        found.tags += [each.spec.tag for each in spec.deployments]
    found.change.update(declared(state, configs, found.goals, by=by, now=now))
    if found.change:
        goals.sweep(state, found.change)
    return found


def _check_expected(state: State, spec: ApplicationSpec, expected: str) -> None:
    """Raise `AlreadyRegisteredError` unless the last deploy is the expected one, or this call is a repetition
    of it."""
    app = state.apps.get(spec.name)
    found = "" if app is None or app.is_deleting or not app.deployments else app.request_id
    if found not in (expected, spec.request_id):
        raise AlreadyRegisteredError(
            f"Application '{spec.name}' runs already, deployed by {_deployed_by(state, spec.name)}."
        )


def _deployed_by(state: State, name: str) -> str:
    """Return the program that deployed an application last, if its goals are still known."""
    numbered = ((each.number, each.by) for each in state.goals.values() if each.application == name)
    return max(numbered, default=(0, ""))[1] or "another program"


def _check_together(specs: Sequence[ApplicationSpec]) -> None:
    """Raise an error for specs that are invalid in any state."""
    names: set[str] = set()
    routes: dict[str, str] = {}
    for spec in specs:
        if spec.name in names:
            raise BadRequestError(f"Application '{spec.name}' is given twice; deploy it once.")
        names.add(spec.name)
        if spec.route is not None:
            route = endpoint_state.normalise_route(spec.route)
            other = routes.setdefault(shape_of(route), spec.name)
            if other != spec.name:
                raise AlreadyRegisteredError(
                    f"Cannot deploy application '{spec.name}' at route '{route}': it is in use by "
                    f"application '{other}', which is deployed by the same call."
                )
        _check_graph(spec)


def _check_graph(spec: ApplicationSpec) -> None:
    if not spec.deployments:
        raise BadRequestError(f"Application '{spec.name}' has no deployments.")
    seen: set[BackendTag] = set()
    names: set[str] = set()
    for each in spec.deployments:
        tag = each.spec.tag
        if tag in seen or each.name in names:
            raise BadRequestError(f"Application '{spec.name}' has two deployments named '{each.name}'.")
        missing = [need for need in each.needs if need not in seen]
        if missing:
            raise BadRequestError(
                f"Deployment '{each.name}' of application '{spec.name}' needs {missing}, which must come "
                "before it in the application."
            )
        seen.add(tag)
        names.add(each.name)


def _deploy(
    state: State,
    spec: ApplicationSpec,
    together: Mapping[str, Any],
    *,
    goal_id: GoalId,
    number: int,
    now: float,
    by: str,
    unloadable: Collection[BackendTag],
    is_declared: bool,
    leaving: Collection[str],
) -> Outcome:
    existing = state.apps.get(spec.name)
    is_new = existing is None or existing.is_deleting
    if existing is not None and not is_new and existing.request_id == spec.request_id:
        return Outcome({}, existing.goal)
    route = None if spec.route is None else endpoint_state.normalise_route(spec.route)
    endpoint_state.check_route(
        state, route, what=f"deploy application '{spec.name}'", application=spec.name, leaving=leaving
    )
    change: Change = {}
    wanted: list[BackendRecord] = []
    for each in spec.deployments:
        if f"backend/{each.spec.tag}" in together:
            raise AlreadyRegisteredError(
                f"{described(each.spec.tag, 'Deployment')} is in two applications of this call."
            )
        found = backend_decisions.deployed(
            state, each.spec, now=now, application=spec.name, member=each, unloadable=unloadable
        )
        if found is not None:
            record, code = found
            change[code.key] = code
            wanted.append(record)
        elif (current := state.backends[each.spec.tag]).goal is not None:
            wanted.append(current)  # its pending change becomes part of this one
        held = state.endpoints.get(each.spec.tag)
        change.update(
            endpoint_state.deployed_endpoint(
                state,
                each.spec.tag,
                route=None if held is None else held.route,
                methods=ALL_HTTP_METHODS,
                python_methods=each.python_methods,
            )
        )
    app = AppRecord(
        name=spec.name,
        route=route,
        deployments={each.name: each.spec.tag for each in spec.deployments},
        request_id=spec.request_id,
        deployed_at=now,
        is_declared=is_declared,
    )
    is_same = existing is not None and not is_new and _is_same(existing, app)
    if existing is not None and is_same and not change:
        return Outcome(_settled(state, existing, app), existing.goal, is_update=False)
    goals.open_goal(state, change, app, *wanted, goal_id=goal_id, limits=spec, now=now, number=number, by=by)
    return Outcome(change, goal_id)


def _settled(state: State, existing: AppRecord, wanted: AppRecord) -> Change:
    """Return the change of a deploy that equals the current or the pending one.

    It clears the error of a failed deploy. The application belongs to the last call that deployed it, so an
    earlier call can no longer withdraw its change.
    """
    settled = replace(
        existing,
        last_error="",
        failed="",
        tried=[],
        request_id=wanted.request_id,
        is_declared=wanted.is_declared,
    )
    members = (state.backends[tag] for tag in existing.tags if tag in state.backends)
    change: Change = {each.key: replace(each, last_error="") for each in members if each.last_error}
    if settled == existing:
        return change
    change[existing.key] = settled
    pending = state.goals.get(existing.goal or "")
    if pending is not None:
        change[pending.key] = replace(pending, request_id=wanted.request_id)
    return change


def _is_same(existing: AppRecord, wanted: AppRecord) -> bool:
    return existing.route == wanted.route and list(existing.deployments.items()) == list(
        wanted.deployments.items()
    )


def delete(
    state: State,
    name: str,
    *,
    goal_id: GoalId,
    request_id: str | None = None,
    by: str = "",
    now: float = 0.0,
    number: int | None = None,
    missing_ok: bool = True,
) -> Outcome:
    """Stop an application, the ingress first, and remove it; raise `NotFoundError` unless ``missing_ok``.

    The endpoints of its other deployments are removed once nothing calls them. With a ``request_id``, an
    application that another call has deployed is ignored.
    """
    app = state.apps.get(name)
    if app is None and not missing_ok and name not in state.declared.configs:
        raise application_not_found(state, name)
    if request_id is not None and (app is None or request_id != app.request_id):
        return Outcome({}, None, is_update=False)
    undeclared = declared(state, {}, {name: None}, by=by, now=now)
    if app is None or app.is_deleting:
        return Outcome(undeclared, None if app is None else app.goal, is_update=False)
    members = [state.backends[tag] for tag in state.apps.members(name)]
    _check_unused(state, app, members)
    if not members:
        return Outcome({app.key: None, **undeclared}, None)
    change: Change = dict(undeclared)
    if app.ingress in state.endpoints and not state.endpoints[app.ingress].is_legacy:
        change[f"endpoint/{app.ingress}"] = None
    leaving = [replace(each, is_deleting=True) for each in members]
    gone = replace(app, is_deleting=True, failed="")
    goals.open_goal(state, change, gone, *leaving, goal_id=goal_id, number=number, by=by)
    return Outcome(change, goal_id)


def _check_unused(state: State, app: AppRecord, members: Sequence[BackendRecord]) -> None:
    own = {each.tag for each in members}
    users = sorted({user for tag in own for user in state.endpoints_of(tag) if user not in own})
    if users:
        raise BadRequestError(
            f"Application '{app.name}' is used by endpoint {', '.join(map(repr, users))} and cannot be "
            "deleted. Remove its deployments from their traffic and shadows, and try again."
        )


def check_separate(state: State, tag: BackendTag) -> None:
    """Raise `BadRequestError` if a backend is part of an application, which is only deleted as a whole."""
    backend = state.backends.get(tag)
    if backend is not None and state.apps.get(backend.application) is not None:
        name = split_deployment_tag(tag)[1]
        raise BadRequestError(
            f"{name!r} is a deployment of application '{backend.application}' and cannot be deleted alone. "
            f"Delete the application, or deploy it without {name!r}."
        )


def get(state: State, name: str) -> dict[str, Any]:
    """Return an application's route and deployments; raise `NotFoundError` if there is none."""
    app = known(state, name)
    return {
        "name": name,
        "route": app.route,
        "ingress": app.ingress,
        "deployments": dict(app.deployments),
        "request_id": app.request_id,
    }


def known(state: State, name: str) -> AppRecord:
    """Return the record of an application; raise `NotFoundError` if there is none or it is being deleted."""
    app = state.apps.get(name)
    if app is None or app.is_deleting or not app.deployments:
        raise application_not_found(state, name)
    return app
