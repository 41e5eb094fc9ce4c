"""The classic system: backends, endpoints and traffic. ``import daskserve.classic as serve``.

The names are those of Ray Serve 1. They can be used together with `daskserve.run`, on the same instance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskserve.options.fields.lazy_names import LazyNames

if TYPE_CHECKING:
    from daskserve.client.client import AsyncClient, Client
    from daskserve.client.functions.classic import (
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
    from daskserve.client.functions.deployment import deployment
    from daskserve.client.functions.discovery import connect, connect_async
    from daskserve.client.functions.instances import shutdown, shutdown_async, start, start_async
    from daskserve.context import get_current_backend_tag, get_current_replica_tag, get_replica_context
    from daskserve.data.batching.decorator import batch
    from daskserve.data.replica.requests.accept_batch import accept_batch
    from daskserve.data.replica.user_code.class_app import ingress
    from daskserve.data.replica.user_code.request_objects import ServeRequest
    from daskserve.options.actor import ActorOptions
    from daskserve.options.backend import BackendConfig
    from daskserve.options.environment import CondaEnv
    from daskserve.options.http import HTTPOptions

__all__ = [
    "ActorOptions",
    "AsyncClient",
    "BackendConfig",
    "Client",
    "CondaEnv",
    "HTTPOptions",
    "ServeRequest",
    "accept_batch",
    "batch",
    "connect",
    "connect_async",
    "create_backend",
    "create_backend_async",
    "create_endpoint",
    "create_endpoint_async",
    "delete_backend",
    "delete_backend_async",
    "delete_deployment",
    "delete_deployment_async",
    "delete_endpoint",
    "delete_endpoint_async",
    "deployment",
    "get_backend_config",
    "get_backend_config_async",
    "get_current_backend_tag",
    "get_current_replica_tag",
    "get_deployment",
    "get_deployment_async",
    "get_deployment_info",
    "get_deployment_info_async",
    "get_handle",
    "get_handle_async",
    "get_replica_context",
    "ingress",
    "list_backends",
    "list_backends_async",
    "list_deployments",
    "list_deployments_async",
    "list_endpoints",
    "list_endpoints_async",
    "set_traffic",
    "set_traffic_async",
    "shadow_traffic",
    "shadow_traffic_async",
    "shutdown",
    "shutdown_async",
    "start",
    "start_async",
    "update_backend_config",
    "update_backend_config_async",
    "wait_for_goal",
    "wait_for_goal_async",
]

#: Loaded on first use, so that a replica's first request does not load a whole client only to read the
#: replica's tag.
__getattr__ = LazyNames(
    globals(),
    {
        "client.functions.classic": " ".join(__all__),
        "client.client": "AsyncClient Client",
        "client.functions.deployment": "deployment",
        "client.functions.discovery": "connect connect_async",
        "client.functions.instances": "shutdown shutdown_async start start_async",
        "context": "get_current_backend_tag get_current_replica_tag get_replica_context",
        "data.batching.decorator": "batch",
        "data.replica.requests.accept_batch": "accept_batch",
        "data.replica.user_code.class_app": "ingress",
        "data.replica.user_code.request_objects": "ServeRequest",
        "options.actor": "ActorOptions",
        "options.backend": "BackendConfig",
        "options.environment": "CondaEnv",
        "options.http": "HTTPOptions",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
