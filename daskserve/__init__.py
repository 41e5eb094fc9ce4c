"""Model serving and Python microservices on any Dask cluster. ``import daskserve as serve``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from daskserve._version import __version__

if TYPE_CHECKING:
    from daskserve import classic, context, errors, metrics
    from daskserve.autoscaling.context import AutoscalingContext, Decision
    from daskserve.client.client import AsyncClient, Client
    from daskserve.client.definitions.deployments import Application, Deployment
    from daskserve.client.functions.applications import (
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
    from daskserve.client.functions.deployment import deployment
    from daskserve.client.functions.finding import connect, connect_async
    from daskserve.client.functions.instances import (
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
    from daskserve.client.verbs.applications import RunTarget
    from daskserve.client.views.explanation import Explanation
    from daskserve.client.views.status import Status
    from daskserve.common.types import ReplicaRank
    from daskserve.context import (
        GangContext,
        PlacementBundle,
        PlacementGroup,
        ReplicaContext,
        get_deployment_actor_context,
        get_replica_context,
    )
    from daskserve.data.batching.decorator import batch
    from daskserve.data.caller.calls.deployment_actor import get_deployment_actor
    from daskserve.data.caller.calls.handle import Handle
    from daskserve.data.caller.calls.response import Response
    from daskserve.data.caller.calls.response_stream import ResponseGenerator
    from daskserve.data.replica.user_code.class_app import ingress
    from daskserve.errors import ServeError
    from daskserve.options.actor import ActorOptions
    from daskserve.options.autoscaling import AutoscalingConfig
    from daskserve.options.backend import BackendConfig
    from daskserve.options.deployment_actor import DeploymentActorConfig
    from daskserve.options.environment import Environment
    from daskserve.options.http import HTTPOptions
    from daskserve.options.placement import GangSchedulingConfig

#: Where each public name lives. Loaded on first use: importing daskserve must cost little and start nothing.
_HOMES: Mapping[str, str] = {
    # instances
    "start": "client.functions.instances",
    "start_async": "client.functions.instances",
    "connect": "client.functions.finding",
    "connect_async": "client.functions.finding",
    "shutdown": "client.functions.instances",
    "shutdown_async": "client.functions.instances",
    "status": "client.functions.instances",
    "status_async": "client.functions.instances",
    "Status": "client.views.status",
    "explain": "client.functions.instances",
    "explain_async": "client.functions.instances",
    "scale": "client.functions.instances",
    "scale_async": "client.functions.instances",
    "Explanation": "client.views.explanation",
    "set_target_capacity": "client.functions.instances",
    "set_target_capacity_async": "client.functions.instances",
    "Client": "client.client",
    "AsyncClient": "client.client",
    # deployments
    "run": "client.functions.applications",
    "run_async": "client.functions.applications",
    "run_many": "client.functions.applications",
    "run_many_async": "client.functions.applications",
    "RunTarget": "client.verbs.applications",
    "delete": "client.functions.applications",
    "delete_async": "client.functions.applications",
    "get_app_handle": "client.functions.applications",
    "get_app_handle_async": "client.functions.applications",
    "get_deployment_handle": "client.functions.applications",
    "get_deployment_handle_async": "client.functions.applications",
    "deployment": "client.functions.deployment",
    "ingress": "data.replica.user_code.class_app",
    "Deployment": "client.definitions.deployments",
    "Application": "client.definitions.deployments",
    # the classic system
    "classic": "",
    # options
    "HTTPOptions": "options.http",
    "BackendConfig": "options.backend",
    "ActorOptions": "options.actor",
    "AutoscalingConfig": "options.autoscaling",
    "DeploymentActorConfig": "options.deployment_actor",
    "GangSchedulingConfig": "options.placement",
    "Environment": "options.environment",
    # policies
    "AutoscalingContext": "autoscaling",
    "Decision": "autoscaling",
    # calls
    "Handle": "data.caller.calls.handle",
    "Response": "data.caller.calls.response",
    "ResponseGenerator": "data.caller.calls.response_stream",
    "handle": "",
    "batch": "data.batching.decorator",
    # inside a backend
    "context": "",
    "get_replica_context": "context",
    "ReplicaContext": "context",
    "GangContext": "context",
    "PlacementBundle": "context",
    "PlacementGroup": "context",
    "ReplicaRank": "common.types",
    "get_deployment_actor": "data.caller.calls.deployment_actor",
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
    "Status",
    "__version__",
    "batch",
    "classic",
    "connect",
    "connect_async",
    "context",
    "delete",
    "delete_async",
    "deployment",
    "errors",
    "explain",
    "explain_async",
    "get_app_handle",
    "get_app_handle_async",
    "get_deployment_actor",
    "get_deployment_actor_context",
    "get_deployment_handle",
    "get_deployment_handle_async",
    "get_replica_context",
    "ingress",
    "metrics",
    "run",
    "run_async",
    "run_many",
    "run_many_async",
    "scale",
    "scale_async",
    "set_target_capacity",
    "set_target_capacity_async",
    "shutdown",
    "shutdown_async",
    "start",
    "start_async",
    "status",
    "status_async",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None and name in _PRIVATE_NAMES:
        return getattr(importlib.import_module(__name__), name.removeprefix("_"))
    # The classic functions were here before they had a module; programs may go on using them here.
    if (
        home is None
        and not name.startswith("_")
        and name in importlib.import_module("daskserve.classic").__all__
    ):
        home = "classic"
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
