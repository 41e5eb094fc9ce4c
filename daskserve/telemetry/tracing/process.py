"""The spans of one instance in one process: which requests are sampled, and where their spans go.

A request creates only plain records. A thread turns them into spans of OpenTelemetry's SDK and passes them to
processors, which export them in batches. So no request waits for the import of an exporter, or for a
collector that is unreachable, slow or full. Spans beyond `MAX_PENDING` are dropped, and counted.

In a busy process, a span has left the processor's caches before the thread reads it, and it occupies memory
until then. Therefore, the code that ends a span also encodes some ended spans, unless this would call user
code or the SDK's slow encoder. The encoded bytes wait for the exporter's thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from daskserve.common.clock import system_rng
from daskserve.telemetry.collector import PROCESS
from daskserve.telemetry.table import MetricSample
from daskserve.telemetry.tracing.carrier import NEW, NO_PARENT, Carrier, Parent, parent_in, trace_head
from daskserve.telemetry.tracing.templates import SpanTemplate, SpanTemplates

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.export import Export
    from daskserve.telemetry.tracing.span import RecordedSpan

logger = logging.getLogger("daskserve.tracing")

#: How long the thread lets spans accumulate. A longer time would need more memory than fits into the
#: processor's caches.
GATHER_S = 0.1
#: Maximum number of waiting spans that only the thread may encode.
MAX_SLOW = 2048
#: Time limit for the export of the last spans when the instance ends.
FLUSH_S = 5.0
#: The key of `Tracing` among the objects that the parts of an instance share in a process.
KEY = "tracing"


class Tracing:
    """Creates the spans of an instance in this process, and keeps them until they are exported.

    Parameters
    ----------
    config : mapping
        The values of `daskserve.options.tracing.TracingConfig`.
    resource : mapping
        The attributes of the process that all spans share.
    call_imported, post_of : callable
        See `daskserve.telemetry.tracing.export.open_export`.
    """

    def __init__(
        self,
        instance: str,
        config: Mapping[str, Any],
        resource: Mapping[str, Any],
        call_imported: Callable[[str, str], Any],
        post_of: Callable[[Any], Callable[[bytes], bool] | None],
    ) -> None:
        from opentelemetry.trace import SpanKind  # slow to import

        from daskserve.telemetry.tracing.span import RecordedSpan, SpanQueue

        self._rng = system_rng()
        self._wakes, self._closing = threading.Event(), threading.Event()
        self.queue = SpanQueue(self._rng.getrandbits, self._wake, self._export_some)
        self._passing = _Passing(self.queue.pending)
        #: ``begin(template, trace, parent_id)`` begins a span; see `RecordedSpan`.
        self.begin: Callable[[SpanTemplate, str, int], RecordedSpan] = partial(RecordedSpan, self.queue)
        self.templates = SpanTemplates()
        self._internal_kind = SpanKind.INTERNAL
        #: The template of spans whose route or replica is set when they are exported.
        self.unrouted = SpanTemplate("HTTP", SpanKind.SERVER)
        self.instance = instance
        self.config = config
        self.resource = resource
        self._how = call_imported, post_of
        self.ratio: float = config["sampling_ratio"]
        self._thread: threading.Thread | None = None
        self.export: Export | None = None

    def __repr__(self) -> str:
        return f"<Tracing of {self.instance!r}, {self._passing.count} spans, {self.queue.dropped} dropped>"

    def start(self) -> None:
        """Begin to export."""
        self._thread = threading.Thread(target=self._work, name="daskserve-traces", daemon=True)
        self._thread.start()
        PROCESS.add(self)

    def close(self) -> None:
        """Export the remaining spans in the background; later spans are dropped. Idempotent."""
        self.queue.is_closed = True
        self._closing.set()
        self._wakes.set()
        PROCESS.remove(self)

    def join(self, timeout_s: float) -> None:
        """Wait until `close` has exported the remaining spans."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    # ---- on the request path

    def draws(self) -> bool:
        """Return whether a request that belongs to no trace is sampled."""
        return self._rng.random() < self.ratio

    def span(
        self,
        name: str,
        parent: Parent,
        attributes: dict[str, Any] | None,
        tracestate: str = "",
    ) -> RecordedSpan:
        """Begin a span with these attributes; without a parent, it begins a new trace."""
        trace = trace_head(parent.trace_id or self.queue.bits(128) | 1)
        found = self.begin(SpanTemplate(name, self._internal_kind), trace, parent.span_id)
        if attributes is not None:
            found.own = attributes
        if tracestate:
            found.tracestate = tracestate
        return found

    def under(self, carrier: Carrier, name: str, own: dict[str, Any] | None = None) -> RecordedSpan | None:
        """Begin a child of the span in a carrier; None if its trace is not sampled."""
        if carrier and carrier[0] == NEW:
            found = self.span(name, NO_PARENT, own)
            found.start_ns = int(carrier[3])
            return found
        parent = parent_in(carrier)
        return self.span(name, parent, own, carrier[1]) if parent.is_sampled else None

    def _export_some(self) -> None:
        """Export the ended spans that are encoded quickly, unless another thread does it."""
        if self.export is not None and not self.export.processors:
            self.queue.dropped += self._passing.some(self.export)

    def _wake(self) -> None:
        """Export the ended spans soon."""
        self.queue.is_awake = True
        self._wakes.set()

    # ---- the thread

    def _work(self) -> None:
        from daskserve.telemetry.tracing.export import open_export

        try:
            path = self.config["exporter_import_path"]
            self.export = open_export(self.resource, path, *self._how)
        except Exception as error:
            logger.error(
                "The spans of instance %r are dropped: %s",
                self.instance,
                error,
                exc_info=not _is_plain(error),
            )
        while True:
            self._wakes.wait()
            self._closing.wait(GATHER_S)
            self._wakes.clear()
            self.queue.is_awake = False
            self._drain()
            if self.queue.is_closed:
                break
        if self.export is not None:
            self.export.close(FLUSH_S)

    def _drain(self) -> None:
        self.queue.dropped += self._passing.all(self.export)

    def samples(self) -> list[MetricSample]:
        """Return the metric samples; see `daskserve.telemetry.table.Source`."""
        labels, export = (self.instance,), self.export
        late = 0 if export is None else export.dropped
        found: list[MetricSample] = [
            ("trace_spans", labels, self._passing.count + self.queue.dropped),
            ("trace_spans_dropped", labels, self.queue.dropped + late),
        ]
        if export is not None:
            found += [
                ("trace_spans_exported", labels, export.exported),
                ("trace_spans_failed", labels, export.failed),
            ]
        return found


class _Passing:
    """Passes ended spans on to the exporters, in one thread at a time."""

    def __init__(self, pending: deque[RecordedSpan]) -> None:
        self._pending = pending
        #: Ended spans that only the thread encodes.
        self._slow: list[RecordedSpan] = []
        self._lock = threading.Lock()
        self._passed = 0

    @property
    def count(self) -> int:
        """The number of spans that were exported or wait to be."""
        return self._passed + len(self._pending) + len(self._slow)

    def some(self, export: Export) -> int:
        """Export the spans that are cheap to encode; do nothing if another thread is exporting.

        Return how many were dropped.
        """
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            spans = self._take()
            slow = [each for each in spans if each.events or each.links]
            if slow:
                spans = [each for each in spans if not (each.events or each.links)]
            room = max(0, MAX_SLOW - len(self._slow))
            self._slow += slow[:room]
            self._put(export, spans)
            return len(slow[room:])
        finally:
            self._lock.release()

    def all(self, export: Export | None) -> int:
        """Export all spans; return how many were dropped."""
        with self._lock:
            slow, self._slow = self._slow, []
            spans = slow + self._take()
            if export is None:
                return len(spans)
            self._put(export, spans)
            return 0

    def _take(self) -> list[RecordedSpan]:
        return [self._pending.popleft() for _ in range(len(self._pending))]

    def _put(self, export: Export, spans: Sequence[RecordedSpan]) -> None:
        self._passed += len(spans)
        if export.is_used:
            for span in spans:
                try:
                    span.complete()
                except Exception:
                    logger.exception("Some attributes of a span could not be computed")
            export.put(spans)


def _is_plain(error: Exception) -> bool:
    """Return whether the message of an error is enough, without a traceback."""
    return isinstance(error, ImportError)


def tracing_of(shared: Mapping[str, Any]) -> Tracing | None:
    """Return the tracing of an instance from the objects that its parts share; None if it is not traced."""
    return shared.get(KEY)


def disable(shared: Mapping[str, Any], timeout_s: float = 0.0) -> None:
    """End the tracing of an instance in this process; idempotent.

    Parameters
    ----------
    timeout_s : float
        How long to wait for the export of the remaining spans.
    """
    tracing = tracing_of(shared)
    if tracing is not None:
        tracing.close()
        tracing.join(timeout_s)
