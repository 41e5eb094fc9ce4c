"""The options of traces by OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from daskserve.common.types import split_import_path
from daskserve.options.fields.base import Options, parse_options


class TracingConfig(Options):
    """Traces of an instance by OpenTelemetry. They take effect when the instance starts."""

    place: ClassVar[str] = "tracing_config"

    enabled: bool = Field(
        True,
        description="Whether daskserve creates spans for sampled requests. Trace contexts of clients are "
        "passed on in any case.",
    )
    exporter_import_path: str = Field(
        "",
        description="Import path, on the workers, of a function without arguments that returns an "
        "exporter or a span processor of OpenTelemetry's SDK, or a list of them. Empty: the exporters that "
        "``OTEL_TRACES_EXPORTER`` names, by default OTLP by HTTP.",
    )
    sampling_ratio: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of the requests without a ``traceparent`` header that are sampled. A request "
        "with the header is sampled if its sender sampled it.",
    )

    @field_validator("exporter_import_path")
    @classmethod
    def _is_a_path(cls, value: str) -> str:
        if value and not all(split_import_path(value)):
            raise ValueError(f"must be 'module:name' or 'module.name', with names of Python, got {value!r}")
        return value


def checked_tracing(config: TracingConfig | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the tracing options as plain values; empty without tracing."""
    if config is None:
        return {}
    return parse_options(TracingConfig, config, what="tracing_config").model_dump(mode="json")
