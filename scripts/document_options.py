"""Generate the tables of docs/options.md from the option models.

Without arguments, rewrite the file. With ``--check``, exit with 1 if the file is out of date.
"""

from __future__ import annotations

import sys
from typing import Any

from generated_tables import GeneratedTables
from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from daskserve.common.types import Location
from daskserve.data.tasks.config import (
    InstanceAdapterConfig,
    RedisAdapterConfig,
    SQLiteAdapterConfig,
    TaskProcessorConfig,
    TaskSchedule,
)
from daskserve.options.actor import ActorOptions
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.backend import BackendConfig
from daskserve.options.deployment_actor import DeploymentActorConfig
from daskserve.options.environment import DaskTaskConfig, Environment, ModelRepository
from daskserve.options.fields.base import Options, effect_of
from daskserve.options.fields.ray_names import TRANSLATED
from daskserve.options.http import HTTPOptions
from daskserve.options.logging import LoggingConfig
from daskserve.options.payload_logging import PayloadLoggingConfig
from daskserve.options.placement import GangSchedulingConfig
from daskserve.options.rollout import Gate, RolloutConfig
from daskserve.options.routing.hedging import HedgingConfig
from daskserve.options.routing.priorities import PriorityConfig
from daskserve.options.routing.request_router import RequestRouterConfig
from daskserve.options.tracing import TracingConfig

#: The models whose options the page lists, by name.
MODELS = {
    model.__name__: model
    for model in (
        BackendConfig,
        ActorOptions,
        DeploymentActorConfig,
        GangSchedulingConfig,
        ModelRepository,
        AutoscalingConfig,
        RolloutConfig,
        Gate,
        RequestRouterConfig,
        PriorityConfig,
        HedgingConfig,
        DaskTaskConfig,
        Environment,
        HTTPOptions,
        LoggingConfig,
        PayloadLoggingConfig,
        TracingConfig,
        TaskProcessorConfig,
        TaskSchedule,
        InstanceAdapterConfig,
        SQLiteAdapterConfig,
        RedisAdapterConfig,
    )
}
#: Set by daskserve itself; not an option.
INTERNAL = frozenset({"internal_metadata", "references"})


def range_of(field: FieldInfo) -> str:
    """Return the range that a field allows, such as "1 to 10", or "" if it has no bounds."""
    bounds = {
        name: getattr(each, name)
        for each in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if getattr(each, name, None) is not None
    }
    if "ge" in bounds and "le" in bounds:
        return f"{bounds['ge']} to {bounds['le']}"
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    return ", ".join(f"{words[name]} {bound}" for name, bound in bounds.items())


def default_of(field: FieldInfo) -> str:
    """Return a field's default in Python syntax, and the range that it allows."""
    allowed = range_of(field)
    if field.is_required():
        return f"required ({allowed})" if allowed else "required"
    value: Any = field.get_default(call_default_factory=True)
    default = f"`{str(value) if isinstance(value, Location) else value!r}`"
    return f"{default} ({allowed})" if allowed else default


def linked(text: str) -> str:
    """Return a description whose links, relative to the project's folder, are rewritten for docs/."""
    return text.replace("](docs/", "](").replace("](SECURITY.md", "](../SECURITY.md")


def row(model: type[Options], name: str, field: FieldInfo) -> str:
    """Return the table row of one option, with its other spellings if it has any."""
    names = [name]
    if isinstance(field.validation_alias, AliasChoices):
        names += [str(choice) for choice in field.validation_alias.choices if choice != name]
    names += [theirs for theirs, ours in TRANSLATED.items() if model is BackendConfig and ours == name]
    spelling = " or ".join(f"`{each}`" for each in names)
    cells = [spelling, default_of(field), linked((field.description or "").replace("``", "`"))]
    if model is BackendConfig:
        cells.append(effect_of(field).value)
    return f"| {' | '.join(cells)} |"


def table(model: type[Options]) -> str:
    """Return a model's options as a Markdown table."""
    rows = [row(model, name, field) for name, field in model.model_fields.items() if name not in INTERNAL]
    head = ["option", "default", "meaning"]
    if model is BackendConfig:
        head.append("a change")
    rule = ["---"] * len(head)
    return "\n".join([f"| {' | '.join(head)} |", f"| {' | '.join(rule)} |", *rows]) + "\n"


TABLES = GeneratedTables("docs/options.md", r"options: (\w+)", lambda model: table(MODELS[model]))


if __name__ == "__main__":
    sys.exit(TABLES.main())
