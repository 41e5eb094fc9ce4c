"""The rollback of an application to an earlier revision. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgpack

from daskserve.common.copying import replace
from daskserve.common.types import BackendTag, GoalId
from daskserve.control.decisions import applications as app_decisions
from daskserve.control.decisions import backends as backend_decisions
from daskserve.control.decisions.declaring import redeclared
from daskserve.control.decisions.failed_deploys import application_not_found
from daskserve.control.decisions.goals import TimeLimits
from daskserve.control.decisions.history.revisions import current, digest_of, earlier, unpacked
from daskserve.control.records.declared import ConfigRecord
from daskserve.control.records.records import BackendRecord, Change, CodeRecord, GoalRecord
from daskserve.control.records.revisions import RevisionRecord, RevisionState
from daskserve.control.records.state import State
from daskserve.errors import BadRequestError, DeployError, NotFoundError
from daskserve.options.specs import ApplicationSpec, DeploymentSpec


@dataclass(frozen=True, slots=True)
class Rollback:
    """The change of a rollback, the goal to wait for, and the number of the revision that is deployed again.

    Without a goal, that revision already runs.
    """

    change: Change = field(default_factory=dict)
    goal: GoalId | None = None
    revision: int = 0


def rollback(
    state: State,
    name: str,
    number: int | None,
    *,
    goal_id: GoalId,
    request_id: str,
    limits: TimeLimits,
    now: float,
    by: str = "",
    unloadable: Collection[BackendTag] = (),
) -> Rollback:
    """Deploy an earlier revision of an application; a repeated call changes nothing.

    A deleted application comes back. If the change fails, the current revision keeps running, as for any
    deploy.

    Raises
    ------
    NotFoundError
        There is no such application or revision, or none that ran before.
    BadRequestError
        The revision has never run, or its code is not kept any more.
    AlreadyRegisteredError
        Another application has its route now.
    """
    revisions = state.revisions.of(name)
    if not revisions:
        raise application_not_found(state, name)
    repeated = next((each for each in revisions if each.request_id == request_id), None)
    if repeated is not None:
        goal_of = repeated.goal if repeated.goal in state.goals else None
        if goal_of is None and repeated.state is RevisionState.FAILED:
            raise DeployError(repeated.reason)
        is_running = repeated.state is RevisionState.RUNNING
        return Rollback({}, None if is_running else goal_of, repeated.rollback_of)
    target = _chosen(name, revisions, number)
    spec = _spec_of(state, target, request_id, limits)
    deployed = app_decisions.deploy(
        state,
        [spec],
        new_goal=lambda: goal_id,
        now=now,
        by=by,
        unloadable=unloadable,
        configs=_config_of(state, target, by, now),
    )
    change, tags = deployed.change, {f"backend/{tag}" for tag in deployed.tags}
    # Do not write code again that the store already has, because the stored one may be the only copy of a
    # parcel's content.
    same = [key for key, each in change.items() if isinstance(each, CodeRecord) and _is_kept(state, each)]
    for key in same:
        del change[key]
    for key, each in list(change.items()):
        if isinstance(each, BackendRecord) and each.key in tags:
            # The version has run before, so it replaces the current one without the steps of a rollout.
            change[key] = replace(each, is_exact=True, rollout=None)
    goal = change.get(f"goal/{goal_id}")
    if isinstance(goal, GoalRecord):
        change[goal.key] = replace(goal, rollback_of=target.number)
    return Rollback(change, deployed.goals[name], target.number)


def _config_of(state: State, revision: RevisionRecord, by: str, now: float) -> Mapping[str, ConfigRecord]:
    """Return the declared configuration of a revision, to match the deployed application.

    Applying the current file afterwards is a change again. Until then, nothing is built from it.
    """
    if not revision.config:
        return {}
    name = revision.application
    record = redeclared(state, name, msgpack.unpackb(revision.config), by=by, now=now)
    origin = revision.origin
    return {name: replace(record, source=origin.get("file", ""), version=origin.get("version", ""))}


def _is_kept(state: State, code: CodeRecord) -> bool:
    return state.codes.get(code.name) == code


def _chosen(name: str, revisions: Sequence[RevisionRecord], number: int | None) -> RevisionRecord:
    """Return the revision with a number; without a number, the last one that ran before the wanted one."""
    if number is not None:
        found = next((each for each in revisions if each.number == number), None)
        if found is None:
            known = ", ".join(str(each.number) for each in revisions)
            raise NotFoundError(f"Application '{name}' has no revision {number}; it has: {known}.")
        return found
    is_under_way = revisions[-1].state is RevisionState.DEPLOYING
    found = current(revisions) if is_under_way else None
    found = found or earlier(list(revisions))
    if found is None:
        raise NotFoundError(
            f"Application '{name}' has no earlier revision that ran and whose code is still stored. To "
            f"deploy another revision, choose one from `daskserve history {name}`."
        )
    return found


def _spec_of(state: State, revision: RevisionRecord, request_id: str, limits: TimeLimits) -> ApplicationSpec:
    what = f"Revision {revision.number} of application '{revision.application}' cannot be deployed again"
    if not revision.is_complete:
        why = (
            "its code is no longer stored, because the code of old revisions has exceeded "
            "daskserve.controller.history-bytes"
            if revision.ran_at
            else f"it has never run ({revision.state.value})"
        )
        raise BadRequestError(f"{what}: {why}. Deploy it from its source.")
    route, backends, methods = unpacked(revision.spec)
    deployments = []
    for name, backend in backends.items():
        code = state.codes.get(backend.code_key)
        digest = revision.digests.get(backend.tag)
        if code is None or (digest is not None and digest != digest_of(code)):
            why = "is lost" if code is None else "was replaced by other code of the same version"
            raise BadRequestError(f"{what}: the code of '{name}' {why}. Deploy it from its source.")
        spec = backend_decisions.spec_of(backend, code.code)
        spec = replace(
            spec,
            request_id=request_id,
            timeout_s=limits.timeout_s,
            progress_timeout_s=limits.progress_timeout_s,
        )
        deployments.append(
            DeploymentSpec(
                name=name,
                spec=spec,
                python_methods=tuple(methods.get(name, ())),
                needs=backend.needs,
                actors=backend.actors,
                actor_of=backend.actor_of,
            )
        )
    return ApplicationSpec(
        revision.application,
        route,
        tuple(deployments),
        request_id,
        limits.timeout_s,
        limits.progress_timeout_s,
    )
