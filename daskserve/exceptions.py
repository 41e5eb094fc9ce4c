"""The errors under Ray Serve's names; `daskserve.errors` has all errors.

``from daskserve.exceptions import RayServeException`` is for programs that move from Ray Serve.
"""

from __future__ import annotations

from typing import Any

from daskserve.errors import (
    BackPressureError,
    DeploymentIsBeingDeletedError,
    DeploymentUnavailableError,
    ExternalScalerDisabledError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from daskserve.errors import BadRequestError as RayServeConfigException
from daskserve.errors import ServeError as RayServeException
from daskserve.options.fields.ray_names import missing_name

__all__ = [
    "BackPressureError",
    "DeploymentIsBeingDeletedError",
    "DeploymentUnavailableError",
    "ExternalScalerDisabledError",
    "RayServeConfigException",
    "RayServeException",
    "ReplicaUnavailableError",
    "RequestCancelledError",
]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
