"""What the verbs about backends do to the state. Pure: each returns the change it makes, or raises."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack
from pydantic import ValidationError

from daskserve.control import goals
from daskserve.control import scaled as scaling
from daskserve.control.records import BackendRecord, Change, CodeRecord
from daskserve.control.state import State
from daskserve.control.target_capacity import at_capacity
from daskserve.errors import AlreadyRegisteredError, BadRequestError, NotFoundError, NotRegisteredError
from daskserve.options.config import ActorOptions, BackendConfig
from daskserve.types import BackendTag, EndpointTag, GoalId

#: Config fields that running replicas need not hear of.
_CONTROLLER_ONLY = frozenset(
    {
        "autoscaling_config",
        "experimental_graceful_shutdown_timeout_s",
        "external_scaler_enabled",
        "internal_metadata",
        "max_queued_requests",
        "num_replicas",
    }
)
#: Versions that the classic system keeps to itself.
RESERVED_VERSIONS = frozenset({"__v1__", "Unversioned"})


@dataclass(frozen=True, slots=True)
class Wish:
    """A backend as a client asks for it, in plain values."""

    tag: BackendTag
    code: bytes
    config: Mapping[str, Any]
    user_config: bytes | None
    actor_options: Mapping[str, Any]
    version: str | None
    request_id: str
    timeout_s: float | None
    env: str | None = None
    user_version: str | None = None
    prev_version: str | None = None
    #: Filled in by the controller.
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A change with the goal to wait for; None if there is nothing to wait for."""

    change: Change
    goal: GoalId | None


def get(state: State, tag: BackendTag) -> BackendRecord:
    """Return a registered backend; `NotRegisteredError` for one that is not, or is being deleted."""
    backend = state.backends.get(tag)
    if backend is None or backend.is_deleting:
        known = sorted(each.tag for each in state.backends.values() if not each.is_deleting)
        raise NotRegisteredError(
            f"Backend {tag} is not registered. Registered backends: {', '.join(known) or 'none'}."
        )
    return backend


def configured(backend: BackendRecord, config: BackendConfig, user_config: bytes | None) -> BackendRecord:
    """Return the backend's record with another config."""
    plain = config.model_dump(exclude={"user_config"}, exclude_unset=True)
    plain["internal_metadata"] = config.internal_metadata.model_dump()
    concurrency = config.concurrency()
    told = {key: value for key, value in plain.items() if key not in _CONTROLLER_ONLY}
    told["concurrency"] = concurrency
    digest = hashlib.sha256(msgpack.packb(sorted(told.items())) + (user_config or b""))
    return replace(
        backend,
        config=plain,
        config_id=digest.hexdigest()[:16],
        concurrency=concurrency,
        user_config=user_config,
    )


def _place_options(wish: Wish) -> dict[str, Any]:
    """Return what decides where replicas run: those with other such options must be replaced."""
    options = ActorOptions(**wish.actor_options)
    found = {**options.model_dump(exclude_unset=True), "demand": options.demand()}
    if wish.config.get("isolation", "thread") != "thread":
        found |= {"isolation": wish.config["isolation"], "env": wish.env}
    return found


def _new_record(state: State, wish: Wish, *, is_deployment: bool) -> tuple[BackendRecord, CodeRecord]:
    version = wish.version or hashlib.sha256(wish.code).hexdigest()[:16]
    code = CodeRecord(f"{wish.tag}@{version}", wish.tag, wish.code)
    backend = BackendRecord(
        tag=wish.tag,
        version=version,
        code_key=code.name,
        config={},
        config_id="",
        concurrency=1,
        actor_options=_place_options(wish),
        request_id=wish.request_id,
        user_version=wish.user_version,
        deployed_at=wish.now,
        is_deployment=is_deployment,
    )
    backend = at_capacity(state, backend)
    return configured(backend, BackendConfig(**wish.config), wish.user_config), code


def create_backend(state: State, wish: Wish, *, goal_id: GoalId) -> Outcome:
    """Register a backend; a retried call (same request id) changes nothing."""
    existing = state.backends.get(wish.tag)
    if existing is not None and not existing.is_deleting:
        if existing.request_id == wish.request_id:
            return Outcome({}, existing.goal)
        raise AlreadyRegisteredError(
            f"Cannot create backend. Backend '{wish.tag}' is already registered. Delete it first, or use "
            "update_backend_config to change its options."
        )
    record, code = _new_record(state, wish, is_deployment=False)
    change: Change = {code.key: code}
    record = scaling.carried_over(record, None, wish.now)
    goals.open_goal(state, change, record, goal_id=goal_id, timeout_s=wish.timeout_s)
    return Outcome(change, goal_id)


def deploy(state: State, wish: Wish, *, goal_id: GoalId) -> Outcome:
    """Register a deployment's backend, or bring an existing one to this code and config.

    The same version and config change nothing; the same version with another config is reconfigured in
    place; another version replaces the replicas, new before old.
    """
    record, code = _new_record(state, wish, is_deployment=True)
    existing = state.backends.get(wish.tag)
    _check_version(wish, existing)
    if existing is not None and not existing.is_deleting:
        if existing.request_id == wish.request_id:
            return Outcome({}, existing.goal)
        if not existing.is_deployment:
            raise AlreadyRegisteredError(
                f"Cannot deploy '{wish.tag}': a classic backend of that name is registered; delete it first."
            )
        version = _told_apart(record, existing)
        code = replace(code, name=f"{wish.tag}@{version}")
        record = replace(record, version=version, code_key=code.name)
        is_same = existing.version == version and existing.config_id == record.config_id
        if is_same and existing.config == record.config:
            return Outcome({}, existing.goal)
    change: Change = {code.key: code}
    record = scaling.carried_over(record, existing, wish.now)
    goals.open_goal(state, change, record, goal_id=goal_id, timeout_s=wish.timeout_s)
    return Outcome(change, goal_id)


def _check_version(wish: Wish, existing: BackendRecord | None) -> None:
    """Raise `BadRequestError` for a reserved version, or a ``prev_version`` that is not the present one."""
    if wish.user_version is not None and wish.user_version in RESERVED_VERSIONS:
        raise BadRequestError(f"Version {wish.user_version!r} is reserved; name another one.")
    if wish.prev_version is None:
        return
    if existing is not None and existing.request_id == wish.request_id and not existing.is_deleting:
        return  # the retry of a call that succeeded
    present = None if existing is None or existing.is_deleting else existing.user_version
    if present is None:
        raise BadRequestError(
            f"prev_version '{wish.prev_version}' is specified but there is no existing deployment "
            f"'{wish.tag}' that has a version."
        )
    if present != wish.prev_version:
        raise BadRequestError(
            f"prev_version '{wish.prev_version}' does not match with the existing version '{present}' of "
            f"deployment '{wish.tag}'."
        )


def _told_apart(record: BackendRecord, existing: BackendRecord) -> str:
    """Return the version of a deployment: its own, marked if an existing one differs in nothing but options.

    Options decide where replicas may be, so those with other options must be replaced.
    """

    def marked(options: Mapping[str, Any]) -> str:
        return f"{record.version}+{hashlib.sha256(msgpack.packb(options)).hexdigest()[:8]}"

    if existing.actor_options == record.actor_options:
        same = (record.version, marked(existing.actor_options))
        return existing.version if existing.version in same else record.version
    is_of_this_version = existing.version == record.version or existing.version.startswith(
        f"{record.version}+"
    )
    return marked(record.actor_options) if is_of_this_version else record.version


def update_backend_config(
    state: State,
    tag: BackendTag,
    config: Mapping[str, Any],
    user_config: bytes | None,
    *,
    sets_user_config: bool,
    goal_id: GoalId,
    timeout_s: float | None,
    now: float = 0.0,
) -> Outcome:
    """Merge the given options into a backend's; the others stay."""
    backend = get(state, tag)
    current = BackendConfig(**backend.config)
    try:
        merged = current.merged(BackendConfig(**config))
    except ValidationError as error:
        # Each option by itself was right, or the client would have said so.
        raise BadRequestError(f"The options of backend '{tag}' do not go together: {error}") from error
    if merged.isolation != current.isolation:
        raise BadRequestError(
            f"The isolation of backend '{tag}' is {current.isolation!r} and cannot be changed in place; "
            "delete it and create it anew, or deploy a deployment again, which replaces its replicas."
        )
    wanted = configured(backend, merged, user_config if sets_user_config else backend.user_config)
    wanted = scaling.carried_over(wanted, backend, now)
    if wanted == backend:
        return Outcome({}, backend.goal)
    change: Change = {}
    goals.open_goal(state, change, wanted, goal_id=goal_id, timeout_s=timeout_s)
    return Outcome(change, goal_id)


def delete_backend(
    state: State, tag: BackendTag, *, is_forced: bool, goal_id: GoalId, leaving: EndpointTag | None = None
) -> Outcome:
    """Let a backend's replicas finish (or not, if forced) and forget it; an unknown tag changes nothing.

    The endpoint ``leaving`` may still use it: it goes in the same change.
    """
    backend = state.backends.get(tag)
    if backend is None:
        return Outcome({}, None)
    users = [each for each in state.endpoints_of(tag) if each != leaving]
    if users:
        raise BadRequestError(
            f"Backend '{tag}' is used by endpoint {', '.join(repr(each) for each in sorted(users))} and "
            "cannot be deleted. Please remove the backend from all endpoints (traffic and shadows) and "
            "try again."
        )
    if backend.is_deleting and (backend.is_forced or not is_forced):
        return Outcome({}, backend.goal)
    change: Change = {}
    wanted = replace(backend, is_deleting=True, is_forced=is_forced)
    goals.open_goal(state, change, wanted, goal_id=goal_id, timeout_s=None)
    return Outcome(change, goal_id)


def describe(state: State, tag: BackendTag) -> dict[str, Any]:
    """Return a backend's config in plain values, with its user_config still pickled."""
    backend = get(state, tag)
    return {"config": dict(backend.config), "user_config": backend.user_config}


def get_endpoint(state: State, name: str) -> dict[str, Any]:
    """Return what `list_endpoints` tells of one endpoint; `NotFoundError` if there is none."""
    endpoint = state.endpoints.get(name)
    if endpoint is None:
        raise NotFoundError(f"Endpoint '{name}' does not exist.")
    return {
        "route": endpoint.route,
        "methods": list(endpoint.methods),
        "traffic": dict(endpoint.traffic),
        "shadows": dict(endpoint.shadows),
        "python_methods": list(endpoint.python_methods),
        "is_legacy": endpoint.is_legacy,
    }
