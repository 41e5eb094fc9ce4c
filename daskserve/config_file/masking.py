"""Masks the secrets in a configuration before it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.environment import Environment
from daskserve.options.fields.base import Masked
from daskserve.options.fields.secrets import masked
from daskserve.options.http import HTTPOptions

#: The functions that hide secrets, by the option's name.
HIDING: Mapping[str, Any] = {
    name: each.show
    for model in (AutoscalingConfig, Environment, HTTPOptions)
    for name, field in model.model_fields.items()
    for each in field.metadata
    if isinstance(each, Masked)
}


def shown(config: Any) -> Any:
    """Return plain values of a configuration without literal secrets and without the places of references."""
    if isinstance(config, Mapping):
        return {
            name: _hidden(HIDING[name], each) if name in HIDING and each is not None else shown(each)
            for name, each in config.items()
            if name != "references"
        }
    if isinstance(config, list | tuple):
        return [shown(each) for each in config]
    return masked(config)


def _hidden(hide: Any, value: Any) -> Any:
    """Return a masked secret; a reference to a variable is not masked."""
    if isinstance(value, str) and value.startswith("${"):
        return value
    found = hide(value)
    if isinstance(value, Mapping) and isinstance(found, Mapping):
        return {
            name: each if isinstance(each, str) and each.startswith("${") else found.get(name)
            for name, each in value.items()
        }
    return found
