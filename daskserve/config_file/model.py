"""The content of a configuration file as plain values, which are stored, shown, and sent to the controller.

Options stay as they are written, with their references to environment variables
(`daskserve.config_file.references`), and deployments keep the spellings of Ray Serve. The models of
`daskserve.options` check them when the file is read. They check them again, with the values of the variables,
when the application is built.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from pydantic import AliasChoices, ConfigDict, Field

from daskserve.common.types import DEFAULT_APPLICATION
from daskserve.options.fields.base import Options

#: The place of each reference, such as ``serve.yaml:12:7``, by its path, with slashes.
Places: TypeAlias = dict[str, str]


class DeploymentOverride(Options):
    """The name of a deployment, and options that override those of its code."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="Name of the deployment in the code.")

    @property
    def options(self) -> dict[str, Any]:
        """The options, as they are written."""
        return dict(self.model_extra or {})


class ApplicationConfig(Options):
    """One application of a configuration file."""

    name: str = Field(DEFAULT_APPLICATION, description="Name of the application.")
    import_path: str = Field(
        description=(
            "Import path, ``module:name`` or ``module.name``, of a target for ``serve.run``: an "
            "application, a function that builds one, or an ASGI application."
        )
    )
    route_prefix: str | None = Field(
        "/", description="Path prefix of its HTTP requests. None: the application is called by handle only."
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the function that builds the application."
    )
    env: Any = Field(
        None,
        description=(
            "Environment of all its deployments, see "
            "[Environments](docs/options.md#environments). The environment of a deployment takes precedence; "
            "the variables of both are set."
        ),
        validation_alias=AliasChoices("env", "runtime_env"),
    )
    external_scaler_enabled: bool | str = Field(
        False, description="Whether external programs may set the number of replicas of its deployments."
    )
    autoscaling_policy: dict[str, Any] | None = Field(
        None,
        description="One policy that scales all its deployments with an ``autoscaling_config``: "
        "``policy_function``, an import path, and ``policy_kwargs``.",
    )
    logging_config: dict[str, Any] | None = Field(
        None, description="How its deployments log, see [Logging](docs/logging.md)."
    )
    deployments: list[DeploymentOverride] = Field(
        default_factory=list,
        description="Overrides of options in the code, by deployment. All other options keep the values "
        "of the code.",
    )
    references: Places = Field(default_factory=dict, description="Set by daskserve.")


class InstanceConfig(Options):
    """A whole configuration file."""

    applications: list[ApplicationConfig] = Field(
        default_factory=list, description="The applications, each with its own name and route."
    )
    http_options: dict[str, Any] = Field(
        default_factory=dict,
        description="HTTP options, see [HTTP](docs/options.md#http). They take effect when the instance "
        "starts.",
    )
    tracing_config: dict[str, Any] = Field(
        default_factory=dict,
        description="Traces, see [Traces](docs/tracing.md). They take effect when the instance starts.",
    )
    proxy_location: Any = Field(
        None,
        description="Ray Serve's name of ``location`` in ``http_options``: ``EveryNode``, ``HeadOnly`` or "
        "``Disabled``.",
    )
    logging_config: dict[str, Any] | None = Field(
        None,
        description=(
            "How the instance logs, see [Logging](docs/logging.md). If it is missing, a running "
            "instance keeps its settings."
        ),
    )
    target_capacity: Any = Field(
        None,
        description="Percentage of the configured number of replicas to run, from 0 to 100. None: all of "
        "them.",
    )
    references: Places = Field(default_factory=dict, description="Set by daskserve.")
