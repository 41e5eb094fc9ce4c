"""Dask tasks in a trace: they run in the trace, keep their keys, and need nothing on their workers."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
from dask.base import tokenize
from dask.utils import funcname
from opentelemetry import baggage, context, trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from daskserve.telemetry.tracing.current import current_trace_id
from daskserve.telemetry.tracing.tasks import with_trace


def in_a_trace(make: Callable[[], Any]) -> Any:
    span = NonRecordingSpan(SpanContext(7, 8, is_remote=True, trace_flags=TraceFlags(1)))
    token = context.attach(baggage.set_baggage("tenant", "a", trace.set_span_in_context(span, Context())))
    try:
        return make()
    finally:
        context.detach(token)


def ids(value: int) -> tuple[int, str, object]:
    return value, current_trace_id(), baggage.get_baggage("tenant")


def test_a_task_runs_in_the_trace_of_the_code_that_submits_it() -> None:
    task = pickle.loads(cloudpickle.dumps(in_a_trace(lambda: with_trace(ids))))
    assert task(3) == (3, f"{7:032x}", "a")
    assert current_trace_id() == ""
    assert with_trace(ids) is ids


def test_a_task_has_the_key_that_it_has_without_a_trace() -> None:
    task = in_a_trace(lambda: with_trace(ids))
    assert (funcname(task), tokenize(task, 1)) == (funcname(ids), tokenize(ids, 1))


def test_special_values_of_dask_are_left_unchanged() -> None:
    async def run() -> None: ...

    for each in (run, dict, "a key"):
        assert in_a_trace(lambda each=each: with_trace(each)) is each


def test_a_worker_needs_neither_daskserve_nor_opentelemetry() -> None:
    task = cloudpickle.dumps(in_a_trace(lambda: with_trace(abs)))
    code = (
        "import sys, pickle; sys.modules['daskserve'] = sys.modules['opentelemetry'] = None; "
        f"print(pickle.loads({task!r})(-3))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "3\n"
