"""The verb that declares a configuration. Pure: it returns the change to the state, or raises.

Accepting a configuration builds nothing: it records the wanted applications and deletes the others. Then
`daskserve.control.declared.building` builds and deploys each application until it succeeds or fails.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from daskserve.common.copying import replace
from daskserve.common.types import BackendTag, GoalId
from daskserve.control.decisions import applications as app_decisions
from daskserve.control.decisions import endpoints as endpoint_state
from daskserve.control.decisions import goals
from daskserve.control.decisions.declaring import next_declaration
from daskserve.control.decisions.target_capacity import set_target_capacity
from daskserve.control.records.declared import ConfigRecord, Origin
from daskserve.control.records.records import Change
from daskserve.control.records.state import State
from daskserve.errors import AlreadyRegisteredError, BadRequestError, VersionConflictError

#: The key of the applications in a configuration.
APPLICATIONS = "applications"
CAPACITY = "target_capacity"


@dataclass(slots=True)
class Applied:
    """The change, the number of the declaration, and the applications that it deletes."""

    change: Change
    number: int
    deleted: list[str] = field(default_factory=list)
    tags: list[BackendTag] = field(default_factory=list)


def apply(
    state: State,
    config: Mapping[str, Any],
    *,
    merges: bool,
    expected: int | None,
    request_id: str,
    origin: Origin,
    now: float,
    new_goal: Callable[[], GoalId],
    values: Mapping[str, Any] | None = None,
    is_whole: bool = False,
) -> Applied:
    """Declare the applications of a configuration; repeating a call changes nothing.

    Parameters
    ----------
    config : dict
        The plain values of a `daskserve.config_file.model.InstanceConfig`.
    merges : bool
        Whether to keep the applications that the configuration does not name. Otherwise those that earlier
        configurations declared are deleted.
    expected : int, optional
        The number of the declaration that the caller has read.
    values : dict, optional
        The configuration with the values of variables instead of references.
    is_whole : bool
        Whether to delete the applications of programs, too.

    Raises
    ------
    VersionConflictError
        There is a newer declaration.
    AlreadyRegisteredError
        A route is in use outside of configurations.
    BadRequestError
        Two applications have the same name or route, or an application to delete is in use.
    """
    last = state.declared.last
    if request_id and request_id == last.request_id:
        return Applied({}, last.number)
    check_version(state, expected)
    wanted = {each["name"]: each for each in config[APPLICATIONS]}
    leaving = [] if merges else to_delete(state, wanted, is_whole=is_whole)
    check_routes(state, config[APPLICATIONS], leaving)
    instance = {name: each for name, each in config.items() if name != APPLICATIONS}
    if merges:
        instance = {**last.instance, **instance}
    record = next_declaration(
        state,
        now=now,
        request_id=request_id,
        instance=instance,
        **asdict(origin),
    )
    change: Change = {}
    capacity = (values or config).get(CAPACITY)
    if not merges or capacity is not None:
        change.update(set_target_capacity(state, capacity, now))
    applied = Applied(change, record.number, leaving)
    for number, name in enumerate(leaving, goals.next_number(state)):
        applied.tags += state.apps.members(name)
        deletion = app_decisions.delete(state, name, goal_id=new_goal(), by=origin.by, now=now, number=number)
        change.update(deletion.change)
    goals.sweep(state, change)
    change[record.key] = record
    for each in wanted.values():
        config_record = _declared(state, each, record.number, origin, now)
        change[config_record.key] = config_record
    return applied


def _declared(
    state: State, config: Mapping[str, Any], number: int, origin: Origin, now: float
) -> ConfigRecord:
    known = state.declared.configs.get(config["name"], ConfigRecord(config["name"], config, number))
    return replace(
        known,
        config=config,
        generation=number,
        declared_at=now,
        **asdict(origin),
    )


def check_version(state: State, expected: int | None) -> None:
    """Raise `VersionConflictError` if there is a newer declaration than the caller has read."""
    last = state.declared.last
    if expected is None or expected == last.number:
        return
    at = datetime.datetime.fromtimestamp(last.declared_at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    who = f", by {last.by or 'another program'} at {at}" if last.number else ""
    raise VersionConflictError(
        f"This change is based on version {expected} of the configuration, but its version is now "
        f"{last.number}{who}. Read it again, and change that version."
    )


def to_delete(state: State, wanted: Collection[str], *, is_whole: bool = False) -> list[str]:
    """Return the declared applications that the next configuration does not name."""
    apps = (each for each in state.apps if not each.is_deleting)
    brought = {each.name for each in apps if each.is_declared or is_whole}
    return sorted((brought | state.declared.configs.keys()) - set(wanted))


def check_routes(state: State, configs: Sequence[Mapping[str, Any]], leaving: Collection[str]) -> None:
    """Raise an error for names and routes that can never be deployed.

    Routes may move between applications of configurations: one application is deployed once the other has
    given up the route.
    """
    names = [each["name"] for each in configs]
    twice = sorted({each for each in names if names.count(each) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise BadRequestError(f"Application {twice[0]!r} is in the configuration twice; name it once.")
    routes: dict[str, str] = {}
    for each in configs:
        name, route = each["name"], each.get("route_prefix", "/")
        if route is None:
            continue
        route = endpoint_state.normalise_route(route)
        other = routes.setdefault(route, name)
        if other != name:
            raise AlreadyRegisteredError(
                f"Applications {other!r} and {name!r} have the same route {route!r}; give each its own."
            )
        try:
            endpoint_state.check_route(state, route, what=f"deploy application '{name}'", application=name)
        except AlreadyRegisteredError:
            owner = endpoint_state.application_at(state, route)
            if owner not in names and owner not in leaving:
                raise
