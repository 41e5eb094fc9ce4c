"""The content of the page of an instance: the status, with replicas and rollouts by deployment. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from daskserve.control.observed.observed import Observed
from daskserve.control.records.records import BackendRecord, ReplicaRecord
from daskserve.control.records.state import State
from daskserve.control.scaling.recorded import current_bounds
from daskserve.control.views import actors as actor_views
from daskserve.control.views import backends as backend_views
from daskserve.control.views.applications import application_status, replica_word
from daskserve.control.views.builds import with_builds
from daskserve.control.views.rollouts import rollout_status

#: The name of the part about the instance, the prefix of the parts about applications, and the name of the
#: part about other backends.
INSTANCE, APPLICATION, CLASSIC = "instance", "app/", "classic"

#: Maximum number of multiplexed models of a replica that are listed.
MAX_MODELS = 20


def overview(
    state: State, observed: Observed, instance: Mapping[str, Any], waiting: Mapping[str, str], wall: float
) -> dict[str, str]:
    """Return the parts of the overview as JSON: of the instance, and of each application.

    Parameters
    ----------
    instance : dict
        The controller's own state of the instance.
    waiting : dict
        Why applications are not built yet.
    """
    known = {each.name: application_status(state, observed, each, wall) for each in state.apps}
    applications = with_builds(state, known, waiting)
    parts: dict[str, Any] = {INSTANCE: {**instance, "target_capacity": state.capacity.percent}}
    for name, status in applications.items():
        parts[f"{APPLICATION}{name}"] = _application(state, observed, name, status)
    classic = {
        tag: {**backend_views.backend_status(state, observed, each, wall), **_backend(state, observed, each)}
        for tag, each in state.backends.items()
        if not each.application
    }
    if classic:
        parts[CLASSIC] = {"name": "", "deployments": classic}
    # Sort the keys, so that equal parts give equal strings.
    return {name: json.dumps(part, sort_keys=True, default=str) for name, part in parts.items()}


def _application(state: State, observed: Observed, name: str, status: Mapping[str, Any]) -> dict[str, Any]:
    app = state.apps.get(name)
    tags = {} if app is None else app.deployments
    found = {}
    for each, values in status["deployments"].items():
        backend = state.backends.get(tags.get(each, ""))
        facts = {} if backend is None else _backend(state, observed, backend)
        found[each] = {**values, **facts, "is_ingress": app is not None and tags.get(each) == app.ingress}
    return {**status, "name": name, "deployments": found}


def _backend(state: State, observed: Observed, backend: BackendRecord) -> dict[str, Any]:
    replicas = state.replicas_of(backend.tag)
    bounds = current_bounds(backend)
    others = state.apps.get(backend.application)
    names = {} if others is None else {tag: name for name, tag in others.deployments.items()}
    return {
        "tag": backend.tag,
        "wanted": backend.num_replicas,
        "running": len(state.running(backend.tag)),
        "version": backend.user_version or "",
        "deployed_at": backend.deployed_at,
        "needs": [names.get(each, each) for each in backend.needs],
        "max_ongoing": backend.config.concurrency(),
        "autoscaling": None if bounds is None else [bounds.least, bounds.most],
        "replicas": [_replica(observed, backend, each) for each in replicas],
        "rollout": None if backend.rollout is None else rollout_status(state, observed, backend),
    }


def _replica(observed: Observed, backend: BackendRecord, replica: ReplicaRecord) -> dict[str, Any]:
    info = observed.workers.get(replica.worker or "")
    facts = observed.ready.get(replica.tag) or {}
    return {
        "id": replica.tag,
        "state": replica_word(observed, backend, replica),
        "worker": replica.worker,
        "worker_name": "" if info is None else str(info.name or ""),
        "host": "" if info is None else info.host,
        "pid": facts.get("pid"),
        "since": replica.moved_at,
        "is_old": replica.version != backend.version,
        "message": actor_views.replica_message(observed, replica.tag),
        "models": _models(observed.multiplexed.of(replica.tag)),
    }


def _models(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a replica's multiplexed models in an order that does not depend on their use."""
    return {**found, "models": sorted(found["models"])[:MAX_MODELS]} if found else {}
