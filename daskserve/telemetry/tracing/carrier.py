"""The trace context of a request, as in W3C headers and as sent between processes.

It is a short list of strings in the request's head: ``traceparent``, ``tracestate`` and ``baggage``, as in
https://www.w3.org/TR/trace-context/ and https://www.w3.org/TR/baggage/. A request without a trace has no such
key. This module needs no OpenTelemetry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

#: The key of the trace context in a request's head, for a call and for HTTP.
TRACE: Final = "daskserve.trace"
#: ``[traceparent, tracestate, baggage]``; for a new trace ``[NEW, "", "", START]``, with its start time in
#: nanoseconds.
Carrier: TypeAlias = Sequence[str]
#: The length of a ``traceparent``.
LENGTH = 55
#: Replaces the ``traceparent`` in calls of a program that records no spans; the replica then begins the
#: trace.
NEW: Final = "new"

TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
BAGGAGE = b"baggage"
#: The headers that the ingress reads.
TRACE_HEADERS = frozenset((TRACEPARENT, TRACESTATE, BAGGAGE))
#: A longer value is cut, because it is sent with each call that a client's request causes.
MAX_TRACESTATE_BYTES = 512
MAX_BAGGAGE_BYTES = 8192
#: Maximum number of members of each.
MAX_TRACESTATE, MAX_BAGGAGE = 32, 180

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE_MEMBER = re.compile(
    r"(?:[a-z][_0-9a-z\-*/]{0,255}|[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_TOKEN, _VALUE, _SPACE = r"[!#-'*+\-.0-9A-Z^-z|~]+", r"[!#-+\--:<-\[\]-~]*", r"[ \t]{0,8}"
#: A name and a value, with properties; at most 4096 characters, which is OpenTelemetry's limit.
_BAGGAGE_MEMBER = re.compile(
    rf"(?=.{{2,4096}}$){_TOKEN}{_SPACE}={_SPACE}{_VALUE}(?:;{_TOKEN}(?:={_VALUE})?)*"
)
SAMPLED = 1


class Parent(NamedTuple):
    """The parent of a new span; both ids are 0 for the first span of a trace."""

    trace_id: int
    span_id: int
    flags: int

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)


NO_PARENT = Parent(0, 0, 0)


def parse_parent(text: str) -> Parent:
    """Return the content of a ``traceparent``; `NO_PARENT` if it is not valid."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None:
        return NO_PARENT
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more):
        return NO_PARENT
    parent = Parent(int(trace, 16), int(span, 16), int(flags, 16))
    return parent if parent.trace_id and parent.span_id else NO_PARENT


def parent_in(carrier: Carrier) -> Parent:
    """Return the parent in a carrier; `NO_PARENT` if there is none."""
    text = carrier[0] if carrier else ""
    if len(text) != LENGTH:
        return NO_PARENT
    # `traceparent` has written the text, so it need not be checked again.
    return Parent(int(text[3:35], 16), int(text[36:52], 16), int(text[53:], 16))


def traceparent(parent: Parent) -> str:
    """Return a ``traceparent``; empty if there is no parent."""
    if not parent.trace_id:
        return ""
    return f"00-{parent.trace_id:032x}-{parent.span_id:016x}-{parent.flags & 0xFF:02x}"


def trace_head(trace_id: int) -> str:
    """Return the prefix of a ``traceparent`` that all spans of a trace share."""
    return f"00-{trace_id:032x}-"


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> Carrier | None:
    """Return the trace context of a request's headers; None if there is none.

    Invalid values count as absent, so that they never fail a request.
    """
    found: dict[bytes, list[str]] = {}
    for name, value in headers:
        if name in TRACE_HEADERS:
            found.setdefault(name, []).append(value.decode("latin-1").strip())
    parents = found.get(TRACEPARENT, [])
    parent = parse_parent(parents[0]) if len(parents) == 1 else NO_PARENT
    baggage = _baggage(found.get(BAGGAGE, []))
    if not parent.trace_id:
        return ["", "", baggage] if baggage else None
    return [traceparent(parent), _state(found.get(TRACESTATE, [])), baggage]


def _state(values: Sequence[str]) -> str:
    """Return the members of ``tracestate``, in order; empty if one of them is invalid, as W3C requires."""
    members = _members(values, MAX_TRACESTATE_BYTES)
    keys = {each.partition("=")[0] for each in members}
    if len(keys) < len(members) or len(members) > MAX_TRACESTATE:
        return ""
    return ",".join(members) if all(map(_STATE_MEMBER.fullmatch, members)) else ""


def _baggage(values: Sequence[str]) -> str:
    """Return the valid members of ``baggage``; OpenTelemetry would log each invalid one."""
    members = _members(values, MAX_BAGGAGE_BYTES)[:MAX_BAGGAGE]
    return ",".join(filter(_BAGGAGE_MEMBER.fullmatch, members))


def _members(values: Sequence[str], limit: int) -> Sequence[str]:
    text = ",".join(values)
    return [member for each in text.split(",") if (member := each.strip(" \t"))] if len(text) <= limit else ()
