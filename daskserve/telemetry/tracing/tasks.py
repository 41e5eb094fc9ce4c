"""Passes the trace of the current code to the Dask tasks that it submits."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def with_trace(function: Any) -> Any:
    """Return a function that runs in the current trace on any worker; the same function if there is no trace.

    Coroutine functions and classes are returned unchanged, because Dask treats them differently.
    """
    if "opentelemetry.context" not in sys.modules or not callable(function):
        return function
    if inspect.isclass(function) or inspect.iscoroutinefunction(function):
        return function
    from daskserve.telemetry.tracing.context import outgoing

    carrier = outgoing()
    if carrier is None:
        return function
    from dask.utils import funcname

    names = ("traceparent", "tracestate", "baggage")
    headers = {name: value for name, value in zip(names, carrier, strict=True) if value}
    return _task_class()(function, funcname(function), headers)


@cache
def _task_class() -> Callable[..., Any]:
    # A class within a function is pickled by value, so a worker needs neither daskserve nor OpenTelemetry.
    class TracedTask:
        def __init__(self, function: Any, name: str, headers: dict[str, str]) -> None:
            self.function = function
            self.__name__ = name
            self.headers = headers

        def __dask_tokenize__(self) -> Any:
            from dask.base import normalize_token

            return normalize_token(self.function)  # the key of a task does not depend on its trace

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                from opentelemetry import context, propagate, trace
            except ImportError:
                return self.function(*args, **kwargs)
            token = context.attach(propagate.extract(self.headers, context.Context()))
            try:
                with trace.get_tracer("daskserve").start_as_current_span(f"dask task {self.__name__}"):
                    return self.function(*args, **kwargs)
            finally:
                context.detach(token)

    return TracedTask
