"""The connection of OpenTelemetry's OTLP/HTTP exporter, for bodies that are encoded elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: The module that defines the exporter.
OTLP_HTTP = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def post_of(exporter: Any) -> Callable[[bytes], bool] | None:
    """Return the function that sends an encoded body to an exporter's collector; None for other exporters.

    Headers, certificates, compression and retries are those of the exporter, including settings from
    environment variables. The exporter's only public method encodes spans of the SDK, which takes five times
    as long, so this function uses its private attribute `_client`. Exporters without this attribute get spans
    instead.
    """
    if type(exporter).__module__ != OTLP_HTTP:
        return None
    export: Any = getattr(getattr(exporter, "_client", None), "export", None)
    return None if export is None else lambda body: bool(export(body).success)
