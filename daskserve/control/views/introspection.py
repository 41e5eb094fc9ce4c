"""The introspection calls of the classic controller, under their own names. Pure.

`VIEWS` lists those without arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from daskserve.control.decisions import backends as backend_decisions
from daskserve.control.decisions import endpoints as endpoint_state
from daskserve.control.decisions.failed_deploys import not_found
from daskserve.control.observed.observed import Observed
from daskserve.control.proxies.step import is_ready
from daskserve.control.records.records import BackendRecord, GoalState
from daskserve.control.records.state import State
from daskserve.control.views.backends import UNVERSIONED
from daskserve.control.views.published import published_backend
from daskserve.options.environment import Environment
from daskserve.options.fields.secrets import masked


def goals(state: State) -> list[dict[str, Any]]:
    """Return the pending and the latest ended goals, oldest first."""
    ordered = sorted(state.goals.values(), key=lambda goal: goal.number)
    return [
        {
            "goal_id": goal.goal_id,
            "backend": goal.backend,
            "application": goal.application,
            "state": goal.state.value,
            "failures": sum(goal.failures.values()),
            "by": goal.by,
            "successor": goal.successor,
        }
        for goal in ordered
    ]


def deployment_info(state: State, name: str) -> dict[str, Any]:
    """Return a deployment's info and route; raise `NotFoundError` (a `KeyError`) if there is none."""
    backend = state.backends.get(name)
    if backend is None or backend.is_deleting or not backend.is_deployment:
        raise not_found(state, f"Deployment {name} does not exist.", name)
    endpoint = state.endpoints.get(name)
    return {
        "name": name,
        "version": backend.user_version,
        "config": masked(backend.config.to_plain()),
        "actor_options": _shown_options(backend),
        "python_methods": list(endpoint.python_methods) if endpoint is not None else [],
        "route": endpoint.route if endpoint is not None else None,
        "deployed_at": backend.deployed_at,
        "running": len(state.running(name)),
    }


def _shown_options(backend: BackendRecord) -> dict[str, Any]:
    found = backend.place_options
    if found.get("env") is not None:
        found["env"] = Environment.from_text(found["env"]).to_shown_text()
    return found


def list_deployments(state: State) -> dict[str, Any]:
    """Return the info of every deployment, by name."""
    return {
        name: deployment_info(state, name)
        for name, backend in state.backends.items()
        if backend.is_deployment and not backend.is_deleting
    }


def snapshot(state: State, instance: str) -> dict[str, Any]:
    """Return the classic system's snapshot of the deployments, for external monitoring tools."""
    found = {}
    for tag, backend in state.backends.items():
        if backend.is_deleting:
            continue
        endpoints = [state.endpoints[name] for name in state.endpoints_of(tag)]
        route = next((each.route for each in endpoints if each.route is not None), None)
        found[tag] = {
            "name": tag,
            "namespace": instance,
            "job_id": None,
            "class_name": backend.config.internal_metadata.class_name,
            "version": backend.user_version or UNVERSIONED,
            "http_route": route,
            "status": "RUNNING",
            "start_time": int(backend.deployed_at),
            "end_time": 0,
        }
    return found


#: The calls by name.
VIEWS: Mapping[str, Callable[[State, Observed], Any]] = {
    "get_all_backends": lambda state, _: {
        tag: masked(backend_decisions.describe(state, tag)["config"])
        for tag, backend in state.backends.items()
        if not backend.is_deleting
    },
    "get_all_endpoints": lambda state, _: {
        name: backend_decisions.get_endpoint(state, name) for name in state.endpoints
    },
    "get_http_proxies": lambda state, observed: {
        proxy.name: {
            "worker": proxy.worker,
            "host": proxy.host,
            "port": proxy.port,
            "is_ready": is_ready(observed, proxy),
        }
        for proxy in state.proxies.values()
        if not proxy.is_leaving
    },
    "all_replica_handles": lambda state, _: {
        tag: [each.tag for each in state.running(tag)] for tag in state.backends
    },
    "get_router_config": lambda state, _: endpoint_state.routes(state),
    "get_traffic_policies": lambda state, _: {
        name: {"traffic": dict(endpoint.traffic), "shadows": dict(endpoint.shadows)}
        for name, endpoint in state.endpoints.items()
    },
    "get_backend_configs": lambda state, _: {
        tag: masked(backend.config.to_plain())
        for tag, backend in state.backends.items()
        if not backend.is_deleting
    },
    "queue_lengths": lambda _, observed: observed.loads.queue_lengths(),
    # Every process has its metrics in its default Prometheus registry, which Dask serves.
    "get_metric_exporter": lambda _, __: {"kind": "prometheus", "registry": "default", "path": "/metrics"},
    "num_pending_goals": lambda state, _: sum(
        goal.state is GoalState.PENDING for goal in state.goals.values()
    ),
    "goals": lambda state, _: goals(state),
    "list_deployments": lambda state, _: list_deployments(state),
    "replica_sets": lambda state, observed: {
        tag: published_backend(state, tag, observed.notes_of(tag).unloadable) for tag in state.backends
    },
}
