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
    from daskserve.client.functions.task_queues import instantiate_adapter_from_config
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
        get_model,
        get_multiplexed_model_id,
        get_replica_context,
    )
    from daskserve.data.batching.continuous.decorator import continuous_batch
    from daskserve.data.batching.continuous.request import ActiveRequest
    from daskserve.data.batching.decorator import batch
    from daskserve.data.caller.calls.deployment_actor import get_deployment_actor
    from daskserve.data.caller.calls.handle import Handle
    from daskserve.data.caller.calls.response import Response
    from daskserve.data.caller.calls.response_stream import ResponseGenerator
    from daskserve.data.caller.calls.resuming import resume_stream
    from daskserve.data.multiplexing.decorator import multiplexed
    from daskserve.data.replica.user_code.class_app import ingress
    from daskserve.data.tasks.config import (
        InstanceAdapterConfig,
        RedisAdapterConfig,
        SQLiteAdapterConfig,
        TaskProcessorConfig,
        TaskResult,
        TaskSchedule,
    )
    from daskserve.data.tasks.current import TaskContext, get_task_context
    from daskserve.data.tasks.decorator import task_consumer, task_handler
    from daskserve.data.tasks.http import task_api
    from daskserve.data.tasks.sources import SourceItem, source
    from daskserve.errors import ServeError
    from daskserve.options.actor import ActorOptions
    from daskserve.options.autoscaling import AutoscalingConfig
    from daskserve.options.backend import BackendConfig
    from daskserve.options.deployment_actor import DeploymentActorConfig
    from daskserve.options.environment import Environment
    from daskserve.options.http import HTTPOptions
    from daskserve.options.logging import LoggingConfig
    from daskserve.options.placement import GangSchedulingConfig
    from daskserve.options.tracing import TracingConfig
    from daskserve.telemetry.tracing.current import get_trace_context

#: The public names by module. Loaded on first use: importing daskserve must cost little and start nothing.
_NAMES: Mapping[str, str] = {
    "client.functions.instances": "start start_async shutdown shutdown_async status status_async "
    "explain explain_async scale scale_async set_target_capacity set_target_capacity_async",
    "client.functions.history": "history history_async rollback rollback_async events events_async",
    "client.functions.finding": "connect connect_async",
    "client.functions.applications": "run run_async run_many run_many_async delete delete_async "
    "get_app_handle get_app_handle_async get_deployment_handle get_deployment_handle_async",
    "client.functions.deployment": "deployment",
    "client.client": "Client AsyncClient",
    "client.views.status": "Status",
    "client.views.explanation": "Explanation",
    "client.verbs.applications": "RunTarget",
    "client.definitions.deployments": "Deployment Application",
    "options.http": "HTTPOptions",
    "options.logging": "LoggingConfig",
    "options.backend": "BackendConfig",
    "options.actor": "ActorOptions",
    "options.autoscaling": "AutoscalingConfig",
    "options.deployment_actor": "DeploymentActorConfig",
    "options.placement": "GangSchedulingConfig",
    "options.tracing": "TracingConfig",
    "telemetry.tracing.current": "get_trace_context",
    "options.environment": "Environment",
    "autoscaling": "AutoscalingContext Decision",
    "data.caller.calls.handle": "Handle",
    "data.caller.calls.response": "Response",
    "data.caller.calls.response_stream": "ResponseGenerator",
    "data.caller.calls.resuming": "resume_stream",
    "data.caller.calls.deployment_actor": "get_deployment_actor",
    "data.batching.decorator": "batch",
    "data.multiplexing.decorator": "multiplexed",
    "data.batching.continuous.decorator": "continuous_batch",
    "data.batching.continuous.request": "ActiveRequest",
    "data.replica.user_code.class_app": "ingress",
    "client.functions.task_queues": "instantiate_adapter_from_config",
    "data.tasks.config": "InstanceAdapterConfig RedisAdapterConfig SQLiteAdapterConfig TaskProcessorConfig "
    "TaskResult TaskSchedule",
    "data.tasks.current": "TaskContext get_task_context",
    "data.tasks.http": "task_api",
    "data.tasks.sources": "SourceItem source",
    "data.tasks.decorator": "task_handler",
    "context": "get_replica_context get_model get_multiplexed_model_id get_deployment_actor_context "
    "ReplicaContext GangContext PlacementBundle PlacementGroup",
    "common.types": "ReplicaRank",
    "errors": "ServeError",
    # Modules; the last six have the names of those of Ray Serve. That of task_consumer can be called.
    "": "classic context errors metrics config exceptions handle request_router schema task_consumer",
}
_HOMES: Mapping[str, str] = {name: home for home, names in _NAMES.items() for name in names.split()}

#: Private names of Ray Serve that programs use for their argument ``_blocking``.
_PRIVATE_NAMES = frozenset({"_run", "_run_many"})

__all__ = [
    "ActiveRequest",
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
    "InstanceAdapterConfig",
    "LoggingConfig",
    "PlacementBundle",
    "PlacementGroup",
    "RedisAdapterConfig",
    "ReplicaContext",
    "ReplicaRank",
    "Response",
    "ResponseGenerator",
    "RunTarget",
    "SQLiteAdapterConfig",
    "ServeError",
    "SourceItem",
    "Status",
    "TaskContext",
    "TaskProcessorConfig",
    "TaskResult",
    "TaskSchedule",
    "TracingConfig",
    "__version__",
    "batch",
    "classic",
    "connect",
    "connect_async",
    "context",
    "continuous_batch",
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
    "get_task_context",
    "get_trace_context",
    "history",
    "history_async",
    "ingress",
    "instantiate_adapter_from_config",
    "metrics",
    "multiplexed",
    "resume_stream",
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
    "source",
    "start",
    "start_async",
    "status",
    "status_async",
    "task_api",
    "task_consumer",
    "task_handler",
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
