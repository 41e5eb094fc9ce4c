"""The plan: the changes that a configuration would make to the deployed applications. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from daskserve.control.decisions import backends as backend_decisions
from daskserve.control.decisions import endpoints as endpoint_state
from daskserve.control.decisions.differences import CODE, Difference, differences
from daskserve.control.declared.apply import CAPACITY, to_delete
from daskserve.control.records.records import BackendRecord
from daskserve.control.records.state import State
from daskserve.errors import ServeError
from daskserve.options.fields.base import Effect
from daskserve.options.specs import ApplicationSpec, DeploymentSpec

#: The possible changes of an application.
NEW, CHANGED, UNCHANGED, DELETED, FAILED = "new", "changed", "unchanged", "deleted", "failed"
#: The possible changes of a deployment.
RESTARTS, RECONFIGURED, SCALED, AT_ONCE, GOES = "restarts", "reconfigured", "scaled", "at once", "goes"
#: The strongest change comes first; it determines the change of a deployment.
_STRENGTH = (NEW, GOES, RESTARTS, RECONFIGURED, SCALED, AT_ONCE, UNCHANGED)
_WORDS: Mapping[Effect, str] = {
    Effect.REPLACES: RESTARTS,
    Effect.RECONFIGURES: RECONFIGURED,
    Effect.AT_ONCE: AT_ONCE,
}
#: The options that change the number of replicas.
_COUNTS = frozenset({"num_replicas", "autoscaling_config"})


def completed(
    state: State, config: Mapping[str, Any], apps: dict[str, dict[str, Any]], *, merges: bool
) -> dict[str, Any]:
    """Return the plan of a configuration with resolved references, given the results of `planned`."""
    leaving = [] if merges else to_delete(state, apps)
    for name in leaving:
        app = state.apps.get(name)
        deployments = {} if app is None else {each: _change(GOES) for each in app.deployments}
        apps[name] = {"action": DELETED, "deployments": deployments}
    found = {"version": state.declared.last.number, "applications": apps, "options": []}
    wanted, now = config.get(CAPACITY), state.capacity.percent
    if wanted != now and not (merges and wanted is None):
        found["options"] = [{"option": CAPACITY, "old": now, "new": wanted}]
    changes = any(each["action"] not in (UNCHANGED, FAILED) for each in apps.values())
    found["has_changes"] = changes or bool(found["options"])
    found["has_faults"] = any(each["action"] == FAILED for each in apps.values())
    return found


def _change(action: str, changes: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"action": action, "changes": changes or []}


def planned(
    state: State, name: str, spec: ApplicationSpec | str, unloadable: Collection[str] = ()
) -> dict[str, Any]:
    """Return the changes of one application, given its spec or the reason why it cannot be built."""
    if isinstance(spec, str):
        return {"action": FAILED, "message": spec, "deployments": {}}
    app = state.apps.get(name)
    is_new = app is None or app.is_deleting or not app.deployments
    try:
        deployments = {
            each.name: _deployment(state, name, each, unloadable)
            for each in spec.deployments
            if not each.actor_of
        }
    except ServeError as error:
        return {"action": FAILED, "message": str(error), "deployments": {}}
    route = None if spec.route is None else endpoint_state.normalise_route(spec.route)
    found: dict[str, Any] = {"action": NEW, "deployments": deployments, "route": [None, route]}
    if app is None or is_new:
        return found
    kept = {each.name for each in spec.deployments}
    for each in app.deployments:
        backend = state.backends.get(app.deployments[each])
        if each not in kept and not (backend is not None and backend.actor_of):
            deployments[each] = _change(GOES)
    is_same = app.route == route and all(each["action"] == UNCHANGED for each in deployments.values())
    found["action"] = UNCHANGED if is_same and not app.last_error else CHANGED
    found["route"] = [app.route, route]
    if not app.is_declared:
        found["message"] = "It was deployed by a program, and will belong to the configuration."
    elif app.last_error:
        found["message"] = "Its last deploy failed."
    return found


def _deployment(
    state: State, application: str, spec: DeploymentSpec, unloadable: Collection[str]
) -> dict[str, Any]:
    existing = state.backends.get(spec.spec.tag)
    wanted = backend_decisions.deployed(
        state, spec.spec, now=0.0, application=application, member=spec, unloadable=unloadable
    )
    if existing is None or existing.is_deleting:
        return _change(NEW)
    if wanted is None:
        return _change(UNCHANGED)
    changes = _differences(existing, wanted[0])
    actions = {each["effect"] for each in changes}
    action = next((each for each in _STRENGTH if each in actions), UNCHANGED)
    return _change(action, changes)


def _differences(old: BackendRecord, new: BackendRecord) -> list[dict[str, Any]]:
    """Return the differences between two records of a deployment, with their effects on running replicas."""
    found = [_plain(each) for each in differences(old, new)]
    if old.version != new.version and not any(each["effect"] == RESTARTS for each in found):
        found.append({"option": CODE, "effect": RESTARTS})
    return found


def _plain(each: Difference) -> dict[str, Any]:
    effect = SCALED if each.option in _COUNTS else _WORDS[each.effect]
    shown = {} if each.values is None else {"old": each.values[0], "new": each.values[1]}
    return {"option": each.option, "effect": effect, **shown}
