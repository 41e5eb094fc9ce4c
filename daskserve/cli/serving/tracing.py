"""The options of traces as options of a command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from daskserve.cli.output import FiniteRange, options

_EXPORTER, _RATIO = "tracing_exporter", "tracing_ratio"


#: The options of `daskserve.options.tracing.TracingConfig`.
tracing_options = options(
    click.option(
        "--tracing-ratio",
        _RATIO,
        type=FiniteRange(0, 1),
        help="Share of the requests that begin a trace; turns traces on. Default: no traces.",
    ),
    click.option(
        "--tracing-exporter",
        _EXPORTER,
        help="Import path of a function that returns exporters of OpenTelemetry's SDK; turns traces on. "
        "Default: OTLP by HTTP, or what OTEL_TRACES_EXPORTER names.",
    ),
)


def given_tracing(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of traces that were given."""
    names = {_EXPORTER: "exporter_import_path", _RATIO: "sampling_ratio"}
    return {names[each]: values[each] for each in names if values.get(each) is not None}
