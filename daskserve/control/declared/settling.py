"""The result of a build: a deploy, or the reason why there is none. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from daskserve.common.copying import replace
from daskserve.common.types import BackendTag, GoalId
from daskserve.control.decisions import applications as app_decisions
from daskserve.control.decisions import endpoints as endpoint_state
from daskserve.control.records.declared import ConfigRecord
from daskserve.control.records.records import AppRecord, Change
from daskserve.control.records.state import State
from daskserve.errors import ServeError
from daskserve.options.specs import ApplicationSpec

#: The result of a build: the spec of the application, or the reason why it cannot be built.
Built: TypeAlias = ApplicationSpec | str


@dataclass(slots=True)
class Settled:
    """The change for some results, the backends to step, and why applications wait for their routes."""

    change: Change = field(default_factory=dict)
    tags: list[BackendTag] = field(default_factory=list)
    waits: dict[str, str] = field(default_factory=dict)


def settled(
    state: State,
    built: Mapping[str, tuple[ConfigRecord, Built]],
    waiting: Mapping[str, ApplicationSpec],
    *,
    new_goal: Callable[[], GoalId],
    now: float,
    unloadable: Collection[BackendTag] = (),
) -> Settled:
    """Deploy the built applications in one change, and record why others cannot be deployed.

    The result of an application that was declared again in the meantime is ignored.

    Parameters
    ----------
    waiting : dict
        The built applications that are not deployed yet, by name.

    Raises
    ------
    ServeError One of several applications cannot be deployed: call this for each of them.
    """
    found = Settled()
    specs: dict[str, ApplicationSpec] = {}
    configs: dict[str, ConfigRecord] = {}
    for name, (record, each) in built.items():
        if state.declared.configs.get(name) != record:
            continue
        if isinstance(each, str):
            found.change.update(_failed(state, record, each))
        elif (why := waits_for_route(state, each, waiting, built)) is not None:
            found.waits[name] = why
        else:
            specs[name], configs[name] = each, record
    try:
        deployed = app_decisions.deploy(
            state,
            list(specs.values()),
            new_goal=new_goal,
            now=now,
            by=next((each.by for each in configs.values()), ""),
            unloadable=unloadable,
            configs=configs,
        )
    except ServeError as error:
        if len(built) > 1:
            raise
        for record in configs.values():
            found.change.update(_failed(state, record, str(error)))
    else:
        found.change.update(deployed.change)
        found.tags = deployed.tags
    return found


def waits_for_route(
    state: State, spec: ApplicationSpec, waiting: Mapping[str, ApplicationSpec], together: Collection[str]
) -> str | None:
    """Return why an application must wait for its route; None if it need not wait, or if waiting does not
    help.

    Applications that swap routes wait for each other, and are deployed ``together``.
    """
    owner = _owner(state, spec)
    if owner is None:
        return None
    config, app = state.declared.configs.get(owner), state.apps.get(owner)
    changes = app is not None and (app.goal is not None or app.is_deleting)
    circle = endpoint_state.circle(state, spec.name, {name: each.route for name, each in waiting.items()})
    if circle:
        leaves = not circle <= set(together)
    else:
        leaves = config is not None and not config.is_settled
    return f"Application {owner!r} still has the route {spec.route!r}." if leaves or changes else None


def _owner(state: State, spec: ApplicationSpec) -> str | None:
    """Return the other application that has an application's route; None if there is none."""
    route = None if spec.route is None else endpoint_state.normalise_route(spec.route)
    owner = endpoint_state.application_at(state, route)
    return None if owner == spec.name else owner


def _failed(state: State, record: ConfigRecord, error: str) -> Change:
    """Return the change for an application that cannot be built; its current version keeps serving."""
    app = state.apps.get(record.name) or AppRecord(record.name, None, {}, is_declared=True)
    failed = replace(record, settled=record.generation, error=error, goal="")
    change: Change = {failed.key: failed}
    if not app.is_deleting:
        change[app.key] = replace(app, last_error=error)
    return change
