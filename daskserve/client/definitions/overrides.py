"""Applies the options of a configuration file to the deployments of the code."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from daskserve.client.definitions.deployments import Deployment
from daskserve.config_file.model import ApplicationConfig
from daskserve.config_file.option_checks import text_of
from daskserve.errors import BadRequestError
from daskserve.options.environment import Environment, parse_environment
from daskserve.options.fields.base import parse_options
from daskserve.options.logging import LoggingConfig, over

#: Prefix of a path on the machine of the worker that builds the application.
LOCAL = "local://"


class Overrides:
    """The options that an application's configuration gives its deployments.

    The options override those of the code. When an option is removed from the configuration, the value in the
    code applies again.
    """

    def __init__(self, config: ApplicationConfig) -> None:
        self._application = config.name
        self._options = {each.name: each.options for each in config.deployments}
        self._env = environment_of(config.env)
        self._is_scaled_externally = config.external_scaler_enabled
        self._policy = config.autoscaling_policy
        logs = config.logging_config
        self._logging = None if logs is None else parse_options(LoggingConfig, logs, what="logging_config")

    def check(self, names: Sequence[str]) -> None:
        """Raise `BadRequestError` if there are options for a deployment that the code does not have."""
        unknown = [name for name in self._options if name not in names]
        if unknown:
            similar = difflib.get_close_matches(unknown[0], names, 1)
            hint = f" Did you mean {similar[0]!r}?" if similar else ""
            raise BadRequestError(
                f"The configuration of application {self._application!r} has options for "
                f"{', '.join(map(repr, unknown))}, but the code has no such deployment; it has "
                f"{', '.join(map(repr, names))}.{hint}"
            )

    def applied(self, name: str, deployment: Deployment) -> Deployment:
        """Return a deployment of the code with the options that the configuration gives it."""
        try:
            return self._applied(self._options.get(name, {}), deployment)
        except (TypeError, ValueError) as error:
            why = text_of(error) if isinstance(error, ValidationError) else str(error)
            what = f"deployment {name!r} of application {self._application!r}"
            raise BadRequestError(f"The configuration of {what} is invalid: {why}") from error

    def _applied(self, given: Mapping[str, Any], deployment: Deployment) -> Deployment:
        options = dict(given)
        own = options.pop("env", deployment.env)
        resources = options.get("ray_actor_options")
        if resources and resources.get("runtime_env"):
            own = resources["runtime_env"]
            options["ray_actor_options"] = {k: v for k, v in resources.items() if k != "runtime_env"}
        if self._is_scaled_externally:
            options["external_scaler_enabled"] = self._is_scaled_externally
        env = merged(self._env, environment_of(own))
        if env is not None:
            options["env"] = env
        changed = logging_in(deployment.options(**options), self._logging)
        scaling = changed.config.autoscaling_config
        if self._policy is None or scaling is None:
            return changed
        policy = {"policy": self._policy, "group": self._application}
        return changed.options(autoscaling_config={**scaling.model_dump(exclude_unset=True), **policy})


def logging_in(deployment: Deployment, outer: LoggingConfig | None) -> Deployment:
    """Return a deployment that takes its unset logging options from its application."""
    if outer is None:
        return deployment
    return deployment.options(logging_config=over(deployment.config.logging_config, outer))


def environment_of(value: Any) -> Environment | None:
    """Return an environment, without the prefix ``local://`` of its folder."""
    found = parse_environment(value)
    if found is None or found.working_dir is None:
        return found
    return found.model_copy(update={"working_dir": found.working_dir.removeprefix(LOCAL)})


def merged(whole: Environment | None, own: Environment | None) -> Environment | None:
    """Return a deployment's environment over that of its application."""
    if whole is None or own is None:
        return whole or own
    values = {name: getattr(whole, name) for name in whole.model_fields_set}
    if own.python is not None:
        values.pop("packages", None)  # python and packages exclude each other
    if own.packages:
        values.pop("python", None)
    values |= {name: getattr(own, name) for name in own.model_fields_set}
    return Environment(**{**values, "env_vars": {**whole.env_vars, **own.env_vars}})
