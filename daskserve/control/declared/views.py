"""Declared configurations and the progress of their deploys, as plain values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from daskserve.control.decisions.failed_deploys import application_not_found
from daskserve.control.observed.observed import Observed
from daskserve.control.records.declared import ConfigRecord
from daskserve.control.records.records import GoalState
from daskserve.control.records.state import State
from daskserve.errors import NotFoundError


def config(state: State, name: str | None = None) -> dict[str, Any]:
    """Return the declared configurations and who declared them.

    Raises
    ------
    NotFoundError
        There is no such application, or no configuration declares it.
    """
    declared, last = state.declared, state.declared.last
    names = sorted(declared.configs) if name is None else [name]
    if name is not None and name not in declared.configs:
        app = state.apps.get(name)
        if app is None or app.is_deleting:
            raise application_not_found(state, name)
        raise NotFoundError(
            f"Application '{name}' was deployed by a program, so it has no configuration. `daskserve build "
            "module:name` writes one for its import path."
        )
    return {
        "version": last.number,
        "declared_at": last.declared_at,
        "by": last.by,
        "source": last.source,
        "git_version": last.version,
        "instance": dict(last.instance),
        "applications": {each: _application(declared.configs[each]) for each in names},
    }


def _application(record: ConfigRecord) -> dict[str, Any]:
    return {
        "config": dict(record.config),
        "version": record.generation,
        "declared_at": record.declared_at,
        "by": record.by,
        "source": record.source,
        "git_version": record.version,
        "error": record.error,
    }


def progress(
    state: State, observed: Observed, version: int, names: Sequence[str] | None, waiting: Mapping[str, str]
) -> dict[str, Any]:
    """Return the progress of the applications of a declaration.

    ``waiting`` are the reasons why applications are not built yet.
    """
    configs = state.declared.configs
    chosen = [name for name, each in configs.items() if each.generation == version]
    found = {
        name: _progress_of(state, observed, name, waiting) for name in (chosen if names is None else names)
    }
    is_done = all(each["status"] not in ("BUILDING", "DEPLOYING") for each in found.values())
    return {"is_done": is_done, "applications": found}


def _progress_of(state: State, observed: Observed, name: str, waiting: Mapping[str, str]) -> dict[str, str]:
    record, app = state.declared.configs.get(name), state.apps.get(name)
    if record is None and (app is None or app.is_deleting):
        return {"status": "DELETED", "message": "It was deleted meanwhile."}
    if record is not None and not record.is_settled:
        return {"status": "BUILDING", "message": waiting.get(name, "")}
    if record is not None and record.error:
        return {"status": "DEPLOY_FAILED", "message": record.error}
    if app is not None and app.goal is not None:
        return {"status": "DEPLOYING", "message": observed.why_waiting(app.tags) or ""}
    goal = None if record is None else state.goals.get(record.goal)
    if app is None or app.last_error or (goal is not None and goal.state is GoalState.FAILED):
        return {"status": "DEPLOY_FAILED", "message": "" if app is None else app.last_error}
    return {"status": "RUNNING", "message": ""}
