"""Model serving and Python microservices on any Dask cluster. ``import daskserve as serve``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from daskserve._version import __version__

if TYPE_CHECKING:
    from daskserve import config, context, errors, exceptions, handle, metrics, schema
    from daskserve.autoscaling.context import AutoscalingContext, Decision
    from daskserve.client.api import (
        explain,
        explain_async,
        scale,
        scale_async,
        set_target_capacity,
        set_target_capacity_async,
        shutdown,
        shutdown_async,
        start,
        start_async,
        status,
        status_async,
    )
    from daskserve.client.application_verbs import RunTarget
    from daskserve.client.applications import (
        delete,
        delete_async,
        get_app_handle,
        get_app_handle_async,
        get_deployment_handle,
        get_deployment_handle_async,
        run,
        run_async,
        run_many,
        run_many_async,
    )
    from daskserve.client.classic import (
        create_backend,
        create_backend_async,
        create_endpoint,
        create_endpoint_async,
        delete_backend,
        delete_backend_async,
        delete_deployment,
        delete_deployment_async,
        delete_endpoint,
        delete_endpoint_async,
        get_backend_config,
        get_backend_config_async,
        get_deployment,
        get_deployment_async,
        get_deployment_info,
        get_deployment_info_async,
        get_handle,
        get_handle_async,
        list_backends,
        list_backends_async,
        list_deployments,
        list_deployments_async,
        list_endpoints,
        list_endpoints_async,
        set_traffic,
        set_traffic_async,
        shadow_traffic,
        shadow_traffic_async,
        update_backend_config,
        update_backend_config_async,
        wait_for_goal,
        wait_for_goal_async,
    )
    from daskserve.client.classic_deployment import deployment
    from daskserve.client.client import AsyncClient, Client
    from daskserve.client.deployments import Application, Deployment
    from daskserve.client.explanation import Explanation
    from daskserve.client.status import Status
    from daskserve.context import (
        GangContext,
        PlacementBundle,
        PlacementGroup,
        ReplicaContext,
        get_current_backend_tag,
        get_current_replica_tag,
        get_deployment_actor_context,
        get_replica_context,
    )
    from daskserve.data.batching.decorator import batch
    from daskserve.data.caller.deployment_actor import get_deployment_actor
    from daskserve.data.caller.handle import Handle
    from daskserve.data.caller.response import Response
    from daskserve.data.caller.response_stream import ResponseGenerator
    from daskserve.data.replica.accept_batch import accept_batch
    from daskserve.data.replica.class_app import ingress
    from daskserve.data.replica.requests import ServeRequest
    from daskserve.errors import ServeError
    from daskserve.options.actor import ActorOptions
    from daskserve.options.autoscaling import AutoscalingConfig
    from daskserve.options.backend import BackendConfig
    from daskserve.options.deployment_actor import DeploymentActorConfig
    from daskserve.options.environment import CondaEnv, Environment
    from daskserve.options.gang import GangSchedulingConfig
    from daskserve.options.http import HTTPOptions
    from daskserve.types import ReplicaRank

#: Where each public name lives. Loaded on first use: importing daskserve must cost little and start nothing.
_HOMES: Mapping[str, str] = {
    # instances
    "start": "client.api",
    "start_async": "client.api",
    "connect": "client.finding",
    "connect_async": "client.finding",
    "shutdown": "client.api",
    "shutdown_async": "client.api",
    "status": "client.api",
    "status_async": "client.api",
    "Status": "client.status",
    "explain": "client.api",
    "explain_async": "client.api",
    "scale": "client.api",
    "scale_async": "client.api",
    "Explanation": "client.explanation",
    "set_target_capacity": "client.api",
    "set_target_capacity_async": "client.api",
    "Client": "client.client",
    "AsyncClient": "client.client",
    # deployments
    "run": "client.applications",
    "run_async": "client.applications",
    "run_many": "client.applications",
    "run_many_async": "client.applications",
    "RunTarget": "client.application_verbs",
    "delete": "client.applications",
    "delete_async": "client.applications",
    "get_app_handle": "client.applications",
    "get_app_handle_async": "client.applications",
    "get_deployment_handle": "client.applications",
    "get_deployment_handle_async": "client.applications",
    "deployment": "client.classic_deployment",
    "ingress": "data.replica.class_app",
    "Deployment": "client.deployments",
    "Application": "client.deployments",
    # the classic system
    "create_backend": "client.classic",
    "create_backend_async": "client.classic",
    "update_backend_config": "client.classic",
    "update_backend_config_async": "client.classic",
    "get_backend_config": "client.classic",
    "get_backend_config_async": "client.classic",
    "list_backends": "client.classic",
    "list_backends_async": "client.classic",
    "delete_backend": "client.classic",
    "delete_backend_async": "client.classic",
    "create_endpoint": "client.classic",
    "create_endpoint_async": "client.classic",
    "list_endpoints": "client.classic",
    "list_endpoints_async": "client.classic",
    "set_traffic": "client.classic",
    "set_traffic_async": "client.classic",
    "shadow_traffic": "client.classic",
    "shadow_traffic_async": "client.classic",
    "delete_endpoint": "client.classic",
    "delete_endpoint_async": "client.classic",
    "get_handle": "client.classic",
    "get_handle_async": "client.classic",
    "get_deployment": "client.classic",
    "get_deployment_async": "client.classic",
    "list_deployments": "client.classic",
    "list_deployments_async": "client.classic",
    "get_deployment_info": "client.classic",
    "get_deployment_info_async": "client.classic",
    "delete_deployment": "client.classic",
    "delete_deployment_async": "client.classic",
    "wait_for_goal": "client.classic",
    "wait_for_goal_async": "client.classic",
    # options
    "HTTPOptions": "options.http",
    "BackendConfig": "options.backend",
    "ActorOptions": "options.actor",
    "AutoscalingConfig": "options.autoscaling",
    "DeploymentActorConfig": "options.deployment_actor",
    "GangSchedulingConfig": "options.gang",
    "CondaEnv": "options.environment",
    "Environment": "options.environment",
    # policies
    "AutoscalingContext": "autoscaling",
    "Decision": "autoscaling",
    # calls
    "Handle": "data.caller.handle",
    "Response": "data.caller.response",
    "ResponseGenerator": "data.caller.response_stream",
    "ServeRequest": "data.replica.requests",
    "handle": "",
    "accept_batch": "data.replica.accept_batch",
    "batch": "data.batching.decorator",
    # inside a backend
    "context": "",
    "get_current_backend_tag": "context",
    "get_current_replica_tag": "context",
    "get_replica_context": "context",
    "ReplicaContext": "context",
    "GangContext": "context",
    "PlacementBundle": "context",
    "PlacementGroup": "context",
    "ReplicaRank": "types",
    "get_deployment_actor": "data.caller.deployment_actor",
    "get_deployment_actor_context": "context",
    "metrics": "",
    # errors
    "ServeError": "errors",
    "errors": "",
    # names of Ray Serve's modules
    "config": "",
    "exceptions": "",
    "schema": "",
}

#: Private names of Ray Serve that programs use for their argument ``_blocking``.
_PRIVATE_NAMES = frozenset({"_run", "_run_many"})

__all__ = [
    "ActorOptions",
    "Application",
    "AsyncClient",
    "AutoscalingConfig",
    "AutoscalingContext",
    "BackendConfig",
    "Client",
    "CondaEnv",
    "Decision",
    "Deployment",
    "DeploymentActorConfig",
    "Environment",
    "Explanation",
    "GangContext",
    "GangSchedulingConfig",
    "HTTPOptions",
    "Handle",
    "PlacementBundle",
    "PlacementGroup",
    "ReplicaContext",
    "ReplicaRank",
    "Response",
    "ResponseGenerator",
    "RunTarget",
    "ServeError",
    "ServeRequest",
    "Status",
    "__version__",
    "accept_batch",
    "batch",
    "config",
    "connect",
    "connect_async",
    "context",
    "create_backend",
    "create_backend_async",
    "create_endpoint",
    "create_endpoint_async",
    "delete",
    "delete_async",
    "delete_backend",
    "delete_backend_async",
    "delete_deployment",
    "delete_deployment_async",
    "delete_endpoint",
    "delete_endpoint_async",
    "deployment",
    "errors",
    "exceptions",
    "explain",
    "explain_async",
    "get_app_handle",
    "get_app_handle_async",
    "get_backend_config",
    "get_backend_config_async",
    "get_current_backend_tag",
    "get_current_replica_tag",
    "get_deployment",
    "get_deployment_actor",
    "get_deployment_actor_context",
    "get_deployment_async",
    "get_deployment_handle",
    "get_deployment_handle_async",
    "get_deployment_info",
    "get_deployment_info_async",
    "get_handle",
    "get_handle_async",
    "get_replica_context",
    "handle",
    "ingress",
    "list_backends",
    "list_backends_async",
    "list_deployments",
    "list_deployments_async",
    "list_endpoints",
    "list_endpoints_async",
    "metrics",
    "run",
    "run_async",
    "run_many",
    "run_many_async",
    "scale",
    "scale_async",
    "schema",
    "set_target_capacity",
    "set_target_capacity_async",
    "set_traffic",
    "set_traffic_async",
    "shadow_traffic",
    "shadow_traffic_async",
    "shutdown",
    "shutdown_async",
    "start",
    "start_async",
    "status",
    "status_async",
    "update_backend_config",
    "update_backend_config_async",
    "wait_for_goal",
    "wait_for_goal_async",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None and name in _PRIVATE_NAMES:
        return getattr(importlib.import_module(__name__), name.removeprefix("_"))
    if home is None:
        from daskserve.options.ray_names import missing_name

        raise missing_name(__name__, name)
    if importlib.util.find_spec("daskserve.proxies") is None:
        raise ImportError(
            f"{__path__[0]} is only a part of daskserve: in a clone the proxies lie beside it. "
            "Run your program in another directory, where the installed package is found, "
            "or install with pip install -e."
        )
    module = importlib.import_module(f"daskserve.{home or name}")
    value = module if not home else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
