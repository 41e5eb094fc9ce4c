"""The status of an instance in the format of Ray Serve's REST API. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from daskserve.common.types import Location, ReplicaState, short_tag
from daskserve.config_file.masking import shown
from daskserve.control.decisions.failed_deploys import application_not_found
from daskserve.control.observed.observed import DeadReplica, Observed
from daskserve.control.records.records import AppRecord, BackendRecord, ReplicaRecord
from daskserve.control.records.state import State
from daskserve.control.views.actors import proxy_state
from daskserve.control.views.applications import application_status
from daskserve.control.views.builds import with_builds
from daskserve.errors import BadRequestError
from daskserve.options.backend import BackendConfig
from daskserve.options.fields.base import spellings_of
from daskserve.options.fields.code import shown_options
from daskserve.options.fields.secrets import masked
from daskserve.options.http import HTTPOptions
from daskserve.options.start_messages import dump_http

DECLARATIVE, IMPERATIVE = "declarative", "imperative"
_LOCATIONS: Mapping[Location, str] = {
    Location.HEAD_ONLY: "HeadOnly",
    Location.NO_SERVER: "Disabled",
}
#: How Ray Serve shows each state of a replica.
_STATES: Mapping[ReplicaState, str] = {
    ReplicaState.SHOULD_START: "STARTING",
    ReplicaState.STARTING: "STARTING",
    ReplicaState.RUNNING: "RUNNING",
    ReplicaState.SHOULD_STOP: "STOPPING",
    ReplicaState.STOPPING: "STOPPING",
    ReplicaState.STOPPED: "STOPPING",
}
#: The options of a deployment's config that Ray Serve has under the same names.
_OPTIONS = (
    "num_replicas",
    "max_ongoing_requests",
    "max_queued_requests",
    "autoscaling_config",
    "graceful_shutdown_wait_loop_s",
    "graceful_shutdown_timeout_s",
    "health_check_period_s",
    "health_check_timeout_s",
    "max_replicas_per_node",
    "placement_group_bundles",
    "placement_group_strategy",
)


def details(
    state: State,
    observed: Observed,
    http: HTTPOptions,
    *,
    instance: str,
    controller: str,
    waiting: Mapping[str, str],
    wall: float,
    application: str | None = None,
    api_type: str | None = None,
) -> dict[str, Any]:
    """Return the details of an instance, of all applications or of one.

    Parameters
    ----------
    controller : str
        The worker of the controller.
    waiting : dict
        Why applications are not built yet.
    api_type : str, optional
        Only the applications of this kind: declarative or imperative.

    Raises
    ------
    NotFoundError
        There is no such application.
    BadRequestError
        There is no such kind.
    """
    api_type = None if api_type is None else api_type.lower()
    if api_type not in (None, DECLARATIVE, IMPERATIVE):
        raise BadRequestError(f"api_type={api_type!r} must be {DECLARATIVE} or {IMPERATIVE}")
    known = {each.name: application_status(state, observed, each, wall) for each in state.apps}
    statuses = with_builds(state, known, waiting)
    if application is not None:
        if application not in statuses:
            raise application_not_found(state, application)
        statuses = {application: statuses[application]}
    apps = {name: _application(state, observed, name, status) for name, status in statuses.items()}
    return {
        "controller_info": {
            **_place(observed, controller, "controller"),
            "actor_id": f"{instance}/controller",
            "actor_name": f"{instance}/controller",
            "pid": os.getpid(),
        },
        "proxy_location": _LOCATIONS.get(http.location or Location.EVERY_NODE, "EveryNode"),
        "http_options": _http(http),
        "grpc_options": None,
        "proxies": _proxies(state, observed),
        "applications": {name: each for name, each in apps.items() if api_type in (None, each["source"])},
        "target_capacity": state.capacity.percent,
        "target_groups": _target_groups(observed, instance),
    }


def _place(observed: Observed, worker: str | None, actor: str) -> dict[str, Any]:
    """Return the location of an actor, and its log file; a Dask worker is shown as Ray's node."""
    info = observed.workers.get(worker or "")
    host = None if info is None else info.host
    return {
        "node_id": worker,
        "node_ip": host,
        "node_instance_id": host,
        "worker_id": None if info is None else info.name or worker,
        "log_file_path": observed.log_files.get(worker or "", {}).get(actor),
    }


def _http(http: HTTPOptions) -> dict[str, Any]:
    """Return the HTTP options that Ray Serve also shows."""
    shown = dump_http(http)
    return {
        "host": shown["host"],
        "port": shown["port"],
        "root_path": shown["root_path"],
        "request_timeout_s": shown["request_timeout_s"],
        "keep_alive_timeout_s": shown.get("keep_alive_timeout_s"),
    }


def _proxies(state: State, observed: Observed) -> dict[str, Any]:
    return {
        proxy.worker or proxy.name: {
            **_place(observed, proxy.worker, f"proxy/{proxy.name}/{proxy.incarnation}"),
            "actor_id": proxy.tag,
            "actor_name": proxy.tag,
            "status": _PROXY_STATES.get(proxy_state(proxy, observed), "STARTING"),
        }
        for proxy in state.proxies.values()
    }


_PROXY_STATES: Mapping[str, str] = {"RUNNING": "HEALTHY", "DRAINING": "DRAINING", "UNHEALTHY": "UNHEALTHY"}


def _target_groups(observed: Observed, instance: str) -> list[dict[str, Any]]:
    """Return the addresses of all listening proxies, which accept requests for any route."""
    targets = []
    for name, facts in sorted(observed.proxies_ready.items()):
        for url in facts["urls"]:
            parts = urlsplit(url)
            target = {
                "ip": parts.hostname,
                "port": parts.port,
                "instance_id": "",
                "name": f"{instance}/{name}",
            }
            targets.append(target)
    return [{"targets": targets, "route_prefix": "/", "protocol": "HTTP"}] if targets else []


def _application(state: State, observed: Observed, name: str, status: Mapping[str, Any]) -> dict[str, Any]:
    app, declared = state.apps.get(name), state.declared.configs.get(name)
    tags = {} if app is None else {each: state.backends.get(tag) for each, tag in app.deployments.items()}
    backends = {each: found for each, found in tags.items() if found is not None and not found.actor_of}
    return {
        "name": name,
        "route_prefix": status["route_prefix"],
        "docs_path": _docs_path(None if app is None else state.backends.get(app.ingress)),
        "status": status["status"],
        "message": status["message"],
        "last_deployed_time_s": status["last_deployed_time_s"],
        "deployed_app_config": None if declared is None else _declared(declared.config),
        "source": DECLARATIVE if declared is not None or (app and app.is_declared) else IMPERATIVE,
        "deployments": {
            each: _deployment(state, observed, each, backend, status["deployments"].get(each, {}))
            for each, backend in backends.items()
        },
        "external_scaler_enabled": any(each.is_scaled_externally for each in backends.values()),
        "deployment_topology": None if app is None or not backends else _topology(app, backends),
    }


def _docs_path(ingress: BackendRecord | None) -> str | None:
    return None if ingress is None else ingress.config.internal_metadata.docs_path or None


def _deployment(
    state: State, observed: Observed, name: str, backend: BackendRecord, status: Mapping[str, Any]
) -> dict[str, Any]:
    plain = masked(shown_options(backend.config))
    options = backend.actor_options.model_dump(mode="json", exclude={"workers"})
    demand = backend.actor_options.demand()
    ours = spellings_of(BackendConfig)
    named = {each: plain.get(ours.get(each, each)) for each in _OPTIONS}
    named["max_ongoing_requests"] = backend.config.concurrency()
    config = {each: value for each, value in named.items() if value is not None}
    if "autoscaling_config" in config:
        # Ray Serve's classes do not accept both numbers; target_num_replicas has this one.
        del config["num_replicas"]
    return {
        "name": name,
        "status": status.get("status", "UPDATING"),
        "status_trigger": status.get("status_trigger", "UNSPECIFIED"),
        "message": status.get("message", ""),
        "deployment_config": {
            "name": name,
            **config,
            "ray_actor_options": {each: value for each, value in options.items() if value},
        },
        "target_num_replicas": backend.num_replicas,
        "required_resources": demand,
        "replicas": [_replica(observed, each) for each in state.replicas_of(backend.tag)],
        "recent_dead_replicas": [_dead(each) for each in observed.notes_of(backend.tag).dead],
        "autoscaling_detail": None if backend.autoscaling is None else _autoscaling(state, backend),
    }


def _replica(observed: Observed, replica: ReplicaRecord) -> dict[str, Any]:
    facts = observed.ready.get(replica.tag) or {}
    return {
        **_place(observed, replica.worker, f"replica/{replica.tag}"),
        "actor_id": replica.tag,
        "actor_name": short_tag(replica.tag),
        "replica_id": replica.tag.rpartition("#")[2],
        "state": _STATES[replica.state],
        "pid": facts.get("pid"),
        "start_time_s": replica.moved_at,
        "multiplexed": observed.multiplexed.of(replica.tag),
    }


def _dead(replica: DeadReplica) -> dict[str, Any]:
    """Return a lost or failed replica in Ray Serve's fields, with the cause."""
    return {
        "replica_id": replica.name.rpartition("#")[2],
        "actor_name": short_tag(replica.name),
        "state": "STOPPING",
        "start_time_s": replica.at,
        "reason": replica.reason,
        "traceback": replica.user_traceback,
        "last_lines": list(replica.last_lines),
    }


def _declared(config: Any) -> dict[str, Any]:
    """Return the declared options of an application or a deployment, under Ray Serve's names."""
    found: dict[str, Any] = shown(config)
    if "deployments" in found:
        found["deployments"] = [_declared(each) for each in found["deployments"]]
    for ours, theirs in (("env", "runtime_env"), ("actor_options", "ray_actor_options")):
        if isinstance(found.get(ours), Mapping):
            found[theirs] = found.pop(ours)
    return found


def _autoscaling(state: State, backend: BackendRecord) -> dict[str, Any]:
    running = len(state.running(backend.tag))
    wanted = backend.num_replicas
    word = "UPSCALING" if running < wanted else "DOWNSCALING" if running > wanted else "STABLE"
    return {
        "scaling_status": word,
        "decisions": [
            {"timestamp_s": at, "prev_num_replicas": before, "curr_num_replicas": after, "reason": reason}
            for at, before, after, reason in backend.scalings
        ],
        "metrics": None,
        "metrics_health": "healthy",
        "errors": [],
    }


def _topology(app: AppRecord, backends: Mapping[str, BackendRecord]) -> dict[str, Any]:
    names = {backend.tag: name for name, backend in backends.items()}
    ingress = names.get(app.ingress)
    return {
        "app_name": app.name,
        "ingress_deployment": ingress,
        "nodes": {
            name: {
                "name": name,
                "app_name": app.name,
                "is_ingress": name == ingress,
                "outbound_deployments": [
                    {"name": names[need], "app_name": app.name} for need in backend.needs if need in names
                ],
            }
            for name, backend in backends.items()
        },
    }
