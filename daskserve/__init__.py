"""Model serving and Python microservices on any Dask cluster. ``import daskserve as serve``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from daskserve._version import __version__

if TYPE_CHECKING:
    from daskserve import errors, metrics
    from daskserve.api import connect, explain, run, scale, set_target_capacity, shutdown, start, status
    from daskserve.autoscaling import AutoscalingContext, Decision
    from daskserve.autoscaling_config import AutoscalingConfig
    from daskserve.client import Client
    from daskserve.config import ActorOptions, BackendConfig, HTTPOptions
    from daskserve.context import get_current_backend_tag, get_current_replica_tag
    from daskserve.data.batched import batch
    from daskserve.data.batching import accept_batch
    from daskserve.data.handle import Handle, Response
    from daskserve.data.requests import ServeRequest
    from daskserve.data.response_stream import ResponseGenerator
    from daskserve.deployments import Application, Deployment, deployment
    from daskserve.environment import CondaEnv
    from daskserve.errors import ServeError
    from daskserve.explanation import Explanation
    from daskserve.instance_status import Status

#: Where each public name lives. Loaded on first use: importing daskserve must cost little and start nothing.
_HOMES: Mapping[str, str] = {
    # instances
    "start": "api",
    "connect": "api",
    "shutdown": "api",
    "status": "api",
    "Status": "instance_status",
    "explain": "api",
    "scale": "api",
    "Explanation": "explanation",
    "set_target_capacity": "api",
    "Client": "client",
    # deployments
    "deployment": "deployments",
    "run": "api",
    "Deployment": "deployments",
    "Application": "deployments",
    # options
    "HTTPOptions": "config",
    "BackendConfig": "config",
    "ActorOptions": "config",
    "AutoscalingConfig": "autoscaling_config",
    "CondaEnv": "environment",
    # policies
    "AutoscalingContext": "autoscaling",
    "Decision": "autoscaling",
    # calls
    "Handle": "data.handle",
    "Response": "data.handle",
    "ResponseGenerator": "data.response_stream",
    "ServeRequest": "data.requests",
    "accept_batch": "data.batching",
    "batch": "data.batched",
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
    "AutoscalingConfig",
    "AutoscalingContext",
    "BackendConfig",
    "Client",
    "CondaEnv",
    "Decision",
    "Deployment",
    "Explanation",
    "HTTPOptions",
    "Handle",
    "Response",
    "ResponseGenerator",
    "ServeError",
    "ServeRequest",
    "Status",
    "__version__",
    "accept_batch",
    "batch",
    "connect",
    "deployment",
    "errors",
    "explain",
    "get_current_backend_tag",
    "get_current_replica_tag",
    "metrics",
    "run",
    "scale",
    "set_target_capacity",
    "shutdown",
    "start",
    "status",
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
