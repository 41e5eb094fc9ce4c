"""Model serving and Python microservices on any Dask cluster. ``import daskserve as serve``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from daskserve._version import __version__

if TYPE_CHECKING:
    from daskserve import errors, metrics
    from daskserve.autoscaling.context import AutoscalingContext, Decision
    from daskserve.client.api import (
        connect,
        connect_async,
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
    from daskserve.client.client import AsyncClient, Client
    from daskserve.client.deployments import Application, Deployment, deployment
    from daskserve.client.explanation import Explanation
    from daskserve.client.status import Status
    from daskserve.context import get_current_backend_tag, get_current_replica_tag
    from daskserve.data.batching.decorator import batch
    from daskserve.data.caller.handle import Handle, Response
    from daskserve.data.caller.response_stream import ResponseGenerator
    from daskserve.data.replica.accept_batch import accept_batch
    from daskserve.data.replica.requests import ServeRequest
    from daskserve.errors import ServeError
    from daskserve.options.actor import ActorOptions
    from daskserve.options.autoscaling import AutoscalingConfig
    from daskserve.options.backend import BackendConfig
    from daskserve.options.environment import CondaEnv, Environment
    from daskserve.options.http import HTTPOptions

#: Where each public name lives. Loaded on first use: importing daskserve must cost little and start nothing.
_HOMES: Mapping[str, str] = {
    # instances
    "start": "client.api",
    "start_async": "client.api",
    "connect": "client.api",
    "connect_async": "client.api",
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
    "deployment": "client.deployments",
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
    "Deployment": "client.deployments",
    "Application": "client.deployments",
    # options
    "HTTPOptions": "options.http",
    "BackendConfig": "options.backend",
    "ActorOptions": "options.actor",
    "AutoscalingConfig": "options.autoscaling",
    "CondaEnv": "options.environment",
    "Environment": "options.environment",
    # policies
    "AutoscalingContext": "autoscaling",
    "Decision": "autoscaling",
    # calls
    "Handle": "data.caller.handle",
    "Response": "data.caller.handle",
    "ResponseGenerator": "data.caller.response_stream",
    "ServeRequest": "data.replica.requests",
    "accept_batch": "data.replica.accept_batch",
    "batch": "data.batching.decorator",
    # inside a backend
    "get_current_backend_tag": "context",
    "get_current_replica_tag": "context",
    "metrics": "",
    # errors
    "ServeError": "errors",
    "errors": "",
}

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
    "Environment",
    "Explanation",
    "HTTPOptions",
    "Handle",
    "Response",
    "ResponseGenerator",
    "RunTarget",
    "ServeError",
    "ServeRequest",
    "Status",
    "__version__",
    "accept_batch",
    "batch",
    "connect",
    "connect_async",
    "delete",
    "delete_async",
    "deployment",
    "errors",
    "explain",
    "explain_async",
    "get_app_handle",
    "get_app_handle_async",
    "get_current_backend_tag",
    "get_current_replica_tag",
    "get_deployment_handle",
    "get_deployment_handle_async",
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
    if home is None:
        raise AttributeError(f"module 'daskserve' has no attribute {name!r}")
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
