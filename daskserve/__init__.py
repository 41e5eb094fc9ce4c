"""Model serving and Python microservices on any Dask cluster. ``import daskserve as serve``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from daskserve._version import __version__

if TYPE_CHECKING:
    from daskserve import autoscaling, batching, classic, config, context, errors, handle, metrics, tasks
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
    from daskserve.client.functions.discovery import connect, connect_async
    from daskserve.client.functions.history import (
        events,
        events_async,
        history,
        history_async,
        rollback,
        rollback_async,
    )
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
    from daskserve.client.views.status import Status
    from daskserve.context import (
        get_deployment_actor_context,
        get_model,
        get_multiplexed_model_id,
        get_replica_context,
    )
    from daskserve.data.batching.decorator import batch
    from daskserve.data.caller.calls.deployment_actor import get_deployment_actor
    from daskserve.data.caller.calls.handle import Handle
    from daskserve.data.multiplexing.decorator import multiplexed
    from daskserve.data.replica.user_code.class_app import ingress
    from daskserve.options.http import HTTPOptions
    from daskserve.telemetry.tracing.current import get_trace_context

#: The public names by module. Loaded on first use: importing daskserve must cost little and start nothing.
_NAMES: Mapping[str, str] = {
    "client.functions.instances": "start start_async shutdown shutdown_async status status_async "
    "explain explain_async scale scale_async set_target_capacity set_target_capacity_async",
    "client.functions.history": "history history_async rollback rollback_async events events_async",
    "client.functions.discovery": "connect connect_async",
    "client.functions.applications": "run run_async run_many run_many_async delete delete_async "
    "get_app_handle get_app_handle_async get_deployment_handle get_deployment_handle_async",
    "client.functions.deployment": "deployment",
    "client.client": "Client AsyncClient",
    "client.views.status": "Status",
    "client.verbs.applications": "RunTarget",
    "client.definitions.deployments": "Deployment Application",
    "options.http": "HTTPOptions",
    "telemetry.tracing.current": "get_trace_context",
    "data.caller.calls.handle": "Handle",
    "data.caller.calls.deployment_actor": "get_deployment_actor",
    "data.batching.decorator": "batch",
    "data.multiplexing.decorator": "multiplexed",
    "data.replica.user_code.class_app": "ingress",
    "context": "get_replica_context get_model get_multiplexed_model_id get_deployment_actor_context",
    "": "autoscaling batching classic config context errors handle metrics tasks",
}
#: Names that this module had before they got a module of their own. Importing them from here still works.
_MOVED: Mapping[str, str] = {
    "autoscaling": "AutoscalingContext Decision",
    "batching": "ActiveRequest continuous_batch",
    "config": "ActorOptions AutoscalingConfig BackendConfig DeploymentActorConfig Environment "
    "GangSchedulingConfig LoggingConfig TracingConfig",
    "context": "GangContext PlacementBundle PlacementGroup ReplicaContext ReplicaRank",
    "errors": "ServeError",
    "handle": "Response ResponseGenerator resume_stream",
    "schema": "Explanation",
    "tasks": "InstanceAdapterConfig RedisAdapterConfig SQLiteAdapterConfig SourceItem TaskContext "
    "TaskProcessorConfig TaskResult TaskSchedule get_task_context instantiate_adapter_from_config source "
    "task_api task_handler",
    # Modules with the same names as in Ray Serve. The module task_consumer can also be called.
    "": "exceptions request_router schema task_consumer",
}
_HOMES: Mapping[str, str] = {
    name: home for table in (_NAMES, _MOVED) for home, names in table.items() for name in names.split()
}

#: Private functions of Ray Serve that programs call for the argument ``_blocking``.
_PRIVATE_NAMES = frozenset({"_run", "_run_many"})

__all__ = [
    "Application",
    "AsyncClient",
    "Client",
    "Deployment",
    "HTTPOptions",
    "Handle",
    "RunTarget",
    "Status",
    "__version__",
    "autoscaling",
    "batch",
    "batching",
    "classic",
    "config",
    "connect",
    "connect_async",
    "context",
    "delete",
    "delete_async",
    "deployment",
    "errors",
    "events",
    "events_async",
    "explain",
    "explain_async",
    "get_app_handle",
    "get_app_handle_async",
    "get_deployment_actor",
    "get_deployment_actor_context",
    "get_deployment_handle",
    "get_deployment_handle_async",
    "get_model",
    "get_multiplexed_model_id",
    "get_replica_context",
    "get_trace_context",
    "handle",
    "history",
    "history_async",
    "ingress",
    "metrics",
    "multiplexed",
    "rollback",
    "rollback_async",
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
    "tasks",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None and name in _PRIVATE_NAMES:
        return getattr(importlib.import_module(__name__), name.removeprefix("_"))
    # The classic functions were public here, too.
    if (
        home is None
        and not name.startswith("_")
        and name in importlib.import_module("daskserve.classic").__all__
    ):
        home = "classic"
    if home is None:
        from daskserve.options.fields.ray_names import missing_name

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
