"""The classes of options under the names that Ray Serve has for them.

``from daskserve.config import HTTPOptions`` is for programs that move from Ray Serve; ``daskserve`` has the
same classes.
"""

from __future__ import annotations

from typing import Any

from daskserve.autoscaling import AutoscalingContext
from daskserve.common.types import Location as ProxyLocation
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.deployment_actor import DeploymentActorConfig
from daskserve.options.fields.ray_names import missing_name
from daskserve.options.http import HTTPOptions
from daskserve.options.logging import LoggingConfig
from daskserve.options.placement import GangSchedulingConfig
from daskserve.options.routing.request_router import RequestRouterConfig
from daskserve.options.tracing import TracingConfig

__all__ = [
    "AutoscalingConfig",
    "AutoscalingContext",
    "DeploymentActorConfig",
    "GangSchedulingConfig",
    "HTTPOptions",
    "LoggingConfig",
    "ProxyLocation",
    "RequestRouterConfig",
    "TracingConfig",
]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
