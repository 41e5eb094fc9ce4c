"""Changes of backends. Pure: each function returns the change to the state, or raises."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from daskserve.common.copying import replace
from daskserve.common.formatting import capitalized
from daskserve.common.types import BackendTag, EndpointTag, GoalId, described, short_tag
from daskserve.control.decisions import goals
from daskserve.control.decisions.failed_deploys import not_found
from daskserve.control.decisions.target_capacity import at_capacity
from daskserve.control.records import config_ids
from daskserve.control.records.records import BackendRecord, Change, CodeRecord
from daskserve.control.records.state import State
from daskserve.control.records.versions import RESTARTS, marked, unmarked, unrestarted
from daskserve.control.scaling import recorded as scaling
from daskserve.control.scaling.policy_calls import check_built_in
from daskserve.errors import AlreadyRegisteredError, BadRequestError, NotFoundError, NotRegisteredError
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.options.specs import BackendSpec, DeploymentSpec

#: Versions that the classic system reserves.
RESERVED_VERSIONS = frozenset({"__v1__", "Unversioned"})
#: The `BackendRecord.place_options` of a backend with default options.
_PLAIN_PLACE: Mapping[str, Any] = {"demand": ActorOptions().demand()}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A change and the goal to wait for; None if there is nothing to wait for.

    ``is_update`` is whether this call, or the call that it repeats, changes the backend.
    """

    change: Change
    goal: GoalId | None
    is_update: bool = True


def get(state: State, tag: BackendTag) -> BackendRecord:
    """Return a registered backend; raise `NotRegisteredError` if it is unknown or being deleted."""
    backend = state.backends.get(tag)
    if backend is None or backend.is_deleting:
        what = described(tag, "Backend") if "/" in tag else f"Backend {tag}"  # the classic system's wording
        raise NotRegisteredError(f"{what} is not registered. Registered backends: {known_names(state)}.")
    return backend


def find(state: State, name: str) -> BackendRecord:
    """Return a backend by its tag, or an actor by its name; raise `NotFoundError` if there is none."""
    actors = (each for each in state.backends.values() if each.actor_of and short_tag(each.tag) == name)
    backend = state.backends.get(name) or next(actors, None)
    if backend is None or backend.is_deleting:
        raise NotFoundError(f"There is no backend or deployment '{name}'; there are: {known_names(state)}.")
    return backend


def known_names(state: State) -> str:
    """Return the names of the backends and deployments, for an error."""
    known = (each for each in state.backends.values() if not each.is_deleting and not each.actor_of)
    return ", ".join(sorted(each.tag for each in known)) or "none"


def configured(backend: BackendRecord, config: BackendConfig, user_config: bytes | None) -> BackendRecord:
    """Return the backend's record with another config."""
    identity = config_ids.config_id(config, user_config)
    if config_ids.is_same(backend.config_id, identity):
        identity = backend.config_id  # kept, because running replicas have it in their records
    return replace(backend, config=config, config_id=identity, user_config=user_config)


def _new_record(
    state: State, spec: BackendSpec, now: float, *, is_deployment: bool
) -> tuple[BackendRecord, CodeRecord]:
    check_built_in(
        described(spec.tag, "deployment" if is_deployment else "backend"), spec.config.autoscaling_config
    )
    version = spec.version or hashlib.sha256(spec.code).hexdigest()[:16]
    code = CodeRecord(f"{spec.tag}@{version}", spec.tag, spec.code)
    backend = BackendRecord(
        tag=spec.tag,
        version=version,
        code_key=code.name,
        config=spec.config,
        config_id="",
        actor_options=spec.actor_options,
        env=spec.env,
        request_id=spec.request_id,
        user_version=spec.user_version,
        deployed_at=now,
        is_deployment=is_deployment,
    )
    return configured(at_capacity(state, backend), spec.config, spec.user_config), code


def spec_of(backend: BackendRecord, code: bytes) -> BackendSpec:
    """Return the spec with which a backend can be deployed again."""
    return BackendSpec(
        tag=backend.tag,
        code=code,
        config=backend.config,
        user_config=backend.user_config,
        actor_options=backend.actor_options,
        version=unmarked(backend.version),
        user_version=backend.user_version,
        prev_version=None,
        env=backend.env,
        request_id="",
        timeout_s=None,
        progress_timeout_s=None,
    )


def create_backend(state: State, spec: BackendSpec, *, goal_id: GoalId, now: float, by: str = "") -> Outcome:
    """Register a backend; a retried call (same request id) changes nothing."""
    existing = state.backends.get(spec.tag)
    _check_owner(state, spec.tag, "")
    if existing is not None and not existing.is_deleting:
        if existing.request_id == spec.request_id:
            return Outcome({}, existing.goal)
        raise AlreadyRegisteredError(
            f"Cannot create backend. {capitalized(existing.display_name)} is already registered. Delete it "
            "first, or use update_backend_config to change its options."
        )
    record, code = _new_record(state, spec, now, is_deployment=False)
    change: Change = {code.key: code}
    record = scaling.carried_over(record, None, now)
    goals.open_goal(state, change, record, goal_id=goal_id, limits=spec, now=now, by=by)
    return Outcome(change, goal_id)


def deploy(
    state: State,
    spec: BackendSpec,
    *,
    goal_id: GoalId,
    now: float,
    by: str = "",
    unloadable: Collection[BackendTag] = (),
) -> Outcome:
    """Register a deployment's backend, or update an existing one to this code and config.

    The same version and config change nothing, except that lost or ``unloadable`` code is replaced. The same
    version with another config reconfigures replicas in place. Another version replaces the replicas, new
    before old.
    """
    existing = state.backends.get(spec.tag)
    wanted = deployed(state, spec, now=now, unloadable=unloadable)
    if wanted is None and existing is not None:
        is_repeated = existing.request_id == spec.request_id
        return Outcome({}, existing.goal, is_update=is_repeated)
    assert wanted is not None
    record, code = wanted
    change: Change = {code.key: code}
    goals.open_goal(state, change, record, goal_id=goal_id, limits=spec, now=now, by=by)
    return Outcome(change, goal_id)


def deployed(
    state: State,
    spec: BackendSpec,
    *,
    now: float,
    application: str = "",
    member: DeploymentSpec | None = None,
    unloadable: Collection[BackendTag] = (),
) -> tuple[BackendRecord, CodeRecord] | None:
    """Return the records of a deployment after its deploy; None if nothing changes.

    Raises
    ------
    AlreadyRegisteredError
        The name belongs to something else.
    BadRequestError
        The version is not allowed now.
    """
    record, code = _new_record(state, spec, now, is_deployment=True)
    if member is not None:
        record = replace(
            record,
            application=application,
            needs=member.needs,
            actors=member.actors,
            actor_of=member.actor_of,
        )
    existing = state.backends.get(spec.tag)
    _check_version(spec, existing)
    _check_owner(state, spec.tag, application)
    version = _distinct_version(record, existing)
    if existing is not None and unrestarted(existing.version) == version and not existing.is_deleting:
        version = existing.version
    code = replace(code, name=f"{spec.tag}@{version}")
    record = replace(record, version=version, code_key=code.name)
    if existing is not None and not existing.is_deleting:
        if existing.request_id == spec.request_id:
            return None
        if not existing.is_deployment:
            raise AlreadyRegisteredError(
                f"{described(spec.tag, 'Deployment')} cannot be deployed: a classic backend of that "
                "name is registered; delete it first."
            )
        if config_ids.is_same(existing.config_id, record.config_id):
            record = replace(record, config_id=existing.config_id)  # kept, because running replicas have it
        is_same = (existing.version, existing.config_id, existing.needs) == (
            version,
            record.config_id,
            record.needs,
        )
        has_code = code.name in state.codes and spec.tag not in unloadable
        if is_same and has_code and existing.config.to_plain() == record.config.to_plain():
            return None
    return scaling.carried_over(record, existing, now), code


def _check_owner(state: State, tag: BackendTag, application: str) -> None:
    """Raise `AlreadyRegisteredError` if the name of a backend is in use outside of this application."""
    existing = state.backends.get(tag)
    if existing is None or existing.application == application:
        return
    owner = state.apps.get(existing.application)
    if existing.is_deleting and (owner is None or not owner.is_deleting):
        return  # the backend is being deleted, and its application is not
    which = (
        f"it is a deployment of application '{existing.application}'"
        if existing.application
        else f"a {existing.kind} of that name is registered"
    )
    raise AlreadyRegisteredError(
        f"{described(tag, 'Deployment')} cannot be deployed: {which}. Delete it first, or choose another "
        "name."
    )


def _check_version(spec: BackendSpec, existing: BackendRecord | None) -> None:
    """Raise `BadRequestError` for a reserved version, or a ``prev_version`` that is not the current one."""
    given = spec.user_version
    if given is not None and (given in RESERVED_VERSIONS or RESTARTS.search(given)):
        raise BadRequestError(f"Version {spec.user_version!r} is reserved; name another one.")
    if spec.prev_version is None:
        return
    if existing is not None and existing.request_id == spec.request_id and not existing.is_deleting:
        return  # a retry of a call that succeeded
    present = None if existing is None or existing.is_deleting else existing.user_version
    if present is None:
        raise BadRequestError(
            f"prev_version '{spec.prev_version}' is specified but there is no existing "
            f"{described(spec.tag)} that has a version."
        )
    if present != spec.prev_version:
        raise BadRequestError(
            f"prev_version '{spec.prev_version}' does not match with the existing version '{present}' of "
            f"{described(spec.tag)}."
        )


def _distinct_version(record: BackendRecord, existing: BackendRecord | None) -> str:
    """Return the version of a deployment, marked with its options that are fixed for the life of a replica.

    The mark shows which running replicas have different options and must be replaced, because a replica's
    record contains no options, only its version. Default options have no mark.
    """
    options = record.place_options
    if options == _PLAIN_PLACE:
        return record.version
    # Earlier releases marked a version only if the previous version had different options.
    known = None if existing is None else (unrestarted(existing.version), existing.place_options)
    return record.version if known == (record.version, options) else marked(record.version, options)


def update_backend_config(
    state: State,
    tag: BackendTag,
    config: BackendConfig,
    user_config: bytes | None,
    *,
    sets_user_config: bool,
    goal_id: GoalId,
    now: float,
    limits: goals.TimeLimits = goals.NO_LIMITS,
    by: str = "",
) -> Outcome:
    """Merge the given options into a backend's options."""
    backend = get(state, tag)
    current = backend.config
    try:
        merged = current.merged(config)
    except ValidationError as error:
        # The client has validated each option separately.
        raise BadRequestError(f"The options of {backend.display_name} are incompatible: {error}") from error
    for name in sorted(current.fixed().keys() | merged.fixed().keys()):
        if getattr(merged, name) != getattr(current, name):
            raise BadRequestError(
                f"The option {name} of {backend.display_name} is {getattr(current, name)!r} and cannot "
                "be changed in place; delete and recreate it, or deploy it again, which replaces its "
                "replicas."
            )
    if merged.autoscaling_config != current.autoscaling_config:
        check_built_in(backend.display_name, merged.autoscaling_config)
    wanted = configured(backend, merged, user_config if sets_user_config else backend.user_config)
    wanted = scaling.carried_over(wanted, backend, now)
    if wanted == backend:
        return Outcome({}, backend.goal)
    change: Change = {}
    goals.open_goal(state, change, wanted, goal_id=goal_id, limits=limits, now=now, by=by)
    return Outcome(change, goal_id)


def delete_backend(
    state: State,
    tag: BackendTag,
    *,
    is_forced: bool,
    goal_id: GoalId,
    leaving: EndpointTag | None = None,
    by: str = "",
) -> Outcome:
    """Stop a backend's replicas, after draining unless forced, and remove it; ignore an unknown tag.

    The endpoint ``leaving`` may still use the backend, because the same change removes that endpoint.
    """
    backend = state.backends.get(tag)
    if backend is None:
        return Outcome({}, None)
    users = [each for each in state.endpoints_of(tag) if each != leaving]
    if users:
        raise BadRequestError(
            f"{capitalized(backend.display_name)} is used by endpoint {', '.join(map(repr, sorted(users)))} "
            "and cannot be deleted. Please remove the backend from all endpoints (traffic and shadows) and "
            "try again."
        )
    if backend.is_deleting and (backend.is_forced or not is_forced):
        return Outcome({}, backend.goal)
    change: Change = {}
    wanted = replace(backend, is_deleting=True, is_forced=is_forced)
    goals.open_goal(state, change, wanted, goal_id=goal_id, by=by)
    return Outcome(change, goal_id)


def describe(state: State, tag: BackendTag) -> dict[str, Any]:
    """Return a backend's config in plain values, with its user_config still pickled."""
    backend = get(state, tag)
    return {"config": backend.config.to_plain(), "user_config": backend.user_config}


def get_endpoint(state: State, name: str) -> dict[str, Any]:
    """Return the entry of one endpoint in `list_endpoints`; raise `NotFoundError` if there is none."""
    endpoint = state.endpoints.get(name)
    if endpoint is None:
        raise not_found(state, f"Endpoint '{short_tag(name)}' does not exist.", name)
    return {
        "route": endpoint.route,
        "methods": list(endpoint.methods),
        "traffic": dict(endpoint.traffic),
        "shadows": dict(endpoint.shadows),
        "python_methods": list(endpoint.python_methods),
        "is_legacy": endpoint.is_legacy,
    }
