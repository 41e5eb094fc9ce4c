"""The spans of an instance in this process, kept in a list instead of exported."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


class Collected(SpanExporter):
    """Keeps the spans of all workers of this process."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.may_go_on.wait(20)
        if self.fails:
            raise OSError("the collector is away")
        self.spans += spans
        return SpanExportResult.SUCCESS


COLLECTED = Collected()


def exporter() -> SpanExporter:
    return COLLECTED


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setattr(f"{__name__}.COLLECTED", found := Collected())
    yield found
    found.may_go_on.set()


CONFIG = {"exporter_import_path": f"{__name__}:exporter", "sampling_ratio": 1.0}


def until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def path_of(span: ReadableSpan, spans: Sequence[ReadableSpan]) -> str:
    """Return the names of a span and of its ancestors."""
    by_id = {each.context.span_id: each for each in spans}
    names = []
    found: ReadableSpan | None = span
    while found is not None:
        names.append(found.name)
        found = None if found.parent is None else by_id.get(found.parent.span_id)
    return " < ".join(names)
