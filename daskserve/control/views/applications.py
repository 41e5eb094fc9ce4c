"""The status of applications and their deployments as plain values. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from daskserve.common.types import ReplicaState, short_tag
from daskserve.control.backend import application as app_state
from daskserve.control.observed.observed import Observed
from daskserve.control.records.records import AppRecord, BackendRecord, ReplicaRecord
from daskserve.control.records.state import State
from daskserve.control.verbs import goals
from daskserve.control.views import views

#: The status of a deployment while its number of replicas changes.
_SCALING: Mapping[str, str] = {"UPSCALE": "UPSCALING", "DOWNSCALE": "DOWNSCALING"}


def application_status(state: State, observed: Observed, app: AppRecord) -> dict[str, Any]:
    """Return the status of an application, which is that of its worst deployment."""
    deployments = {
        name: deployment_status(state, observed, app, name, state.backends[tag])
        for name, tag in app.deployments.items()
        if tag in state.backends
    }
    if app.failed and app.failed not in deployments:
        deployments[app.failed] = _failed_at_first(app)
    word = _word(state, app, deployments)
    return {
        "status": word,
        "message": app.last_error or _message(deployments),
        "last_deployed_time_s": app.deployed_at,
        "route_prefix": app.route,
        "deployments": deployments,
    }


def _word(state: State, app: AppRecord, deployments: Mapping[str, Mapping[str, Any]]) -> str:
    if app.is_deleting:
        return "DELETING"
    if app.goal is not None:
        has_begun = any(state.replicas_of(tag) for tag in app.tags)
        return "DEPLOYING" if has_begun else "NOT_STARTED"
    if app.last_error:
        return "DEPLOY_FAILED"
    words = {each["status"] for each in deployments.values()}
    if "UNHEALTHY" in words:
        return "UNHEALTHY"
    # The autoscaler changes numbers all the time; a change that a user asked for is a deploy.
    asked = any(each["status_trigger"] == "CONFIG_UPDATE_STARTED" for each in deployments.values())
    return "DEPLOYING" if asked else "RUNNING"


def _message(deployments: Mapping[str, Mapping[str, Any]]) -> str:
    found = (f"{name}: {each['message']}" for name, each in deployments.items() if each["message"])
    return next(found, "")


def deployment_status(
    state: State, observed: Observed, app: AppRecord, name: str, backend: BackendRecord
) -> dict[str, Any]:
    """Return the status of one deployment of an application."""
    replicas = state.replicas_of(backend.tag)
    word, trigger = _deployment_word(observed, backend, replicas)
    has_failed = app.failed == name and word == "HEALTHY"
    message = app.last_error if has_failed else views.message_of(observed, backend, replicas)
    awaited = app_state.awaited(state, observed, backend) if app.goal is not None else []
    return {
        "status": "DEPLOY_FAILED" if has_failed else word,
        "status_trigger": "REPLICA_STARTUP_FAILED" if has_failed else trigger,
        "replica_states": dict(Counter(_replica_word(observed, backend, each) for each in replicas)),
        "actor_of": backend.actor_of[0] if backend.actor_of else "",
        "message": message or (f"waits for {', '.join(map(short_tag, awaited))}" if awaited else ""),
        "dead_replicas": views.dead_replicas(observed, backend.tag),
    }


def _failed_at_first(app: AppRecord) -> dict[str, Any]:
    """Return the status of a deployment that has never come up, and is gone."""
    return {
        "status": "DEPLOY_FAILED",
        "status_trigger": "REPLICA_STARTUP_FAILED",
        "replica_states": {},
        "message": app.last_error,
        "dead_replicas": [],
    }


def _deployment_word(
    observed: Observed, backend: BackendRecord, replicas: list[ReplicaRecord]
) -> tuple[str, str]:
    """Return a deployment's status and its trigger."""
    if backend.is_deleting:
        return "UPDATING", "DELETING"
    if backend.goal is not None and not goals.is_reached(backend, replicas):
        return _SCALING.get(backend.last_change, "UPDATING"), "CONFIG_UPDATE_STARTED"
    running = sum(each.state is ReplicaState.RUNNING for each in replicas)
    if running < backend.num_replicas and observed.notes_of(backend.tag).failures:
        return "UNHEALTHY", "REPLICA_STARTUP_FAILED"
    is_missing = running < backend.num_replicas and views.is_replacing(observed, backend)
    if running != backend.num_replicas and backend.scaled_to is not None and not is_missing:
        return "UPSCALING" if running < backend.num_replicas else "DOWNSCALING", "AUTOSCALING"
    if running < backend.num_replicas:
        return "UNHEALTHY", "HEALTH_CHECK_FAILED"
    return "HEALTHY", f"{_last_change(backend)}_COMPLETED"


def _last_change(backend: BackendRecord) -> str:
    """Return the kind of the last change, be it a client's or the autoscaler's."""
    if backend.scalings and backend.scalings[-1][0] > backend.deployed_at:
        _, before, after, _ = backend.scalings[-1]
        return "UPSCALE" if after > before else "DOWNSCALE"
    return backend.last_change


def _replica_word(observed: Observed, backend: BackendRecord, replica: ReplicaRecord) -> str:
    """Return the state of a replica as users see it."""
    if replica.state in (ReplicaState.SHOULD_STOP, ReplicaState.STOPPING):
        return "STOPPING"
    if replica.state is not ReplicaState.RUNNING:
        return "STARTING"
    if replica.tag not in observed.ready:
        return "RECOVERING"
    if replica.tag in observed.terminating or observed.retiring_of([replica]):
        return "PENDING_MIGRATION"
    is_current = replica.version != backend.version or replica.config_id == backend.config_id
    return "RUNNING" if is_current else "UPDATING"
