"""The trace of the current code; nearly free in a process that does not use OpenTelemetry."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.routing import RoutingSpan


def current_trace_id() -> str:
    """Return the id of the trace that the current code belongs to, in hexadecimal; empty without one."""
    api = loaded("opentelemetry.trace", "use_span")
    if api is None:
        return ""
    found = api.get_current_span().get_span_context()
    return format(found.trace_id, "032x") if found.is_valid else ""


def loaded(name: str, attribute: str) -> Any:
    """Return an imported module once it has an attribute; None if it is absent or still being imported."""
    module = sys.modules.get(name)
    return module if hasattr(module, attribute) else None


@cache
def routing_span_starter() -> Callable[[Mapping[str, Any], Mapping[str, Any], str], RoutingSpan | None]:
    """Return `daskserve.telemetry.tracing.routing.start_routing_span`, whose module takes long to import."""
    from daskserve.telemetry.tracing.routing import start_routing_span

    return start_routing_span


def get_trace_context() -> Any:
    """Return OpenTelemetry's context of the current code, for the instrumentation of other libraries.

    Returns
    -------
    opentelemetry.context.Context or None
        None outside a trace.
    """
    api = loaded("opentelemetry.trace", "use_span")
    if api is None or not api.get_current_span().get_span_context().is_valid:
        return None
    from opentelemetry import context

    return context.get_current()
