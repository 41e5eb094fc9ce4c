"""The restart of replicas with the same code. Pure."""

from __future__ import annotations

from daskserve.common.copying import replace
from daskserve.common.types import GoalId
from daskserve.control.decisions import goals
from daskserve.control.decisions.applications import known
from daskserve.control.decisions.backends import Outcome
from daskserve.control.decisions.scale import tag_of
from daskserve.control.records.records import AppRecord, BackendRecord, Change
from daskserve.control.records.state import State
from daskserve.control.records.versions import restarted
from daskserve.errors import DeployError


def restart(
    state: State,
    application: str,
    deployment: str | None,
    *,
    goal_id: GoalId,
    request_id: str,
    limits: goals.TimeLimits,
    now: float,
    by: str = "",
) -> Outcome:
    """Restart all deployments of an application, or one; a repeated call changes nothing.

    If the new replicas do not start, the old ones are kept.

    Raises
    ------
    NotFoundError
        There is no such application or deployment.
    DeployError
        The code of a deployment is lost.
    """
    app = known(state, application)
    tags = app.tags if deployment is None else (tag_of(state, deployment, application),)
    backends = [each for tag in tags if (each := state.backends.get(tag)) is not None and not each.actor_of]
    if backends and all(each.request_id == request_id for each in backends):
        return Outcome({}, backends[0].goal)
    change: Change = {}
    wanted: list[AppRecord | BackendRecord] = []
    for each in backends:
        code = state.codes.get(each.code_key)
        if code is None:
            raise DeployError(f"The store has no code of {each.display_name}; deploy it again.")
        version = restarted(each.version)
        copied = replace(code, name=f"{each.tag}@{version}")
        change[copied.key] = copied
        wanted.append(replace(each, version=version, code_key=copied.name, request_id=request_id))
    if deployment is None:
        wanted.insert(0, app)
    goals.open_goal(state, change, *wanted, goal_id=goal_id, limits=limits, now=now, by=by)
    return Outcome(change, goal_id)
