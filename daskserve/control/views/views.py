"""The readable state of an instance as plain values: pure functions of its records and observations.

`VIEWS` lists them, including the classic controller's introspection calls under their own names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from daskserve.common.types import (
    ActorKind,
    BackendTag,
    Reachability,
    ReplicaTag,
    WorkerAddress,
)
from daskserve.control.backend import progress
from daskserve.control.observed.observed import Activity, Observed
from daskserve.control.proxies.step import is_ready
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.records.records import BackendRecord, GoalState
from daskserve.control.records.state import State
from daskserve.control.verbs import backends as backend_verbs
from daskserve.control.verbs import endpoints as endpoint_state
from daskserve.control.verbs.failed_deploys import not_found
from daskserve.control.views.messages import message_of, with_models
from daskserve.control.views.published import published_backend
from daskserve.options.environment import Environment
from daskserve.options.fields.secrets import masked
from daskserve.payload.error_text import text_of

UNVERSIONED = "Unversioned"


def backend_status(state: State, observed: Observed, backend: BackendRecord, wall: float) -> dict[str, Any]:
    """Return a backend's status, with the reason if it is not healthy."""
    models = state.models.get(backend.tag)
    replicas = state.replicas_of(backend.tag)
    running = len(state.running(backend.tag))
    return {
        "kind": backend.kind,
        "application": backend.application,
        "status": status_word(observed, backend, running),
        "wanted": backend.num_replicas,
        "running": running,
        "version": backend.user_version or UNVERSIONED,
        "message": with_models(state, observed, backend.tag, message_of(observed, backend, replicas, wall)),
        "models": {
            name: {version: each["state"] for version, each in versions.items()}
            for name, versions in ({} if models is None else models.models).items()
        },
        "dead_replicas": dead_replicas(observed, backend.tag),
    }


def dead_replicas(observed: Observed, tag: BackendTag) -> list[dict[str, Any]]:
    """Return the last dead replicas of a backend, oldest first, with the reasons."""
    return [asdict(each) for each in observed.notes_of(tag).dead]


def status_word(observed: Observed, backend: BackendRecord, running: int) -> str:
    """Return the status word of a backend with the given number of running replicas."""
    if backend.is_deleting:
        return "DELETING"
    if running >= backend.num_replicas and backend.goal is None:
        return "HEALTHY"
    # The backend is being scaled, unless replicas fail.
    is_failing = observed.notes_of(backend.tag).failures or is_replacing(observed, backend)
    is_asked = backend.scaled_to is not None or backend.last_change == "UPSCALE"
    is_scaling = is_asked and not is_failing
    return "UPDATING" if backend.goal is not None or is_scaling else "UNHEALTHY"


def is_replacing(observed: Observed, backend: BackendRecord) -> bool:
    """Return whether missing replicas were lost, rather than requested by the last change."""
    dead = observed.notes_of(backend.tag).dead
    scaled_at = backend.scalings[-1][0] if backend.scalings else 0.0
    return len(dead) > 0 and dead[-1].at > max(scaled_at, backend.deployed_at)


def proxy_state(proxy: ProxyRecord, observed: Observed) -> str:
    """Return the status word of a proxy."""
    if proxy.is_leaving:
        return "DRAINING"
    if proxy.worker in observed.unresponsive:
        return "UNHEALTHY"
    return "RUNNING" if is_ready(observed, proxy) else "STARTING"


def proxy_message(proxy: ProxyRecord, observed: Observed) -> str:
    """Return why a proxy does not listen, or listens elsewhere than expected; otherwise empty."""
    if proxy.is_leaving:
        return "finishes its requests once another proxy listens in its place"
    found = []
    if proxy.worker is None:
        found.append(f"waits for a worker on host {proxy.host}")
    elif proxy.worker in observed.unresponsive:
        found.append(f"worker {proxy.worker} does not answer")
    elif proxy.name in observed.proxies_failed:
        found.append(text_of(observed.proxies_failed[proxy.name]))
    if stray := observed.stray(proxy.worker or ""):
        found.append(stray)
    if proxy.home:
        found.append(f"moved here from host {proxy.home}, and moves back once that has a worker for it")
    return "; ".join(found)


def http_urls(state: State, observed: Observed) -> list[str]:
    """Return the URLs at which proxies listen, each once."""
    # A proxy that is leaving may still accept requests.
    placed = {(each.name, each.incarnation) for each in state.proxies.values() if each.worker is not None}
    ready = sorted(observed.proxies_ready.items())
    urls = (facts["urls"] for name, facts in ready if (name, facts["incarnation"]) in placed)
    return list(dict.fromkeys(itertools.chain.from_iterable(urls)))


def actors(state: State, observed: Observed, instance: str, controller: Mapping[str, Any]) -> list[Any]:
    """Return every actor of the instance: kind, name, state, worker, host, pid."""
    found = system_actors(state, observed, instance, controller)
    for replica in state.replicas.values():
        ready = observed.ready.get(replica.tag)
        found.append(
            {
                "kind": ActorKind.REPLICA.value,
                "name": replica.tag,
                "state": replica.state.value,
                **_where(observed, replica.worker),
                "pid": ready.get("pid") if ready is not None else None,
                "message": replica_message(observed, replica.tag),
                "rank": replica.rank[0] if replica.rank else None,
                "metadata": dict(replica.metadata),
                "routing_stats": dict(observed.routing_stats.get(replica.tag)),
                "multiplexed": observed.multiplexed.of(replica.tag),
            }
        )
    return found


def system_actors(
    state: State, observed: Observed, instance: str, controller: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the controller and the proxies, like `actors`."""
    found: list[dict[str, Any]] = [
        {
            "kind": ActorKind.CONTROLLER.value,
            "name": f"{instance}/controller",
            "state": "RUNNING",
            **_where(observed, controller["worker"]),
            "pid": controller["pid"],
            "message": observed.stray(controller["worker"]),
        }
    ]
    for proxy in state.proxies.values():
        facts = observed.proxies_ready.get(proxy.name, {})
        is_its = proxy.worker is not None and facts.get("incarnation") == proxy.incarnation
        found.append(
            {
                "kind": ActorKind.PROXY.value,
                "name": proxy.tag,
                "state": proxy_state(proxy, observed),
                **_where(observed, proxy.worker),
                "pid": facts.get("pid") if is_its else None,
                "message": proxy_message(proxy, observed),
            }
        )
    return found


def _where(observed: Observed, worker: WorkerAddress | None) -> dict[str, Any]:
    info = observed.workers.get(worker or "")
    return {"worker": worker, "host": info.host if info else None}


def replica_message(observed: Observed, tag: ReplicaTag) -> str:
    """Return why a replica is unhealthy, or its activity while it starts or stops; otherwise empty."""
    return observed.unhealthy.get(tag) or _work(observed.busy.get(tag))


def _work(busy: Activity | None) -> str:
    """Return the activity of a replica that starts or stops, with its duration if that is long."""
    return "" if busy is None else progress.work_text(busy) or busy.what


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


def broken_routes(
    observed: Observed, here: WorkerAddress, from_here: Mapping[WorkerAddress, Reachability]
) -> dict[WorkerAddress, dict[WorkerAddress, str]]:
    """Return the workers that other workers do not reach directly, each with the route in use.

    ``from_here`` are the workers that the controller's worker does not reach directly. Unresponsive workers
    are left out.
    """
    found = {**observed.broken_routes, here: {each: route.value for each, route in from_here.items()}}
    there = observed.workers.keys() - observed.unresponsive
    kept = {
        worker: {other: route for other, route in routes.items() if other in there}
        for worker, routes in found.items()
        if worker in there
    }
    return {worker: routes for worker, routes in kept.items() if routes}


def published_system(state: State, controller: WorkerAddress) -> dict[str, list[WorkerAddress]]:
    """Return the workers with proxies or the controller, as published for routers."""
    return {"workers": sorted({controller, *state.proxies.workers})}


#: The classic controller's introspection calls.
VIEWS: Mapping[str, Callable[[State, Observed], Any]] = {
    "get_all_backends": lambda state, _: {
        tag: masked(backend_verbs.describe(state, tag)["config"])
        for tag, backend in state.backends.items()
        if not backend.is_deleting
    },
    "get_all_endpoints": lambda state, _: {
        name: backend_verbs.get_endpoint(state, name) for name in state.endpoints
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
