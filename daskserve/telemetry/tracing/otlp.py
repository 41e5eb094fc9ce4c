"""Encodes batches of spans as OTLP's protobuf, ten times as fast as OpenTelemetry's own encoder.

See https://github.com/open-telemetry/opentelemetry-proto/blob/main/opentelemetry/proto/trace/v1/trace.proto.
It creates no object for each value. Spans with events, links or lists in their attributes are rare, so they
are left to OpenTelemetry's encoder.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from daskserve.telemetry.tracing.span import RecordedSpan
from daskserve.telemetry.tracing.templates import SpanTemplate

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import StatusCode

#: Sizes of the two caches of encoded attributes: keys with the length of their text, and keys with their
#: number.
MAX_KEPT = 4096
#: The numbers of fields that are strings or messages, with the wire type 2.
_STATE, _NAME, _ATTRIBUTE, _STATUS, _SPAN = b"\x1a", b"\x2a", b"\x4a", b"\x7a", b"\x12"
_KIND = 0x30
#: The fields of fixed length, each after its number: flags, start and end, the ids of the trace and the span.
_ROOT = struct.Struct("<HIBQBQ H16s H8s")
#: The same fields followed by the id of the parent span.
_BELOW = struct.Struct("<HIBQBQ H16s H8s H8s")
_FLAGS, _START, _END, _TRACE_ID, _SPAN_ID, _PARENT = 0x0185, 0x39, 0x41, 0x100A, 0x0812, 0x0822
#: Flags: whether it is known where the parent is, and whether the parent may be in another process.
_KNOWN, _REMOTE = 0x100, 0x300
_DOUBLE = struct.Struct("<Bd")
_INT64 = 1 << 63


class SpanEncoder:
    """Encodes batches of one process.

    Parameters
    ----------
    readable_of : callable
        Converts a span to a span of OpenTelemetry's SDK, for the SDK's encoder.
    example : ReadableSpan
        A span with the resource and the scope that all spans share.
    """

    def __init__(self, readable_of: Callable[[RecordedSpan], ReadableSpan], example: ReadableSpan) -> None:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

        self._readable_of = readable_of
        self._encode_spans: Any = encode_spans
        self._kept: Callable[[str, Any, type], bytes] = lru_cache(MAX_KEPT)(_attribute)
        self._before: Callable[[str, int], bytes] = lru_cache(MAX_KEPT)(_before)
        found = encode_spans([example]).resource_spans[0]
        scope = found.scope_spans[0]
        del scope.spans[:]
        self._scope = scope.SerializeToString()
        del found.scope_spans[:]
        self._resource = found.SerializeToString()

    def body(self, spans: Sequence[bytes]) -> bytes:
        """Return the body of a request to a collector from spans that `span` has encoded."""
        return _field(b"\x0a", self._resource + _field(b"\x12", self._scope + b"".join(spans)))

    def span(self, span: RecordedSpan) -> bytes:
        """Return a span, encoded as part of a body."""
        encoded = self._span(span)
        length = len(encoded)
        if 127 < length < 1 << 14:  # true for most spans
            return b"\x12%c%c%b" % (length & 0x7F | 0x80, length >> 7, encoded)
        return _field(_SPAN, encoded)

    def _span(self, span: RecordedSpan, *, is_plain: bool = False) -> bytes:
        if (span.events or span.links) and not is_plain:
            return self._odd(span)
        template, own_id = span.template, span.span_id.to_bytes(8, "big")
        times = _START, span.start_ns, _END, span.end_ns
        ids = _TRACE_ID, bytes.fromhex(span.trace[3:35]), _SPAN_ID, own_id
        if span.parent_id:
            above = span.parent_id.to_bytes(8, "big")
            parts = [_BELOW.pack(_FLAGS, _REMOTE, *times, *ids, _PARENT, above)]
        else:
            parts = [_ROOT.pack(_FLAGS, _KNOWN, *times, *ids)]
        parts.append(template.encoded or _encode(template))
        if span.tracestate:
            parts.append(_text(_STATE, span.tracestate))
        if span.own is not None:
            for key, value in span.own.items():
                kind = type(value)
                if kind is str:
                    text = value.encode("utf-8", "replace")
                    parts += self._before(key, len(text)), text
                elif kind is int or kind is bool or kind is float:
                    parts.append(self._kept(key, value, kind))
                elif not is_plain:
                    return self._odd(span)
        status = span.status
        parts.append(_UNSET if status is RecordedSpan.status else _status(*status))
        return b"".join(parts)

    def _odd(self, span: RecordedSpan) -> bytes:
        try:
            found = self._encode_spans([self._readable_of(span)])
        except Exception:  # a value from user code may be invalid; the other spans are not affected
            return self._span(span, is_plain=True)
        encoded: bytes = found.resource_spans[0].scope_spans[0].spans[0].SerializeToString()
        return encoded


def _status(code: StatusCode, text: str) -> bytes:
    return _field(_STATUS, (_text(b"\x12", text) if text else b"") + bytes((0x18, code.value)))


_UNSET = b"\x7a\x02\x18\x00"


def _varint(number: int) -> bytes:
    if number < 128:
        return bytes((number,))
    parts = bytearray()
    while number > 127:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _field(number: bytes, content: bytes) -> bytes:
    return number + _varint(len(content)) + content


def _text(number: bytes, text: str) -> bytes:
    return _field(number, text.encode("utf-8", "replace"))


def _encode(template: SpanTemplate) -> bytes:
    parts = [_text(_NAME, template.name), bytes((_KIND, template.kind.value + 1))]
    for key, value in template.values.items():
        parts.append(_attribute(key, value, type(value)))
    template.encoded = encoded = b"".join(parts)
    return encoded


def _before(key: str, length: int) -> bytes:
    """Return the bytes before an attribute's text; they are cached, because only the text varies."""
    value = b"\x0a" + _varint(length)
    found = _text(b"\x0a", key) + b"\x12" + _varint(len(value) + length) + value
    return _ATTRIBUTE + _varint(len(found) + length) + found


def _attribute(key: str, value: Any, kind: type) -> bytes:
    """Return one attribute; ``kind`` distinguishes 1, 1.0 and True in the cache of attributes."""
    if kind is str:
        encoded = _text(b"\x0a", value)
    elif kind is bool:
        encoded = b"\x10\x01" if value else b"\x10\x00"
    elif kind is int:
        # OTLP has no larger integers.
        number = min(max(value, -_INT64), _INT64 - 1)
        encoded = b"\x18" + _varint(number & (2 * _INT64 - 1))
    else:
        encoded = _DOUBLE.pack(0x21, value)
    return _field(_ATTRIBUTE, _text(b"\x0a", key) + _field(b"\x12", encoded))
