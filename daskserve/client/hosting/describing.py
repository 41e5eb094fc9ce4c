"""The configuration file of an application that this process can import."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from daskserve.client.client import Client
from daskserve.client.definitions.deployments import Deployment, default_name
from daskserve.client.definitions.graph import ApplicationGraph
from daskserve.client.definitions.targets import application_of
from daskserve.client.hosting.building import users_errors
from daskserve.common.types import DEFAULT_APPLICATION
from daskserve.errors import BadRequestError
from daskserve.options.backend import BackendConfig
from daskserve.options.environment import parse_environment
from daskserve.options.fields.base import spellings_of


def described_paths(paths: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the configurations of applications, and notes on options that a file cannot express.

    A single application is the default one, at ``/``. If there are several, the last part of each import path
    is the name and the route.

    Raises
    ------
    BadRequestError, TypeError A path does not name an application, or two applications have the same name.
    ReplicaStartError
        The user's code raised.
    """
    if len(paths) == 1:
        config, notes = described(paths[0], DEFAULT_APPLICATION, "/")
        return [config], notes
    found, all_notes, names = [], [], dict.fromkeys(map(default_name, paths))
    if len(names) < len(paths):  # such as a:app and b:app
        names = dict.fromkeys(path.replace(":", ".").partition(".")[0] for path in paths)
    if len(names) < len(paths):
        raise BadRequestError(
            f"Two of {', '.join(paths)} would have the same name; build each one separately, and set the "
            "names in the files."
        )
    for path, name in zip(paths, names, strict=True):
        config, notes = described(path, name, f"/{name}")
        found.append(config)
        all_notes += notes
    return found, all_notes


def described(path: str, name: str, route: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration of an import path, with the code's options, and notes on omitted options."""
    with users_errors(name, path):
        graph = ApplicationGraph(application_of(path), name)
    notes: list[str] = []
    deployments = []
    for each, deployment in graph.deployments:
        options, left_out = plain_options(deployment)
        deployments.append({"name": each, **options})
        notes += [
            f"{name}, {each}: {option} stays in the code, because it is not a plain value"
            for option in left_out
        ]
    return {
        "name": name,
        "import_path": path,
        "route_prefix": route,
        "deployments": deployments,
    }, notes


def plain_options(deployment: Deployment) -> tuple[dict[str, Any], list[str]]:
    """Return the options that a deployment's code sets, and the names of options without plain values."""
    config = {name: getattr(deployment.config, name) for name in deployment.config.model_fields_set}
    config.pop("internal_metadata", None)
    values: dict[str, Any] = {
        _spelled(name): value.to_plain() if hasattr(value, "to_plain") else value
        for name, value in config.items()
    }
    if deployment.actor_options.model_fields_set:
        values["actor_options"] = deployment.actor_options.to_plain()
    environment = parse_environment(deployment.env)
    if environment is not None:
        values["env"] = environment.to_plain()
    if deployment.version is not None:
        values["version"] = deployment.version
    if deployment.actors:
        values["deployment_actors"] = [each.to_plain() for each in deployment.actors]
    is_written = {name: _is_plain(value) and not _is_local(name, value) for name, value in values.items()}
    return (
        {name: value for name, value in values.items() if is_written[name]},
        sorted(name for name in values if not is_written[name]),
    )


def _spelled(name: str) -> str:
    """Return the usual name of an option, which may also have a longer classic name."""
    short = name.removeprefix("experimental_")
    return short if spellings_of(BackendConfig).get(short) == name else name


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _is_local(name: str, value: Any) -> bool:
    """Whether an option names a folder of this machine, which a configuration file must not do."""
    folder = value.get("working_dir") if name == "env" and isinstance(value, Mapping) else None
    return folder is not None and "://" not in folder


def declared(client: Client, names: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration of a running instance, for some applications or all, and notes.

    Raises
    ------
    NotFoundError
        There is no such application, or it was deployed by a program, which has its code.
    """
    wanted: Sequence[str | None] = names or [None]
    found = [client.get_config(each) for each in wanted]
    instance = {} if names else found[0]["instance"]
    applications = [each["config"] for part in found for each in part["applications"].values()]
    written = {each["name"] for each in applications}
    others = [] if names else sorted(client.status().applications.keys() - written)
    notes = [f"{each}: left out, because a program has deployed it" for each in others]
    return {**instance, "applications": applications}, notes
