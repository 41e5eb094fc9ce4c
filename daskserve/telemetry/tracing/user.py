"""Spans of user code: the tracers that ``opentelemetry.trace.get_tracer`` returns in the workers.

OpenTelemetry has one global provider per process, which can be set only once, but a worker may serve several
instances one after another. So this provider chooses the instance when a span begins: the instance of the
current request, otherwise the latest one. If the process already has a provider, that provider stays.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any
from weakref import WeakValueDictionary

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, NonRecordingSpan, Span, SpanKind, Tracer, TracerProvider

from daskserve.telemetry.tracing.carrier import trace_head
from daskserve.telemetry.tracing.span import RecordedSpan, SpanQueue
from daskserve.telemetry.tracing.templates import SpanTemplate, SpanTemplates


class UserTracer(Tracer):
    """Begins spans of user code."""

    def __init__(self, provider: UserTracerProvider, scope: str) -> None:
        self._provider = provider
        self._values = {"otel.scope.name": str(scope)}
        self._templates = SpanTemplates()

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        above = trace.get_current_span(context)
        known = above.get_span_context()
        queue = self._provider.queue_of(above)
        if queue is None or not known.is_valid or not known.trace_flags.sampled:
            # User code cannot begin a trace, because a framework begins a span for each request, even if it
            # is not sampled.
            return NonRecordingSpan(known) if known.is_valid else INVALID_SPAN
        template = self._templates.get((name, kind), self._template)
        span = RecordedSpan(queue, template, trace_head(known.trace_id), known.span_id)
        span.tracestate = known.trace_state.to_header()
        if start_time:
            span.start_ns = start_time
        span.set_attributes(attributes or {})
        for each in links or ():
            span.add_link(each.context, each.attributes)
        return span

    def _template(self, key: tuple[str, SpanKind]) -> SpanTemplate:
        return SpanTemplate(*key, self._values)

    def start_as_current_span(  # type: ignore[override]
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
    ) -> CurrentSpan:
        start = partial(self.start_span, name, context, kind, attributes, links, start_time)
        return CurrentSpan(start, (end_on_exit, record_exception, set_status_on_exception))


class CurrentSpan(AbstractContextManager[Span]):
    """Begins a span and makes it the current one: within a block, or in each call of a function it decorates.

    The function may be asynchronous; a decorator of `contextlib` would end the span before such a function
    ends.
    """

    def __init__(self, start: Callable[[], Span], how: tuple[bool, bool, bool]) -> None:
        self._start = start
        self._how = how

    def __enter__(self) -> Span:
        self._block: Any = trace.use_span(self._start(), *self._how)
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)  # type: ignore[no-any-return]

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                with CurrentSpan(self._start, self._how):
                    return await function(*args, **kwargs)

            return call_async

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with CurrentSpan(self._start, self._how):
                return function(*args, **kwargs)

        return call


class UserTracerProvider(TracerProvider):
    """The global provider of a worker, with weak references to the span queues of its instances."""

    def __init__(self) -> None:
        #: The queues, in the order in which the instances began.
        self._all: WeakValueDictionary[int, SpanQueue] = WeakValueDictionary()
        self._lock = threading.Lock()

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Tracer:
        return UserTracer(self, instrumenting_module_name)

    def add(self, queue: SpanQueue) -> None:
        """Add an instance."""
        with self._lock:
            self._all.pop(id(queue), None)
            self._all[id(queue)] = queue

    def queue_of(self, span: Span) -> SpanQueue | None:
        """Return the queue that records children of a span; if there is none, return the latest open
        queue."""
        if isinstance(span, RecordedSpan):
            return span.queue
        with self._lock:
            known = [each for each in self._all.values() if not each.is_closed]
        return known[-1] if known else None


def watch_user_spans(queue: SpanQueue) -> None:
    """Export the spans of user code with those of an instance, unless the process has a provider."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        provider = UserTracerProvider()
        trace.set_tracer_provider(provider)
    if isinstance(provider, UserTracerProvider):
        provider.add(queue)
