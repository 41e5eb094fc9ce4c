"""Spans of batched calls: one for each call, and one for their batch.

The span of a batch belongs to the trace of its first sampled call, and has links to the spans of all calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from daskserve.common.error_types import error_type
from daskserve.telemetry.tracing.current import loaded

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.span import RecordedSpan


def recorded_span() -> RecordedSpan | None:
    """Return the span of the current code; None if it is not recorded."""
    module = loaded("daskserve.telemetry.tracing.span", "RecordedSpan")
    if module is None:
        return None
    current = sys.modules["opentelemetry.trace"].get_current_span()
    return current if isinstance(current, module.RecordedSpan) else None


def span_of_item(
    name: str, above: RecordedSpan | None = None, waiting: Callable[[], int] | None = None
) -> RecordedSpan | None:
    """Begin the span of one call, below a span or the current one; None if the parent is not recorded.

    ``waiting`` returns how many calls are already waiting for their batch.
    """
    above = above or recorded_span()
    if above is None:
        return None
    attributes: dict[str, Any] = {"daskserve.step": "batched_call"}
    if waiting is not None:
        attributes["daskserve.queue.waiting_before"] = waiting()
    return above.child(f"batched call {name}", attributes)


class SpansOfBatch:
    """The spans of a batch and of its calls, for a block in which the batch runs.

    User code of the batch runs in the context of the call that started it, but outside the trace of that
    call.
    """

    __slots__ = ("_batch", "_kind", "_name", "_size", "_spans")

    def __init__(self, name: str, spans: Sequence[RecordedSpan | None], kind: str = "batch") -> None:
        self._name = name
        self._kind = kind
        self._size = len(spans)
        self._spans = [each for each in spans if each is not None]
        self._batch: RecordedSpan | None = None

    def __enter__(self) -> SpansOfBatch:
        if self._spans:
            self.begin()
        if "opentelemetry.context" in sys.modules:
            self.enter()
        return self

    def begin(self) -> None:
        """Begin the span of the batch."""
        if not self._spans:
            return
        first = self._spans[0]
        size = {"daskserve.batch.size": self._size}
        self._batch = batch = first.child(
            f"{self._kind} {self._name}", {"daskserve.step": self._kind, **size}
        )
        for each in self._spans:
            batch.add_link(each.get_span_context())
            each.add_event(f"{self._kind} begins", size)
            if each is not first:
                each.add_link(batch.get_span_context())

    def enter(self) -> None:
        """Make the span of the batch current, or leave the trace of the call that started the batch."""
        from daskserve.telemetry.tracing.context import enter, is_empty

        if self._batch is not None or not is_empty():
            enter((), self._batch)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.end(exc_val)

    def end(self, error: BaseException | None = None) -> None:
        """End all spans."""
        if self._batch is None:
            return
        self.end_batch(error)
        for each in self._spans:
            each.end()

    def end_batch(self, error: BaseException | None = None, **attributes: int) -> None:
        """End only the span of the batch, with additional attributes."""
        if self._batch is None:
            return
        if error is not None:
            from daskserve.telemetry.tracing.span import note_failure

            self._batch.record_exception(error)
            note_failure(self._batch, error_type(error))
        self._batch.set_attributes({f"daskserve.batch.{name}": value for name, value in attributes.items()})
        self._batch.end()


class SpansOfSteps:
    """The spans of the steps of a continuous batch: one for all consecutive steps with the same calls.

    With a span for each step, one call could have thousands of spans. User code runs within these spans, in
    the context in which they begin.
    """

    __slots__ = ("_batch", "_calls", "_name", "_steps")

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: Sequence[Any] = ()
        self._batch: SpansOfBatch | None = None
        self._steps = 0

    def begin(self, kind: str, calls: Sequence[Any]) -> None:
        """Record a call of user code, with the same list of requests as before or a new one."""
        if calls is self._calls:
            self._steps += 1
            return
        was_inside = self._batch is not None
        self.end()
        self._calls, self._steps = calls, 1
        spans = [each.span for each in calls]
        if was_inside or any(each is not None for each in spans):
            self._batch = SpansOfBatch(self._name, spans, "batch" if kind == "step" else kind)
            self._batch.begin()
            self._batch.enter()

    def end(self, error: BaseException | None = None) -> None:
        """End the span that is open; idempotent."""
        if self._batch is not None:
            self._batch.end_batch(error, steps=self._steps)
        self._batch, self._calls = None, ()
