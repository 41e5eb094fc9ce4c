"""The JSON Schema of configuration files, with which editors complete and check what you write.

It is derived from the models that also check files. Rules that only code can express, such as options that
exclude each other, are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from daskserve.config_file import ray_keys
from daskserve.config_file.checking import known_names
from daskserve.config_file.model import ApplicationConfig, InstanceConfig
from daskserve.config_file.ray_keys import RayKey
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.options.deployment_actor import DeploymentActorConfig
from daskserve.options.environment import Environment
from daskserve.options.fields.base import Options, spellings_of
from daskserve.options.fields.ray_names import TRANSLATED
from daskserve.options.http import HTTPOptions
from daskserve.options.logging import LoggingConfig
from daskserve.options.tracing import TracingConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_REFERENCE: Mapping[str, Any] = {"type": "string", "pattern": r"\$\{"}
_NAME: Mapping[str, Any] = {"type": "string", "minLength": 1}
#: Keywords without effect on validation.
_NOTES = frozenset({"description", "default", "deprecated"})


def json_schema() -> dict[str, Any]:
    """Return the schema of a whole file, in the dialect of 2020-12."""
    env = {
        "anyOf": [
            _object(Environment, ray_keys.ENVIRONMENT, packages=_packages()),
            {"type": ["string", "null"]},
        ]
    }
    deployment = _deployment(env)
    logging = {"anyOf": [_object(LoggingConfig, {}), {"type": "null"}]}
    application = _object(
        ApplicationConfig,
        ray_keys.APPLICATION,
        name=_NAME,
        env=env,
        runtime_env=env,
        external_scaler_enabled={"anyOf": [{"type": "boolean"}, _REFERENCE]},
        logging_config=logging,
        deployments={"type": ["array", "null"], "items": deployment},
        autoscaling_policy={
            "type": ["object", "null"],
            "properties": {"policy_function": {"type": "string"}, "policy_kwargs": {"type": "object"}},
            "required": ["policy_function"],
            "additionalProperties": False,
        },
    )
    location = _object(HTTPOptions, {})["properties"]["location"]
    whole = _object(
        InstanceConfig,
        ray_keys.INSTANCE,
        applications={"type": "array", "items": application},
        http_options=_object(HTTPOptions, ray_keys.HTTP),
        tracing_config=_object(TracingConfig, {}),
        logging_config=logging,
        proxy_location={"anyOf": [*location.get("anyOf", [location]), {"const": "Disabled"}]},
        target_capacity={"anyOf": [{"type": ["number", "null"], "minimum": 0, "maximum": 100}, _REFERENCE]},
    )
    return {"$schema": DIALECT, "title": "Applications of daskserve", **whole, "required": ["applications"]}


def _deployment(env: Mapping[str, Any]) -> dict[str, Any]:
    resources = _object(ActorOptions, ray_keys.ACTOR)
    theirs = {**resources, "properties": {**resources["properties"], "runtime_env": env}}
    actor = _object(DeploymentActorConfig, {}, actor_class={"type": "string"}, actor_options=resources)
    found = _object(BackendConfig, ray_keys.DEPLOYMENT)
    replicas = found["properties"]["num_replicas"]
    found["properties"] = {
        "name": {**_NAME, "description": "Name of the deployment, as in the code."},
        **found["properties"],
        "num_replicas": _noted(replicas, {"anyOf": [_plain(replicas), {"const": "auto"}, {"type": "null"}]}),
        **{name: _noted(found["properties"][name], {"type": "number"}) for name in TRANSLATED},
        "actor_options": {**resources, "description": "Resources of each replica."},
        "ray_actor_options": {**theirs, "description": "Ray Serve's name of actor_options."},
        "env": {**env, "description": "Environment of the replicas, over that of the application."},
        "runtime_env": {**env, "description": "Ray Serve's name of env."},
        "version": {"type": ["string", "null"], "description": "Version of the code."},
        "deployment_actors": {
            "type": ["array", "null"],
            "items": actor,
            "description": "Actors that the replicas share.",
        },
    }
    return {**found, "required": ["name"]}


def _packages() -> dict[str, Any]:
    return {"type": ["array", "string", "object"], "items": {"type": "string"}}


def _object(model: type[Options], theirs: Mapping[str, RayKey], **others: Any) -> dict[str, Any]:
    """Return the JSON schema of a model, including the Ray Serve keys that daskserve does not read.

    ``others`` override properties.
    """
    found = model.model_json_schema()
    definitions = found.pop("$defs", {})
    spellings = spellings_of(model)
    properties: dict[str, Any] = {}
    for name in [each for each in known_names(model) if each not in theirs]:
        own = spellings.get(name, name)
        value = found["properties"].get(own) or found["properties"].get(name, {})
        value = _clean(_inlined(value, definitions))
        if own != name:
            value = {**value, "description": f"Another spelling of {own}. {value.get('description', '')}"}
        given = others.get(name) or others.get(own)
        properties[name] = _noted(value, given) if given is not None else value
    for name, key in theirs.items():
        properties.setdefault(
            name, {"description": f"Of Ray Serve, and not used: {key.text}.", "deprecated": True}
        )
    whole = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**whole, "required": found["required"]} if "required" in found else whole


def _inlined(value: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        if "$ref" in value:
            return _inlined(definitions[value["$ref"].rpartition("/")[2]], definitions)
        return {key: _inlined(each, definitions) for key, each in value.items()}
    return [_inlined(each, definitions) for each in value] if isinstance(value, list) else value


def _clean(value: Any) -> Any:
    """Return a part of a schema in which numbers and bools may also be references, and descriptions have no
    links."""
    if isinstance(value, list):
        return [_clean(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    found = {
        key: {name: _clean(each) for name, each in part.items()} if key == "properties" else _clean(part)
        for key, part in value.items()
        if key not in ("title", "default", "enum")
    }
    if "default" in value:
        found["default"] = value["default"]
    if "enum" in value:
        found["enum"] = list(dict.fromkeys(value["enum"]))
    description = found.get("description")
    if isinstance(description, str):
        found["description"] = _LINK.sub(r"\1", description).replace("``", "`")
    if "gt" in found:
        found["exclusiveMinimum"] = found.pop("gt")
    if "enum" not in found and found.get("type") not in ("integer", "number", "boolean"):
        return found
    return _noted(found, {"anyOf": [_plain(found), dict(_REFERENCE)]})


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key not in _NOTES}


def _noted(value: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return another schema with this schema's description and other annotations."""
    return {**{key: each for key, each in value.items() if key in _NOTES}, **other}
