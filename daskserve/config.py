"""The classes of options. Functions that accept one of them also accept a dict of its fields.

The names are those of Ray Serve; `ActorOptions`, `BackendConfig` and `Environment` are daskserve's own.
"""

from __future__ import annotations

from typing import Any

from daskserve.autoscaling import AutoscalingContext
from daskserve.common.types import Location as ProxyLocation
from daskserve.options.actor import ActorOptions
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.backend import BackendConfig
from daskserve.options.deployment_actor import DeploymentActorConfig
from daskserve.options.environment import Environment
from daskserve.options.fields.ray_names import missing_name
from daskserve.options.http import HTTPOptions
from daskserve.options.logging import LoggingConfig
from daskserve.options.placement import GangSchedulingConfig
from daskserve.options.routing.request_router import RequestRouterConfig
from daskserve.options.tracing import TracingConfig

__all__ = [
    "ActorOptions",
    "AutoscalingConfig",
    "AutoscalingContext",
    "BackendConfig",
    "DeploymentActorConfig",
    "Environment",
    "GangSchedulingConfig",
    "HTTPOptions",
    "LoggingConfig",
    "ProxyLocation",
    "RequestRouterConfig",
    "TracingConfig",
]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
