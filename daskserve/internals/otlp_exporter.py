"""The connection of OpenTelemetry's exporter of OTLP by HTTP, for bodies that are encoded elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Where the exporter is defined.
OTLP_HTTP = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def post_of(exporter: Any) -> Callable[[bytes], bool] | None:
    """Return what sends an encoded body to the collector of an exporter; None for other exporters.

    The headers, the certificates, the compression and the repetitions are those of the exporter, with all of
    its variables. The exporter's only public method takes spans of the SDK and encodes them itself, in five
    times the time, so this is the one place that reads an attribute of its own, `_client`. In versions
    without it, exporters get spans.
    """
    if type(exporter).__module__ != OTLP_HTTP:
        return None
    export: Any = getattr(getattr(exporter, "_client", None), "export", None)
    return None if export is None else lambda body: bool(export(body).success)
