"""Batches of spans as OTLP's protobuf, without an object for each value, which is ten times as fast.

See https://github.com/open-telemetry/opentelemetry-proto/blob/main/opentelemetry/proto/trace/v1/trace.proto.
Spans with events, links or lists among their attributes are few; OpenTelemetry's own encoder takes them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from daskserve.telemetry.tracing.shared import SharedAttributes
from daskserve.telemetry.tracing.span import RecordedSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import StatusCode

#: How many keys, names, and numbers with their keys are kept encoded.
MAX_KEPT = 4096
#: The numbers of fields of text or messages, with the wire type 2.
_TRACE_ID, _SPAN_ID, _STATE, _PARENT, _NAME = b"\x0a\x10", b"\x12\x08", b"\x1a", b"\x22\x08", b"\x2a"
_KIND, _ATTRIBUTE, _STATUS = 0x30, b"\x4a", b"\x7a"
#: The kind, and the fixed fields start and end.
_TIMES = struct.Struct("<BBBQBQ")
#: OTLP's flags say that it is known whether the parent is in another process, and that it may be.
_FLAGS = b"\x85\x01" + struct.pack("<I", 0x100)
_FLAGS_BELOW = b"\x85\x01" + struct.pack("<I", 0x300)
_DOUBLE = struct.Struct("<Bd")
_INT64 = 1 << 63


class SpanEncoder:
    """Encodes batches of one process.

    Parameters
    ----------
    readable_of : callable
        Returns a span as one of OpenTelemetry's SDK, for its encoder.
    example : ReadableSpan
        One with the resource and the scope that all spans share.
    """

    def __init__(self, readable_of: Callable[[RecordedSpan], ReadableSpan], example: ReadableSpan) -> None:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

        self._readable_of = readable_of
        self._encode_spans: Any = encode_spans
        self._kept: Callable[[str, Any, type], bytes] = lru_cache(MAX_KEPT)(_attribute)
        self._name, self._key = lru_cache(MAX_KEPT)(_name), lru_cache(MAX_KEPT)(_key)
        found = encode_spans([example]).resource_spans[0]
        scope = found.scope_spans[0]
        del scope.spans[:]
        self._scope = scope.SerializeToString()
        del found.scope_spans[:]
        self._resource = found.SerializeToString()

    def body(self, spans: Sequence[bytes]) -> bytes:
        """Return the body of a request to a collector, with spans that `span` has returned."""
        return _field(b"\x0a", self._resource + _field(b"\x12", self._scope + b"".join(spans)))

    def span(self, span: RecordedSpan) -> bytes:
        """Return a span as part of a body."""
        return _field(b"\x12", self._span(span))

    def _span(self, span: RecordedSpan, *, is_plain: bool = False) -> bytes:
        if (span.events or span.links) and not is_plain:
            return self._odd(span)
        parts = [
            _TRACE_ID,
            bytes.fromhex(span.trace[3:35]),
            _SPAN_ID,
            span.span_id.to_bytes(8, "big"),
            self._name(span.name),
            _TIMES.pack(_KIND, span.kind.value + 1, 0x39, span.start_ns, 0x41, span.end_ns),
        ]
        if span.parent_id:
            parts += (_PARENT, span.parent_id.to_bytes(8, "big"), _FLAGS_BELOW)
        else:
            parts.append(_FLAGS)
        if span.tracestate:
            parts.append(_text(_STATE, span.tracestate))
        shared = span.shared
        parts.append(shared.encoded or self._shared(shared))
        for key, value in (span.own or {}).items():
            kind = type(value)
            if kind is str:
                parts.append(self._text(key, value))
            elif kind is int or kind is bool or kind is float:
                parts.append(self._kept(key, value, kind))
            elif not is_plain:
                return self._odd(span)
        status = span.status
        parts.append(_UNSET if status is RecordedSpan.status else _status(*status))
        return b"".join(parts)

    def _shared(self, shared: SharedAttributes) -> bytes:
        values = shared.values.items()
        encoded = b"".join([_attribute(key, value, type(value)) for key, value in values])
        shared.encoded = encoded
        return encoded

    def _text(self, key: str, text: str) -> bytes:
        """Return an attribute with a text, which is often another one for each span, and so is not kept."""
        encoded = text.encode("utf-8", "replace")
        length, prefix = len(encoded), self._key(key)
        whole = len(prefix) + length + 4
        if whole > 127:
            return _attribute(key, text, str)
        return b"%b%c%b\x12%c\x0a%c%b" % (_ATTRIBUTE, whole, prefix, length + 2, length, encoded)

    def _odd(self, span: RecordedSpan) -> bytes:
        try:
            found = self._encode_spans([self._readable_of(span)])
        except Exception:  # user code may have put anything into it, which costs the others nothing
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


def _key(text: str) -> bytes:
    return _text(b"\x0a", text)


def _name(text: str) -> bytes:
    return _text(_NAME, text)


def _attribute(key: str, value: Any, kind: type) -> bytes:
    """Return one attribute; its ``kind`` tells 1, 1.0 and True apart where attributes are kept."""
    if kind is str:
        encoded = _text(b"\x0a", value)
    elif kind is bool:
        encoded = b"\x10\x01" if value else b"\x10\x00"
    elif kind is int:
        # Greater numbers have no place in OTLP.
        number = min(max(value, -_INT64), _INT64 - 1)
        encoded = b"\x18" + _varint(number & (2 * _INT64 - 1))
    else:
        encoded = _DOUBLE.pack(0x21, value)
    return _field(_ATTRIBUTE, _text(b"\x0a", key) + _field(b"\x12", encoded))
