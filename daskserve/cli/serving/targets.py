"""The targets of ``daskserve run``: import paths of applications, and configuration files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from daskserve.cli.output import options
from daskserve.client.hosting.sources import Source
from daskserve.client.verbs.applications import RunTarget
from daskserve.common import settings
from daskserve.config_file.model import ApplicationConfig
from daskserve.config_file.reading import ReadFile, in_force, read

#: Parameters of options that cannot be given together with a configuration file, which has its own.
_IN_THE_FILE = frozenset(
    ("--name", "--route-prefix", "--factory", "--runtime-env", "--runtime-env-json", "--working-dir")
)


#: Ray Serve's options for the environment of replicas.
environment_options = options(
    click.option(
        "--runtime-env",
        type=click.Path(exists=True, dir_okay=False),
        help="YAML file with the environment of replicas.",
    ),
    click.option(
        "--runtime-env-json",
        metavar="JSON",
        help='Environment of replicas, such as \'{"env_vars": {"A": "1"}, "packages": ["numpy"]}\'.',
    ),
    click.option(
        "--working-dir",
        help="Folder or zip file that is sent to the replicas, each of which runs in a separate process.",
    ),
)


@dataclass(frozen=True, slots=True)
class Served:
    """The applications that a command serves, with the options of the instance from its file."""

    source: Source
    http_options: Mapping[str, Any] = field(default_factory=dict)
    tracing_config: Mapping[str, Any] = field(default_factory=dict)
    logging_config: Mapping[str, Any] = field(default_factory=dict)


def check_file_options(name: str, arguments: tuple[str, ...]) -> None:
    """Raise `click.UsageError` for options of the running command that a configuration file has itself."""
    context = click.get_current_context()
    for each in context.command.params:
        is_given = context.get_parameter_source(each.name or "") is ParameterSource.COMMANDLINE
        for option in _IN_THE_FILE.intersection(each.opts) if is_given else ():
            raise click.UsageError(f"{option} is for import paths only; set it in the file {name!r} instead.")
    if arguments:
        raise click.UsageError(f"The file {name!r} sets its own args; leave out {' '.join(arguments)}.")


def read_file(name: str) -> ReadFile:
    """Return the content of a configuration file.

    Raises
    ------
    ConfigFileError
        The file has faults.
    click.UsageError
        It cannot be read.
    """
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"The file {name!r} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"The file {name!r} is not text in UTF-8: {error}.") from None
    return read(text, name)


def served_file(name: str, timeout_s: float | None) -> Served:
    """Return the target that a configuration file describes; print its warnings. See `read_file`."""
    found = read_file(name)
    for warning in found.warnings:
        click.secho(f"Warning: {warning}", fg="yellow", err=True)
    whole = in_force(found.config, settings.process_variables())
    http = dict(whole.http_options)
    if whole.proxy_location is not None:
        http["location"] = whole.proxy_location
    capacity = None if whole.target_capacity is None else float(whole.target_capacity)
    logs = whole.logging_config or {}
    source = Source(tuple(whole.applications), timeout_s, capacity=capacity, logging=logs or None)
    return Served(source, http, whole.tracing_config, logs)


def served_path(
    target: RunTarget, environment: Mapping[str, Any], *, is_factory: bool, timeout_s: float | None
) -> Served:
    """Return the target that an import path names, with the environment for its replicas, if any."""
    if not environment:
        return Served(Source((target,), timeout_s, is_factory=is_factory))
    if is_factory:
        raise click.UsageError(
            "--factory cannot be combined with an environment; use the function as the app of "
            "serve.deployment(env=...)."
        )
    config = ApplicationConfig(
        name=target.name,
        route_prefix=target.route_prefix,
        import_path=target.target,
        args=_literal(dict(target.args or {})),
        env=_literal(dict(environment)),
    )
    return Served(Source((config,), timeout_s))


def given_environment(values: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the environment of replicas from a command's options, with additional variables."""
    found: dict[str, Any] = {}
    if values["runtime_env"] is not None:
        import yaml

        name = values["runtime_env"]
        try:
            found = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise click.UsageError(f"The file {name!r} is not YAML: {error}") from error
    if values["runtime_env_json"] is not None:
        if found:
            raise click.UsageError("Give either --runtime-env or --runtime-env-json, not both.")
        try:
            found = json.loads(values["runtime_env_json"])
        except ValueError as error:
            raise click.UsageError(f"--runtime-env-json is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise click.UsageError(f"The environment of replicas must be a mapping, got {found!r}.")
    names = found.get("env_vars", {})
    if not isinstance(names, dict):
        raise click.UsageError(f"env_vars of the environment must be a mapping, got {names!r}.")
    if values["working_dir"] is not None:
        found = {**found, "working_dir": values["working_dir"]}
    if variables:
        found = {**found, "env_vars": {**variables, **names}}
    return found


def _literal(value: Any) -> Any:
    """Return a value whose texts are escaped, so that a configuration finds no references to variables in
    them."""
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, Mapping):
        return {key: _literal(each) for key, each in value.items()}
    return [_literal(each) for each in value] if isinstance(value, list) else value
