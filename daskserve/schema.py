"""Classes under the names that `ray.serve.schema` has for them, for programs that move from Ray Serve.

The classes of the status are the types that `daskserve.status` returns, and `Explanation` is the type that
`daskserve.explain` returns. The classes of the configuration file validate values like
`daskserve.config_file.reading.read`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from daskserve.client.views.explanation import Explanation
from daskserve.client.views.status import ApplicationStatus as ApplicationStatusOverview
from daskserve.client.views.status import DeploymentStatus as DeploymentStatusOverview
from daskserve.client.views.status import Status as ServeStatus
from daskserve.config_file.model import ApplicationConfig, DeploymentOverride, InstanceConfig
from daskserve.config_file.reading import checked
from daskserve.data.tasks.adapter import TaskProcessorAdapter
from daskserve.data.tasks.config import CeleryAdapterConfig, TaskProcessorConfig, TaskResult
from daskserve.options.fields.ray_names import missing_name
from daskserve.options.logging import LoggingConfig
from daskserve.options.tracing import TracingConfig

__all__ = [
    "ApplicationStatusOverview",
    "CeleryAdapterConfig",
    "DeploymentSchema",
    "DeploymentStatusOverview",
    "Explanation",
    "LoggingConfig",
    "ServeApplicationSchema",
    "ServeDeploySchema",
    "ServeStatus",
    "TaskProcessorAdapter",
    "TaskProcessorConfig",
    "TaskResult",
    "TracingConfig",
]


class ServeDeploySchema(InstanceConfig):
    """The values of a whole configuration file."""

    @model_validator(mode="before")
    @classmethod
    def _is_right(cls, values: Any) -> Any:
        return checked(values, "instance") if isinstance(values, Mapping) else values


class ServeApplicationSchema(ApplicationConfig):
    """The values of one application."""

    @model_validator(mode="before")
    @classmethod
    def _is_right(cls, values: Any) -> Any:
        return checked(values, "application") if isinstance(values, Mapping) else values


class DeploymentSchema(DeploymentOverride):
    """The options of one deployment."""

    @model_validator(mode="before")
    @classmethod
    def _is_right(cls, values: Any) -> Any:
        return checked(values, "deployment") if isinstance(values, Mapping) else values


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
